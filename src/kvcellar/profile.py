"""Calibrated state of a recipe (codebooks, bases, predictors), named by its content.

The id is SHA-256 over the tensors (name, dtype, shape, little-endian bytes, sorted by name) and the metadata, never
over a container file, so the same profile has one id wherever it was saved. Containers are safetensors files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from .errors import ProfileMismatch, ProfileMissing
from .identity import frame
from .recipe import canonical_json

_METADATA_KEY = "kvcellar"
KEPT = 2  # profiles that were read last


def home() -> Path:
    """Where profiles, the demo model and known fingerprints are kept: $KVCELLAR_HOME, else the user's cache folder."""
    if chosen := os.environ.get("KVCELLAR_HOME"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcellar"


@dataclass(frozen=True)
class Profile:
    """`tensors` by name (numpy, any numeric dtype) and `metadata` that JSON can hold: model, texts, arithmetic id."""

    tensors: Mapping[str, np.ndarray]
    metadata: Mapping[str, object]

    @cached_property
    def id(self) -> str:
        """64 hex digits."""
        digest = hashlib.sha256(frame("kvcellar-profile/1", [canonical_json(dict(self.metadata))]))
        for name in sorted(self.tensors):
            tensor = np.asarray(self.tensors[name], order="C")
            little = tensor.astype(tensor.dtype.newbyteorder("<"), copy=False)
            shape = ",".join(map(str, tensor.shape))
            digest.update(frame("tensor", [name, tensor.dtype.name, shape, little.tobytes()]))
        return digest.hexdigest()

    @cached_property
    def ready(self) -> dict[object, Any]:
        """What this process has made of the profile and uses again (`pipeline.ready`); no part of it."""
        return {}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def pack(self) -> bytes:
        """A safetensors container."""
        tensors = {name: np.asarray(tensor, order="C") for name, tensor in self.tensors.items()}
        return safetensors.numpy.save(tensors, metadata={_METADATA_KEY: json.dumps(dict(self.metadata))})

    @classmethod
    def unpack(cls, data: bytes) -> Profile:
        """Raises ProfileMismatch when the container is damaged."""
        try:
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + length]) if length <= len(data) - 8 else {}
            metadata = json.loads(header["__metadata__"][_METADATA_KEY])
            return cls(safetensors.numpy.load(data), metadata)
        except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ProfileMismatch(f"damaged profile container ({error})") from error

    def save(self, folder: Path | None = None) -> Path:
        """Write the profile under its id into `folder` (default: profiles/ under `home()`); returns the file."""
        from .store.local import LocalStore

        folder = folder or home() / "profiles"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{self.id}.safetensors"
        with LocalStore(folder).replacing(name) as pending:
            pending.append(self.pack())
        return folder / name


def find_profile(wanted: str | None, argument: Profile | None, embedded: bytes | None) -> Profile | None:
    """The profile with id `wanted`: the argument, else the one embedded in the archive, else the one under `home()`.

    None when nothing is wanted. Raises ProfileMissing, or ProfileMismatch when what is there has another id.
    """
    if wanted is None:
        return None
    if argument is not None:
        return _require(argument, wanted, "the profile given")
    if embedded is not None:
        return _require(Profile.unpack(embedded), wanted, "the embedded profile")
    path = home() / "profiles" / f"{wanted}.safetensors"
    if not path.is_file():
        raise ProfileMissing(
            f"the archive needs profile {wanted}; it was not given, not embedded, and is not at {path}"
        )
    return _require(load_profile(path), wanted, str(path))


def load_profile(path: Path) -> Profile:
    """The profile in a file; the same one again, not read and hashed anew, as long as the file stays as it is.

    Raises ProfileMismatch when it is damaged.
    """
    stat = path.stat()
    return _loaded(path, stat.st_ino, stat.st_mtime_ns, stat.st_size)


@lru_cache(KEPT)
def _loaded(path: Path, *state: int) -> Profile:
    return Profile.unpack(path.read_bytes())


def all_profiles() -> Iterator[tuple[Path, dict[str, Any]]]:
    """File and metadata of every profile under `home()`, newest first; only the containers' headers are read."""
    folder = home() / "profiles"
    files = sorted(folder.glob("*.safetensors"), key=lambda path: (-path.stat().st_mtime_ns, path.name))
    for path in files:
        try:
            with safetensors.safe_open(path, framework="numpy") as container:
                metadata = json.loads((container.metadata() or {})[_METADATA_KEY])
        except (safetensors.SafetensorError, OSError, ValueError, KeyError):
            continue  # not one of ours, or damaged: whoever asks for it by its id is told
        if isinstance(metadata, dict):
            yield path, metadata


def _require(profile: Profile, wanted: str, where: str) -> Profile:
    if profile.id != wanted:
        raise ProfileMismatch(f"{where} has id {profile.id}; expected {wanted}")
    return profile
