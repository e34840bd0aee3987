"""Samples for a calibration: text cut into windows, and a model's caches over them, kept on disk.

A sample is kept as an `exact` archive named by its tokens, so an interrupted run goes on where it stopped, and more
tokens later cost only what is new. Text is that of role *tune*: no document that a benchmark tests on gets in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..cache import KVCache
from ..calibrate import Calibration, Progress, Sample
from ..errors import InvalidInput, KVCellarError
from ..evaluate.texts import Document, standard_library, texts_from_files
from ..geometry import Geometry
from ..identity import Identity
from ..profile import home
from .cli.models import LocalModel, empty_cache, held_in
from .library import open as open_archive
from .library import save
from .replayer import Replayer
from .transformers import take_cache

WINDOW = 1024
PER_DOCUMENT = 4


class Cut(NamedTuple):
    """A window of a document: its token ids, the document's kind and SHA-256."""

    ids: tuple[int, ...]
    kind: str
    text: str


def calibration_documents(files: Sequence[Path], *, standard: bool = True) -> list[Document]:
    """The user's files and, unless told otherwise, the half of the standard library that is for tuning."""
    found = texts_from_files(files, role="tune") if files else []
    return found + (standard_library("tune") if standard else [])


def cut(
    documents: Sequence[Document],
    encode: Callable[[str], Sequence[int]],
    tokens: int,
    window: int,
    per_document: int = PER_DOCUMENT,
) -> list[Cut]:
    """Windows of `window` tokens until there are `tokens`, the kinds of text taking turns while they last.

    Documents come in the order of the SHA-256 of their names, each with at most `per_document` windows from its start.
    A document shorter than a window is passed over. Raises InvalidInput when not one window comes together.
    """
    by_kind = {document.kind: [d for d in documents if d.kind == document.kind] for document in documents}
    queues = [_windows_of(each, encode, window, per_document) for each in by_kind.values()]
    found: list[Cut] = []
    wanted = max(1, tokens // window)
    while queues and len(found) < wanted:
        for queue in list(queues):
            piece = next(queue, None)
            if piece is None:
                queues.remove(queue)
            elif len(found) < wanted:
                found.append(piece)
    if not found:
        raise InvalidInput(f"no document of the calibration text reaches {window:,} tokens")
    return found


def _windows_of(
    documents: Sequence[Document], encode: Callable[[str], Sequence[int]], window: int, per_document: int
) -> Iterator[Cut]:
    for document in sorted(documents, key=lambda d: hashlib.sha256(d.name.encode()).digest()):
        ids = encode(document.text[: 16 * window * per_document])
        text = hashlib.sha256(document.text.encode()).hexdigest()
        for start in islice(range(0, len(ids) - window + 1, window), per_document):
            yield Cut(tuple(map(int, ids[start : start + window])), document.kind, text)


def collect(local: LocalModel, cuts: Sequence[Cut], progress: Progress) -> Calibration:
    """Run the model over every window that is not on disk yet; the caches are read back one at a time."""
    dtype = str(local.model.dtype).removeprefix("torch.")
    runtime = f"torch{torch.__version__}-{dtype}-threads{torch.get_num_threads()}"
    folder = home() / "calibration" / f"{local.identity.digest[:16]}-{runtime}"
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{_name(piece)}.kvc" for piece in cuts]
    todo = [(file, piece) for file, piece in zip(files, cuts, strict=True) if not _whole(file, piece, local.identity)]
    if todo:
        with progress(f"caches of {len(todo)} windows", len(todo)) as advance:
            for file, piece in todo:
                cache = empty_cache()
                local.prefill(list(piece.ids), cache, quiet=True)
                held_in(cache, getattr(local, "cache_dtype", local.model.dtype))
                save(file, cache, tokens=piece.ids, identity=local.identity)
                advance(1)
    samples = [
        Sample(np.array(piece.ids, np.int64), piece.kind, partial(_load, file, local.identity))
        for file, piece in zip(files, cuts, strict=True)
    ]
    texts = sorted({piece.text for piece in cuts})
    geometry = samples[0].load().geometry
    replayer = partial(_replayer, local.model, geometry)
    return Calibration(local.identity, geometry, samples, texts, local.model, folder, progress, replayer=replayer)


def _replayer(model: Any, geometry: Geometry, layers: int) -> Replayer:
    return Replayer(model, layers, geometry)


def _name(piece: Cut) -> str:
    return hashlib.sha256(np.array(piece.ids, "<i8").tobytes()).hexdigest()[:32]


def _whole(file: Path, piece: Cut, identity: Identity) -> bool:
    """Whether an earlier run left this sample, whole and of this model."""
    try:
        with open_archive(file, identity=identity) as archive:
            return np.array_equal(archive.tokens, piece.ids)
    except KVCellarError:
        return False


def _load(file: Path, identity: Identity) -> KVCache:
    with open_archive(file, identity=identity) as archive:
        return take_cache(archive.restore().cache)
