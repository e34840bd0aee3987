"""Models in local folders: loading, running over tokens, and remembering which folder has which identity.

`models.json` under `kvcellar.profile.home()` keeps, per folder, the sizes and times of its files and the identity
they gave, so a fingerprint is computed once, and `generate` finds the model of an archive without being told.
Nothing here contacts a hub.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import InvalidInput, MissingExtra
from ...geometry import Geometry
from ...identity import Identity
from ...profile import home
from ...store.local import LocalStore
from ..fingerprint import identity_of_model
from ..transformers import dtype_of, take_cache
from .common import progress

CHUNK = 512
ROWS = 64
_WEIGHTS = (".safetensors", ".bin", ".json")


class LocalModel:
    """A causal language model and its tokenizer from a folder, with the identity its caches have."""

    def __init__(self, folder: str | os.PathLike[str], dtype: str = "auto"):
        self.folder = Path(folder).resolve()
        if not (self.folder / "config.json").is_file():
            raise InvalidInput(f"{folder} holds no transformers model: there is no config.json in it")
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
            from transformers.utils import logging
        except ImportError as error:
            raise MissingExtra("running a model needs the extra: pip install 'kvcellar[hf]'") from error
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        wanted = "auto" if dtype == "auto" else dtype_of(dtype)
        try:
            self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=wanted, local_files_only=True).eval()
            self.tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise InvalidInput(f"{folder} cannot be loaded: {str(error).splitlines()[0]}") from error
        self.identity = remembered_identity(self.folder, str(self.model.dtype), self.model)

    @property
    def max_tokens(self) -> int | None:
        limit = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None

    def encode(self, text: str, *, continues: bool = False) -> list[int]:
        """Token ids of `text`; without special tokens when it continues another text."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=not continues).input_ids
        return ids

    def require_room(self, tokens: int) -> None:
        if self.max_tokens is not None and tokens > self.max_tokens:
            raise InvalidInput(f"{tokens:,} tokens; the model has positions for {self.max_tokens:,}")

    def prefill(
        self, ids: list[int] | np.ndarray, cache: Any, *, quiet: bool, probabilities: bool = False
    ) -> np.ndarray | None:
        """Run the model over `ids` behind what `cache` holds already, in chunks of 512 tokens.

        With `probabilities`, gives log2 of what the model thought each of them worth before it read it, float32 (T,):
        0 for the first of all, which is given to it; NaN for a first one behind others, of which it spoke before. That
        is the same forward, with logits of every position in place of the last.
        """
        told = np.full(len(ids), np.nan, np.float32) if probabilities else None
        before = None
        with torch.inference_mode(), progress(f"prefill {len(ids):,} tokens", len(ids), quiet=quiet) as advance:
            if told is not None and len(ids) and not cache.get_seq_length():
                told[0] = 0.0
            for start in range(0, len(ids), CHUNK):
                chunk = torch.tensor([list(ids[start : start + CHUNK])])
                said = self.model(chunk, cache=cache, use_cache=True, logits_to_keep=0 if probabilities else 1).logits
                if told is not None:
                    stop = start + chunk.shape[1]
                    if before is not None:
                        told[start : start + 1] = log2_probs_of(before, chunk[0, :1])
                    told[start + 1 : stop] = log2_probs_of(said[0, :-1], chunk[0, 1:])
                    before = said[0, -1:].clone()
                advance(chunk.shape[1])
        return told


class MeasuredModel(LocalModel):
    """A model as benches and calibration run it: computing in float32, its caches held in `cache_dtype`, its own
    or the `dtype` that is given.

    One whose weights would fill more than half of the machine's memory in float32 computes in its own dtype. The
    identity is that of the model in that dtype.
    """

    def __init__(self, folder: str | os.PathLike[str], dtype: str = "auto"):
        super().__init__(folder, dtype)
        self.cache_dtype: torch.dtype = self.model.dtype
        if fits_memory(self.model, torch.float32, share=0.5):
            self.model = self.model.float()


def log2_probs_of(logits: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    """log2 softmax(logits)[i, ids[i]], float32 (T,), of logits (T, vocabulary) and ids int64 (T,).

    In float32 and in runs of 64 rows, so that no second copy of all logits is made. NaN where the logits give no
    finite one.
    """
    bits = np.full(len(ids), np.nan, np.float32)
    for start in range(0, len(ids), ROWS):
        rows, wanted = logits[start : start + ROWS].float(), ids[start : start + ROWS]
        told = (rows.gather(1, wanted[:, None])[:, 0] - rows.logsumexp(1)) / math.log(2)
        bits[start : start + ROWS] = torch.where(torch.isfinite(told), told.clamp(max=0.0), torch.nan).numpy()
    return bits


def fits_memory(model: Any, dtype: torch.dtype, *, share: float) -> bool:
    """Whether the weights of `model` in `dtype` fill at most `share` of the machine's memory."""
    nbytes: int = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    return nbytes <= share * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def held_in(cache: Any, dtype: torch.dtype) -> Any:
    """`cache` itself, a transformers cache, after its keys and values were rounded or widened to `dtype`."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)
    return cache


def cache_geometry(local: LocalModel) -> Geometry:
    """The geometry of the model's caches, from running it over one token. Raises UnsupportedCache."""
    cache = empty_cache()
    local.prefill([0], cache, quiet=True)
    return take_cache(held_in(cache, getattr(local, "cache_dtype", local.model.dtype))).geometry


def empty_cache() -> Any:
    from transformers import DynamicCache

    return DynamicCache()


def read_text(path: str) -> str:
    """A text file, or standard input for "-". Raises InvalidInput when it cannot be read, is not UTF-8, or is empty."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not text.strip():
        raise InvalidInput(f"{path} is empty: there is nothing to run the model over")
    return text


def remembered_identity(folder: Path, dtype: str, model: Any) -> Identity:
    """The identity of the model in `folder`, computed anew only when one of its files changed."""
    stamps = {
        entry.name: [entry.stat().st_size, entry.stat().st_mtime_ns]
        for entry in sorted(os.scandir(folder), key=lambda e: e.name)
        if entry.is_file() and entry.name.endswith(_WEIGHTS)
    }
    known = _remembered()
    key = f"{folder} {dtype}"
    entry = known.get(key)
    if isinstance(entry, dict) and entry.get("files") == stamps:
        return Identity(**entry["identity"])
    identity = identity_of_model(model)
    known[key] = {"folder": str(folder), "files": stamps, "identity": identity.to_json()}
    home().mkdir(parents=True, exist_ok=True)
    with LocalStore(home()).replacing("models.json") as pending:
        pending.append(json.dumps(known, indent=1).encode())
    return identity


def folder_of(identity: Identity) -> Path:
    """The folder where this machine last saw the model with `identity`. Raises InvalidInput when it never did."""
    for entry in _remembered().values():
        if Identity(**entry["identity"]).same(identity) and Path(entry["folder"]).is_dir():
            return Path(entry["folder"])
    raise InvalidInput(f"no folder known for {identity}; name it with --model DIR")


def _remembered() -> dict[str, Any]:
    try:
        known = json.loads((home() / "models.json").read_text())
        return {k: v for k, v in known.items() if isinstance(v, dict) and {"folder", "files", "identity"} <= set(v)}
    except (OSError, ValueError, AttributeError):
        return {}
