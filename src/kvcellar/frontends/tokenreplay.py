"""Running a model over logged tokens: in the steps in which they were read, or one by one while decoding them.

Tried on: CPU, transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..cache import KVCache, Restored
from ..errors import DamagedArchive, IdentityMismatch, InvalidInput, RuntimeMismatch
from ..geometry import Geometry
from ..language.blocks import Segment
from ..language.checks import Checks, distances
from ..language.modelcode import decode_under, encode_under, require_vocabulary
from ..language.runtime import runtime_id
from ..language.tokenlog import TokenLog
from .transformers import give_cache, take_cache

Progress = Callable[[int, int], None]


class BlockReplay(NamedTuple):
    """Tokens `start` … `stop` − 1: whether they came again bit by bit, and about ‖x − x'‖ / ‖x'‖ if not."""

    start: int
    stop: int
    exact: bool
    distance: float


class Replay(NamedTuple):
    """How near a replay came to the cache that was saved. `schedule`: steps of how many tokens it took.

    `blocks` are those that were replayed whole; of layers that slide, the windows count as one more.
    """

    blocks: tuple[BlockReplay, ...]
    schedule: tuple[Segment, ...]

    @property
    def exact(self) -> bool:
        """Whether every checked number is the original's."""
        return all(block.exact for block in self.blocks)

    @property
    def distance(self) -> float:
        """The largest distance of a block."""
        return max((block.distance for block in self.blocks), default=0.0)


class Replayed(Restored):
    """What `restore` gives, and in `replay` how near it is to what was saved."""

    replay: Replay


def vocabulary_of(model: Any) -> int:
    """How many token ids the model can read."""
    return int(model.get_input_embeddings().weight.shape[0])


def replay(
    model: Any, ids: np.ndarray, geometry: Geometry, segments: Sequence[Segment], progress: Progress | None = None
) -> Any:
    """The transformers cache after the model read ids int64 (T,) in these steps; segments behind T do not count.

    Raises TokensMismatch for ids outside its vocabulary, IdentityMismatch for a cache of another geometry.
    """
    require_vocabulary(ids, vocabulary_of(model))
    cache, start = give_cache({}, geometry, length=0), 0
    for tokens, chunk in segments:
        stop = min(start + tokens, len(ids))
        for at in range(start, stop, chunk):
            _feed(model, ids[at : min(at + chunk, stop)], cache)
            if not at:
                _require_geometry(cache, geometry)
            if progress is not None:
                progress(min(at + chunk, stop), len(ids))
        start = stop
    return cache


def encode_log(
    model: Any, ids: np.ndarray, geometry: Geometry, limit: int, progress: Progress | None = None
) -> tuple[bytes, Any] | None:
    """The stream of ids coded under the model, and the cache of its steps; decoded once before it is given.

    None where it would take more than `limit` bytes. `progress` is told of twice as many steps as there are tokens.
    """
    stepper = _Stepper(model, geometry, progress, 0, 2 * len(ids))
    coded = encode_under(ids, vocabulary_of(model), stepper, limit)
    if coded is None:
        return None
    again = _Stepper(model, geometry, progress, len(ids), 2 * len(ids))
    try:
        same = np.array_equal(decode_under(coded, len(ids), stepper.vocabulary, again), ids)
    except DamagedArchive:
        same = False
    if not same:
        raise RuntimeMismatch("the model gave other numbers when it read the same tokens again: nothing was saved")
    return coded, stepper.cache


def decode_log(model: Any, log: TokenLog, progress: Progress | None = None) -> tuple[np.ndarray, Any]:
    """The ids of a model-coded log, and the cache of the steps that decoded them.

    Raises RuntimeMismatch where another runtime coded them, DamagedArchive.
    """
    assert log.coded is not None
    if (here := runtime_id(model)) != log.runtime:
        raise RuntimeMismatch(
            f"the ids are coded under the model as runtime {log.runtime.hex()} computes it; this is {here.hex()}: "
            "expected the same libraries, processor, threads, dtype and attention, or a log that keeps its ids"
        )
    stepper = _Stepper(model, log.geometry, progress, 0, log.tokens)
    ids = decode_under(log.coded, log.tokens, vocabulary_of(model), stepper)
    return log.checked(ids), stepper.cache


def compared(kv: KVCache, log: TokenLog, schedule: Sequence[Segment]) -> Replay:
    """How near the first tokens of a log are that `kv` holds; blocks that it holds in part do not count."""
    whole = [block for block in log.blocks if block.stop <= len(kv)]
    count = len(log.sums) if len(kv) == log.tokens else len(whole)
    found = distances(kv, whole, Checks(log.sums[:count], log.sketches[:count]))
    ranges = [*whole, range(len(kv))]
    blocks = (BlockReplay(r.start, r.stop, *near) for r, near in zip(ranges, found, strict=False))
    return Replay(tuple(blocks), tuple(schedule))


class _Stepper:
    """Reads token by token, and gives the logits of the next, float32 (vocabulary,)."""

    def __init__(self, model: Any, geometry: Geometry, progress: Progress | None, done: int, total: int):
        self.model, self.geometry, self.progress, self.done, self.total = model, geometry, progress, done, total
        self.cache, self.first = give_cache({}, geometry, length=0), True
        self.vocabulary = vocabulary_of(model)

    def __call__(self, token: int) -> np.ndarray:
        logits = _feed(self.model, np.array([token]), self.cache)
        if self.first:
            _require_geometry(self.cache, self.geometry)
            self.first = False
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)
        found: np.ndarray = logits.float().cpu().numpy()
        if len(found) < self.vocabulary:
            raise InvalidInput(f"the model gives {len(found)} logits and reads {self.vocabulary} token ids")
        return found[: self.vocabulary]


def _feed(model: Any, ids: np.ndarray, cache: Any) -> torch.Tensor:
    """The logits (vocabulary,) behind the last of `ids`, which `cache` holds afterwards."""
    tensor = torch.from_numpy(np.ascontiguousarray(ids))[None].to(next(iter(model.parameters())).device)
    with torch.no_grad():
        logits: torch.Tensor = model(tensor, cache=cache, use_cache=True, logits_to_keep=1).logits
    return logits[0, -1]


def _require_geometry(cache: Any, geometry: Geometry) -> None:
    found = take_cache(cache).geometry
    if found != geometry:
        raise IdentityMismatch(f"the model computes {found.summary}; expected {geometry.summary}, as was saved")
