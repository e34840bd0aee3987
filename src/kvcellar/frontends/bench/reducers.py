"""Reducers on the bench's windows: what is lost by fewer tokens, at each kept fraction and draw.

The window's cache is reduced in memory and the continuation read behind it, scored against the same uncompressed side
as recipes are. Sample queries, for methods that take them, are the document's own, turned to later positions, and those
of other texts of role *tune*; each half of `queries` a query head. Kept fractions count all tokens, sinks and recent
ones included. A method that draws is measured with several seeds, and its scores are their means.

Results are kept per window, method, fraction, seed and source of what computes them, so an interrupted run goes on.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ...cache import KVCache
from ...errors import InvalidInput
from ...evaluate.texts import Window
from ...rope import Turn
from ...store.local import LocalStore
from ..calibration import Cut
from ..cli.common import progress
from ..cli.models import LocalModel
from ..methods import find_reducer
from ..queries import turns_or_none
from ..reduce import number_to_keep, reduce_cache
from ..riskqueries import Asked, foreign_asked, own_asked, together
from ..transformers import take_cache
from ..weighted import WeightedCache, WeightedLayer
from .reference import continuation_logits, key, write_scores
from .rows import Result
from .run import Bench, source_digest

QUERIES = 1024
SEEDS = 5


class Method(NamedTuple):
    """A reducer under the name of a row, whether it draws, and which queries it gets: "none", "own", "foreign", "both",
    or "last", the document's last as they were asked, as many as methods of eviction go by."""

    settings: Mapping[str, Any]
    asks: str = "none"
    draws: bool = False


METHODS: dict[str, Method] = {
    "matching": Method({"id": "matching"}, "both"),
    "matching-own": Method({"id": "matching"}, "own"),
    "matching-foreign": Method({"id": "matching"}, "foreign"),
    "balanced": Method({"id": "balanced"}),
    "balanced-random": Method({"id": "balanced", "features": "random"}, draws=True),
    "balanced-responses": Method({"id": "balanced", "features": "responses"}, "both"),
    "random": Method({"id": "random"}, draws=True),
    "streaming": Method({"id": "streaming"}),
    "snapkv": Method({"id": "snapkv"}, "last"),
    "scissorhands": Method({"id": "scissorhands"}, "last"),
}


@dataclass(frozen=True)
class Case:
    """A method at a kept fraction with a seed."""

    method: str
    keep: float
    seed: int = 0

    @property
    def label(self) -> str:
        return f"{self.method} {self.keep:g}"


def cases(methods: Sequence[str], keep: Sequence[float], seeds: int = SEEDS) -> list[Case]:
    """All there is to measure. Raises InvalidInput for unknown methods."""
    if unknown := [name for name in methods if name not in METHODS]:
        raise InvalidInput(f"unknown method {', '.join(unknown)}; known: {', '.join(METHODS)}")
    return [
        Case(name, fraction, seed)
        for name in methods
        for fraction in keep
        for seed in range(seeds if METHODS[name].draws else 1)
    ]


_MADE_BY = (
    *("slots.py", "rope.py", "frontends/reduce.py", "frontends/weighted.py", "frontends/queries.py"),
    *("frontends/riskqueries.py", "frontends/bench/reducers.py", "frontends/bench/reference.py"),
)


def made_by() -> str:
    """Short hash of the source that results depend on."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256(source_digest("reduce").encode() + source_digest("evaluate").encode())
    for name in _MADE_BY:
        digest.update((root / name).read_bytes())
    return digest.hexdigest()[:16]


class Sampler:
    """The sample queries of a model's documents, by kind."""

    def __init__(self, local: LocalModel, foreign: Sequence[Cut], prefix: int, queries: int, *, quiet: bool):
        self.local, self.cuts, self.prefix, self.queries, self.quiet = local, foreign, prefix, queries, quiet
        self._foreign: Asked | None = None
        self._turns: list[Turn] | None = None
        self._looked = False

    def make_ready(self) -> Asked:
        """What the other texts ask, read or loaded at the first call: no document's costs."""
        if self._foreign is None:
            self._foreign = foreign_asked(self.local, self.cuts, self.prefix, self.queries, quiet=self.quiet)
        return self._foreign

    def digest(self) -> str:
        """Names all that queries depend on besides the document."""
        texts = [(each.text, len(each.ids)) for each in self.cuts]
        return hashlib.sha256(f"{texts} {self.prefix} {self.queries}".encode()).hexdigest()[:12]

    def of(self, kind: str, kv: KVCache, ids: np.ndarray, held: dict[str, Any]) -> list[Tensor] | None:
        """Queries of each layer for a document's cache; `held` keeps what its methods share. None for "none"."""
        if kind == "none":
            return None
        if kind not in held:
            held[kind] = self._sampled(kind, kv, ids, held)
        found: list[Tensor] = held[kind]
        return found

    def _sampled(self, kind: str, kv: KVCache, ids: np.ndarray, held: dict[str, Any]) -> list[Tensor]:
        if "asked" not in held and kind != "foreign":
            held["asked"] = own_asked(self.local, kv, ids)
        if kind == "last":
            layers: dict[int, Tensor] = held["asked"].layers
            return [layers[i] for i in range(len(kv.layers))]
        if not self._looked:
            self._turns, self._looked = turns_or_none(self.local.model, kv, ids), True
        count, sides = self.queries // 2 if kind == "both" else self.queries, []
        if kind != "foreign":
            sides.append(held["asked"].later(self._turns, len(ids), count))
        if kind != "own":
            sides.append(self.make_ready().later(self._turns, len(ids), count, seed=1))
        joined = together(*sides)
        return [joined[i] for i in range(len(kv.layers))]


class ReduceBench(Bench):
    """Windows of one model under reducers.

    `foreign` are texts of role tune whose queries serve as samples. Raises InvalidInput for one that is tested here.
    """

    def __init__(
        self,
        local: LocalModel,
        windows: Sequence[Window],
        foreign: Sequence[Cut],
        *,
        queries: int = QUERIES,
        quiet: bool = False,
        texts: Collection[str] = (),
    ):
        super().__init__(local, windows, quiet=quiet, texts=texts)
        if seen := self.texts.intersection(each.text for each in foreign):
            raise InvalidInput(
                f"{len(seen)} of the texts for sample queries are tested here, the first with SHA-256 "
                f"{min(seen)[:16]}…: what is tuned on a text cannot be tested on it"
            )
        self.sampler = Sampler(local, foreign, windows[0].prefix, queries, quiet=quiet)

    def folder(self, case: Case) -> Path:
        """Where results of a case are kept."""
        asks = METHODS[case.method].asks
        queries = f"-{self.sampler.digest()}" if asks in ("both", "own", "foreign") else ""
        return self.results / f"reduce-{case.method}-{case.keep:g}-{case.seed}{queries}-{made_by()}"

    def measured(self, todo: Sequence[Case]) -> dict[Case, list[Result]]:
        """The results of all cases on all windows; what is kept is not computed again."""
        folders = {case: self.folder(case) for case in todo}
        missing = [
            (window, [case for case in todo if not (folders[case] / f"{key(window)}.json").is_file()])
            for window in self.windows
        ]
        count = sum(len(each) for _, each in missing)
        with progress(f"{count} reductions", count, quiet=self.quiet or not count) as advance:
            for window, lacking in missing:
                held: dict[str, Any] = {}
                for case in lacking:
                    self._measure(case, window, folders[case], held)
                    advance(1)
        return {case: [self._load(folders[case], window) for window in self.windows] for case in todo}

    def peer_results(self, name: str) -> list[Result]:
        """Results of a peer on the same windows. Raises KVCellarError when it is not here."""
        from .run import peer_folder

        self.peer(name)
        return [self._load(self.results / peer_folder(name), window) for window in self.windows]

    def _measure(self, case: Case, window: Window, folder: Path, held: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        cache, ids = self.original(window), np.array(window.ids[: window.prefix], np.int64)
        reduced, costs = reduced_by(case, self.sampler, cache, ids, held)
        del cache
        prefill_s, dtype, threads = self.prefill()
        logits = continuation_logits(self.local.model, window.ids[window.prefix :], reduced)
        write_scores(self.references.load(window), logits, folder / f"{key(window)}.npz")
        costs |= {"prefill_s": prefill_s, "prefill_dtype": dtype, "threads": threads, "restore_class": "none"}
        with LocalStore(folder).replacing(f"{key(window)}.json") as pending:  # last: it says the window is done
            pending.append(json.dumps(costs).encode())


def reduced_by(
    case: Case, sampler: Sampler, cache: Any, ids: np.ndarray, held: dict[str, Any]
) -> tuple[WeightedCache, dict[str, Any]]:
    """`cache` of the tokens `ids` under a case, and what that took: slots held, bytes before and after, seconds.

    `queries_s` is 0 where the queries were there already.
    """
    method, kv = METHODS[case.method], take_cache(cache)
    if method.asks in ("both", "foreign"):
        sampler.make_ready()
    started = time.perf_counter()
    queries = sampler.of(method.asks, kv, ids, held)
    if queries is not None and method.asks == "last":
        queries = [each[:, -find_reducer(method.settings).asks :] for each in queries]
    middle = time.perf_counter()
    reduced = reduce_cache(
        cache,
        budget=number_to_keep(case.keep, len(ids), 1),
        model=sampler.local.model,
        method=dict(method.settings),
        queries=queries,
        seed=case.seed,
    )
    done = time.perf_counter()
    raw, after = sum(layer.keys.nbytes + layer.values.nbytes for layer in kv.layers), held_bytes(reduced)
    return reduced, {
        "kept": reduced.slots / len(ids),
        "slots": reduced.slots,
        "raw_bytes": raw,
        "held_bytes": after,
        "queries_s": middle - started,
        "reduce_s": done - middle,
        "save_s": done - started,
    }


def held_bytes(cache: WeightedCache) -> int:
    """Bytes of all tensors a reduced cache holds: slots, pads, weights and positions."""
    found = 0
    for layer in cache.layers:
        sides: list[Tensor | None] = [layer.keys, layer.values]
        if isinstance(layer, WeightedLayer):
            sides += [layer.log_weights, layer.positions]
        found += sum(x.untyped_storage().nbytes() for x in sides if x is not None)
    return found


def averaged(results: Sequence[Sequence[Result]]) -> list[Result]:
    """The means over seeds, window by window; of `agree` where most seeds do."""
    out = []
    for group in zip(*results, strict=True):
        scores = [result.scores for result in group]
        mean = {name: np.mean([getattr(s, name) for s in scores], axis=0) for name in ("kl", "nll")}
        agree = np.mean([s.agree for s in scores], axis=0) > 0.5
        costs = {**group[0].costs}
        for name in ("queries_s", "reduce_s", "save_s"):
            costs[name] = float(np.median([result.costs[name] for result in group]))
        out.append(Result(replace(scores[0], agree=agree, **mean), costs))
    return out


def settings_of(name: str) -> dict[str, Any]:
    """A method's reducer with all settings, as JSON."""
    reducer: Any = find_reducer(dict(METHODS[name].settings))
    return {"id": reducer.id, **asdict(reducer), "queries": METHODS[name].asks}
