"""Peers that run in processes and environments of their own (`environments.py`).

One process per environment and script answers one JSON object a line; `outside_peers/serve.py` states the protocol.
What comes back is checked: a peer cannot be scored on a cache of another shape, or on bytes that are none.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...cache import KVCache, LayerKV
from ...errors import InvalidInput, KVCellarError, MissingExtra
from ..transformers import give_cache
from .coded import Coded
from .environments import ENVIRONMENTS, HERE, Environment
from .jsonlines import tell

SCRIPTS = Path(__file__).parent / "outside_peers"


class PeerProcess:
    """A peer's script, started once. Raises KVCellarError when it answers with an error, with nonsense, or dies."""

    def __init__(self, script: Path, environ: Mapping[str, str]):
        self.script = script
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, **environ},
        )
        self._answer()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        tell(self.process, message)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise KVCellarError(f"{self.script.name} ended with exit code {self.process.wait()}: {self._last_words()}")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self.close()
            raise KVCellarError(f"{self.script.name} answered {line[:80]!r}; expected one JSON object a line")
        if "error" in answer:
            raise KVCellarError(f"{self.script.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def close(self) -> None:
        """End the process; what it still works on is lost."""
        self.process.kill()
        self.process.communicate()
        self.log.close()


_running: dict[tuple[str, str], PeerProcess] = {}


@atexit.register
def close_all() -> None:
    """End every peer's process."""
    while _running:
        _running.popitem()[1].close()


@dataclass(frozen=True)
class Outside:
    """A peer: a script's `peer` with `options`, in an environment. Called like every peer, with the window besides.

    `runs_model` says that it reads the tokens itself, and answers with logits where there is a continuation;
    `gives_cache` that what it keeps can be read without it. Raises MissingExtra when the environment is not there,
    InvalidInput when a peer that runs the model is not given `tokens`, or has neither logits nor a cache to give,
    KVCellarError when the peer fails or gives back something other than a cache of the same shape.
    """

    script: Path
    peer: str
    environment: Environment
    options: Mapping[str, Any] = field(default_factory=dict)
    runs_model: bool = False
    gives_cache: bool = True

    def __call__(
        self, cache: Any, config: Any, *, tokens: Sequence[int] | None = None, following: Sequence[int] | None = None
    ) -> Coded:
        if self.runs_model and tokens is None:
            raise InvalidInput(f"{self.peer} runs the model itself: it needs the tokens")
        if not self.gives_cache and following is None:
            raise InvalidInput(f"{self.peer} gives no cache, only logits: it needs a continuation")
        process = self._process()
        given = {
            f"{side}{index}": x[0].contiguous()
            for index, layer in enumerate(cache.layers)
            for side, x in (("k", layer.keys), ("v", layer.values))
        }
        with tempfile.TemporaryDirectory(prefix="kvcellar-peer-") as scratch:
            paths = {"cache": str(Path(scratch) / "in.safetensors"), "out": str(Path(scratch) / "out.safetensors")}
            known = {} if tokens is None else {"tokens": torch.tensor(list(tokens), dtype=torch.int64)}
            save_file({**given, **known}, paths["cache"])
            message: dict[str, Any] = {
                **paths,
                "peer": self.peer,
                "options": dict(self.options),
                "model": _model(config),
            }
            if self.runs_model and following is not None:
                message["following"] = list(following)
            answer = process.ask(message)
            try:
                back = load_file(paths["out"])
            except (OSError, SafetensorError) as error:
                raise KVCellarError(f"{self.peer} left no readable tensors: {error}") from error
        numbers = _numbers(self.peer, answer)
        if not self.runs_model:
            return Coded(_restored(self.peer, given, back), **numbers)
        logits = None if following is None else _logits(self.peer, back, len(following) - 1, config.vocab_size)
        return Coded(_kept(self.peer, given, back) if self.gives_cache else None, **numbers, logits=logits)

    def _process(self) -> PeerProcess:
        self.environment.require()
        if not self.script.is_file():
            raise MissingExtra(f"{self.script} is not here; it is part of kvcellar's source, run the bench from there")
        key = (str(self.script), str(self.environment.folder))
        if key in _running and not _running[key].alive:
            _running.pop(key).close()
        if key not in _running:
            threads = str(torch.get_num_threads())
            _running[key] = PeerProcess(self.script, {**self.environment.variables(), "OMP_NUM_THREADS": threads})
        return _running[key]


def _model(config: Any) -> dict[str, Any]:
    """What a peer may know of the model: its rotary base, the width of a head, and the folder it was loaded from."""
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return {"rope_theta": rope.get("rope_theta"), "head_dim": width, "folder": config.name_or_path}


def _numbers(peer: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of an answer. Raises KVCellarError for one that is missing or cannot be."""
    found = {
        "nbytes": answer.get("nbytes"),
        "payload_nbytes": answer.get("payload_nbytes"),
        "payload_tokens": answer.get("payload_tokens"),
        "profile_nbytes": answer.get("profile_nbytes", 0),
        "save_s": answer.get("save_s"),
        "restore_s": answer.get("restore_s"),
        "kept": answer.get("kept", 1.0),
    }
    for name, number in found.items():
        if number is None and name in ("payload_nbytes", "payload_tokens", "restore_s"):
            continue
        kinds = (int,) if name.endswith(("nbytes", "tokens")) else (int, float)
        right = isinstance(number, kinds) and not isinstance(number, bool) and math.isfinite(number) and number >= 0
        if not right or (name == "kept" and not 0 < number <= 1) or (name == "nbytes" and number == 0):
            raise KVCellarError(f"{peer} answered {number!r} for {name}; expected a number that can be one")
    return {**found, "note": str(answer.get("note", ""))}


def _cache_of(tensors: Mapping[str, Tensor], layers: int, tokens: int) -> Any:
    held = {index: LayerKV(tensors[f"k{index}"], tensors[f"v{index}"]) for index in range(layers)}
    return give_cache(held, KVCache(tuple(held.values())).geometry, length=tokens)


def _restored(peer: str, given: Mapping[str, Tensor], back: Mapping[str, Tensor]) -> Any:
    """The cache that came back, which must have the shape and dtype of the one given."""
    for name, x in given.items():
        y = back.get(name)
        if y is None or y.shape != x.shape or y.dtype != x.dtype:
            came = "nothing" if y is None else f"{tuple(y.shape)} {y.dtype}"
            raise KVCellarError(f"{peer} gave {came} for {name}; expected {tuple(x.shape)} {x.dtype}")
    return _cache_of(back, len(given) // 2, given["k0"].shape[1])


def _kept(peer: str, given: Mapping[str, Tensor], back: Mapping[str, Tensor]) -> Any:
    """The kept tokens as a cache that stands for the whole prefix; heads and layers must keep equally many."""
    tokens = given["k0"].shape[1]
    held = back["k0"].shape[1] if "k0" in back else 0
    for name, x in given.items():
        y = back.get(name)
        if y is None or y.shape != (x.shape[0], held, x.shape[2]) or not 0 < held <= tokens:
            came = "nothing" if y is None else str(tuple(y.shape))
            raise KVCellarError(f"{peer} kept {came} of {name}; expected as many tokens of {tuple(x.shape)} everywhere")
    return _cache_of(back, len(given) // 2, tokens)


def _logits(peer: str, back: Mapping[str, Tensor], rows: int, vocabulary: int) -> Tensor:
    logits = back.get("logits")
    if logits is None or logits.shape != (rows, vocabulary):
        came = "none" if logits is None else str(tuple(logits.shape))
        raise KVCellarError(f"{peer} gave logits {came}; expected {(rows, vocabulary)}")
    return logits


CODECS = {f"turboquant-{bits}": ("turboquant", {"bits": bits}) for bits in (4, 3, 2)}
CODECS |= {
    f"nexusquant-k{keys}v{values}": ("nexusquant", {"key_bits": keys, "value_bits": values})
    for keys, values in ((4, 4), (3, 3), (3, 2), (2, 2))
}
CODECS |= {f"kakeyalattice-q{q}": ("kakeyalattice", {"q_range": q}) for q in (10, 4, 2)}
CACHEGEN: dict[str, dict[str, Any]] = {
    "cachegen": {"chunk": 256},  # LMCache's own chunk
    "cachegen-1024": {"chunk": 1024},
    "cachegen-8bins-1024": {"chunk": 1024, "bins": 8},
}
PRESSES: dict[str, dict[str, Any]] = {
    "streamingllm": {"press": "StreamingLLMPress"},
    "keydiff": {"press": "KeyDiffPress"},
    "compactor": {"press": "CompactorPress"},
    "expectedattention": {"press": "ExpectedAttentionPress"},
    "merging": {"press": "ExpectedAttentionPress", "merging": True},
    "snapkv": {"press": "SnapKVPress"},
    "knorm": {"press": "KnormPress"},
    "kvzip": {"press": "KVzipPress"},
}
KEPT = (0.5, 0.25, 0.1)
KVTC = ("kvtc-fine", "kvtc", "kvtc-small")
BASELINE = Path("benchmarks/baselines/peer.py")  # our own, for those who have the source

_codecs, _lmcache, _kvpress = ENVIRONMENTS
OUTSIDE: dict[str, Outside] = {
    name: Outside(SCRIPTS / "codecs.py", peer, _codecs, options) for name, (peer, options) in CODECS.items()
}
OUTSIDE |= {name: Outside(SCRIPTS / "cachegen.py", name, _lmcache, options) for name, options in CACHEGEN.items()}
OUTSIDE |= {name: Outside(BASELINE, name, HERE) for name in KVTC}
OUTSIDE |= {
    f"kvpress-{name}-{kept}": Outside(
        SCRIPTS / "presses.py",
        name,
        _kvpress,
        {**options, "kept": kept},
        runs_model=True,
        gives_cache=name != "kvzip",  # it only masks, each head another number of tokens
    )
    for name, options in PRESSES.items()
    for kept in KEPT
}
