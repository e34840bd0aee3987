"""Recipes and peers over windows: saved here, decoded and scored elsewhere, summed up in rows (`rows.py`).

A window's scores and costs are kept per recipe, profile, source of kvcellar and model, so an interrupted run goes on,
and a second run with one more recipe costs only that recipe. Costs of time stand beside the fastest prefill as this
very run measured it. The first save and the first restore of a process warm it up and are not counted.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...calibrate import find_fitted
from ...errors import InvalidInput
from ...evaluate.scores import WindowScore
from ...evaluate.texts import Window
from ...geometry import Geometry
from ...pipeline import Pipeline
from ...profile import Profile, home
from ...recipe import Recipe
from ...store.local import LocalStore
from ..cli.common import progress
from ..cli.models import LocalModel
from ..library import open as open_archive
from ..library import save
from .layers import layer_errors
from .outside import Outside
from .peers import PEERS, coded_by
from .reference import References, continuation_logits, empty_positions, key, write_empty_scores, write_scores
from .rows import EMPTY, Result, rows_of
from .rows import ROW as ROW
from .scorer import Scorer
from .sizes import bytes_by_part, coarse_bytes
from .speed import PeakMemory, Prefill, fastest_prefill, trim_memory
from .zero import zero_residual

FLOOR_EMPTY = EMPTY
JUDGE = ("frontends/bench", "evaluate")
"""Where the source lies that peers' and floors' results depend on."""


_SOURCES = (".py", ".txt")


def source_digest(*folders: str | Path) -> str:
    """Short hash of kvcellar's own source, or of these folders (of it): others' results are not taken for this."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for folder in folders or (".",):
        for path in sorted(p for p in (root / folder).rglob("*") if p.suffix in _SOURCES):
            digest.update(path.relative_to(root / folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def result_folder(recipe: Recipe, profile: Profile | None) -> str:
    """Where results of a recipe are kept: named by all they depend on besides the model."""
    with_profile = "" if profile is None else f"-{profile.id[:16]}"
    return f"{source_digest()}-{recipe.digest.hex()[:16]}{with_profile}"


def peer_folder(name: str) -> str:
    """The same for a peer: what judges it, and its script, where it has one."""
    peer = PEERS[name]
    scripts = (peer.script.resolve().parent,) if isinstance(peer, Outside) else ()
    return f"peer-{name}-{source_digest(*JUDGE, *scripts)}"


class Bench:
    """Windows of one model, and the results on them.

    `texts` are the SHA-256 of the documents the windows come from: a profile that has seen one of them is refused.
    A `quick` one measures payload, append and random access on the first window alone, and no errors by layer; what it
    finds is kept apart.
    """

    def __init__(
        self,
        local: LocalModel,
        windows: Sequence[Window],
        *,
        quiet: bool = False,
        texts: Collection[str] = (),
        quick: bool = False,
    ):
        self.local, self.windows, self.quiet, self.texts = local, windows, quiet, frozenset(texts)
        self.quick = quick
        self.references = References(local)
        self.results = self.references.folder / "results"
        self._prefill: Prefill | None = None

    def prepare(self) -> None:
        self.references.ensure(self.windows, quiet=self.quiet)

    def prefill(self) -> Prefill:
        """The fastest prefill of a window, measured once per run and only when something is to be set against it."""
        if self._prefill is None:
            window = self.windows[0]
            with progress("the fastest prefill", 1, quiet=self.quiet):
                self._prefill = fastest_prefill(self.local, window.ids[: window.prefix])
        return self._prefill

    def geometry(self) -> Geometry:
        with open_archive(self.references.archive(self.windows[0])) as archive:
            return archive.manifest.geometry

    def recipe(self, recipe: Recipe, profile: Profile | None = None) -> list[dict[str, Any]]:
        """Rows of a recipe, per text kind and over all, with `profile` or the newest that was fitted for it.

        Raises KVCellarError when its file cannot be decoded, InvalidInput when the profile was fitted on a text that
        is tested here.
        """
        return self._rows(recipe.name, self.scored(recipe, profile))

    def scored(self, recipe: Recipe, profile: Profile | None = None) -> list[Result]:
        """What those rows sum up: a recipe's scores and costs, window by window."""
        if profile is None:
            profile = find_fitted(recipe, self.local.identity, self.geometry())
        if profile is not None:
            self._refuse_seen(profile)
        folder = self.results / (result_folder(recipe, profile) + "-quick" * self.quick)
        ready: list[tuple[Pipeline, Scorer]] = []

        def compute(window: Window, out: Path) -> dict[str, Any]:
            if not ready:
                self._recipe_save(recipe, profile, window, lambda path: None)
                ready.append((Pipeline(recipe, self.geometry(), profile), Scorer(self.local.folder)))
            return self._recipe_window(recipe, profile, window, out, *ready[0])

        try:
            return self._collect(recipe.name, folder, compute)
        finally:
            for _, process in ready:
                process.close()

    def zero_residual(self, recipe: Recipe, name: str, profile: Profile | None = None) -> list[dict[str, Any]]:
        """Rows of a floor: what the prediction of `recipe` alone restores. Raises InvalidInput if it has none."""
        profile = profile or find_fitted(recipe, self.local.identity, self.geometry())
        return self.recipe(zero_residual(recipe, name), profile)

    def _refuse_seen(self, profile: Profile) -> None:
        texts = profile.metadata.get("texts")
        if not isinstance(texts, list):
            raise InvalidInput(f"profile {profile.id[:16]}… does not list the texts it was fitted on: not to be tested")
        if seen := self.texts.intersection(texts):
            raise InvalidInput(
                f"profile {profile.id[:16]}… was fitted on {len(seen)} of the documents tested here, the first with "
                f"SHA-256 {min(seen)[:16]}…: what is tuned on a text cannot be tested on it"
            )

    def original(self, window: Window) -> Any:
        """The uncompressed cache of a window."""
        with open_archive(self.references.archive(window), identity=self.local.identity) as archive:
            return archive.restore().cache

    def _recipe_save(
        self, recipe: Recipe, profile: Profile | None, window: Window, then: Callable[[Path], Any]
    ) -> tuple[Any, dict[str, Any], Any]:
        """What saving the window's cache says and takes, and what `then` makes of the file."""
        cache, prefix = self.original(window), window.ids[: window.prefix]
        told = self.references.log2_probs(window)
        with tempfile.TemporaryDirectory(prefix="kvcellar-bench-") as scratch:
            path = Path(scratch) / "window.kvc"
            trim_memory()
            started = time.perf_counter()
            with PeakMemory() as peak:
                info = save(
                    path,
                    cache,
                    tokens=prefix,
                    identity=self.local.identity,
                    recipe=recipe,
                    profile=profile,
                    log2_probs=told,
                    replay_with=self.local.model,
                )
                save_s = time.perf_counter() - started
            del cache
            return info, {"save_s": save_s, "save_peak_bytes": peak.bytes}, then(path)

    def _recipe_window(
        self, recipe: Recipe, profile: Profile | None, window: Window, out: Path, pipeline: Pipeline, scorer: Scorer
    ) -> dict[str, Any]:
        first = window is self.windows[0]
        closely = first or not self.quick

        def look_and_score(path: Path) -> dict[str, Any]:
            found = scorer.score(path, self.references.logits_file(window), window.prefix, out, speed=closely)
            if closely:
                found["payload_bytes"], found["payload_tokens"] = coarse_bytes(path, profile, pipeline)
            if first and not self.quick:
                found["layer_errors"] = layer_errors(path, self.references.archive(window), self.local)
            return {**found, "bytes_by_part": bytes_by_part(path)}

        info, taken, found = self._recipe_save(recipe, profile, window, look_and_score)
        return {
            "file_bytes": info.file_bytes,
            "profile_bytes": info.profile_bytes if info.profile_bytes is not None else _container_bytes(info.profile),
            "raw_bytes": info.raw_bytes,
            "kept": 1.0,
            **taken,
            "profile": info.profile,
            "calibration_tokens": None if profile is None else profile.metadata.get("tokens"),
            "restore_class": "part" if pipeline.replays else "none",
            **found,
        }

    def peer(self, name: str) -> list[dict[str, Any]]:
        """Rows of a peer on the same caches, decoded in this process. Raises KVCellarError when it is not here."""
        warm: list[str] = []

        def coded(window: Window) -> Any:
            prefix, following = window.ids[: window.prefix], window.ids[window.prefix :]
            return coded_by(name, self.original(window), self.local.model.config, tokens=prefix, following=following)

        def compute(window: Window, out: Path) -> dict[str, Any]:
            if not warm:
                warm.append(coded(window).note)
            got = coded(window)
            logits = got.logits
            if logits is None:
                logits = continuation_logits(self.local.model, window.ids[window.prefix :], got.cache)
            write_scores(self.references.load(window), logits, out)
            return {
                "file_bytes": got.nbytes,
                "payload_bytes": got.nbytes if got.payload_nbytes is None else got.payload_nbytes,
                "payload_tokens": window.prefix if got.payload_tokens is None else got.payload_tokens,
                "profile_bytes": got.profile_nbytes,
                "kept": got.kept,
                "save_s": got.save_s,
                "restore_s": got.restore_s,
                "restore_class": "none",
                "note": got.note,
            }

        return self._rows(f"peer:{name}", self._collect(f"peer {name}", self.results / peer_folder(name), compute))

    def floor(self) -> list[dict[str, Any]]:
        """Rows of ∅: sinks and recent window alone. Whatever is worse than this is no compression of the context."""

        def compute(window: Window, out: Path) -> dict[str, Any]:
            write_empty_scores(self.references.load(window), out)
            return {"kept": len(empty_positions(window.prefix)) / window.prefix}

        folder = self.results / f"floor-empty-{source_digest(*JUDGE)}"
        return self._rows(FLOOR_EMPTY, self._collect("∅", folder, compute))

    def _collect(self, label: str, folder: Path, compute: Callable[[Window, Path], dict[str, Any]]) -> list[Result]:
        folder.mkdir(parents=True, exist_ok=True)
        todo = [w for w in self.windows if not (folder / f"{key(w)}.json").is_file()]
        with progress(f"{label}: {len(todo)} windows", len(todo), quiet=self.quiet or not todo) as advance:
            for window in todo:
                prefill_s, dtype, threads = self.prefill()
                costs = {"prefill_s": prefill_s, "prefill_dtype": dtype, "threads": threads}
                costs |= compute(window, folder / f"{key(window)}.npz")
                with LocalStore(folder).replacing(f"{key(window)}.json") as pending:  # last: it says the window is done
                    pending.append(json.dumps(costs).encode())
                advance(1)
        return [self._load(folder, window) for window in self.windows]

    def _load(self, folder: Path, window: Window) -> Result:
        with np.load(folder / f"{key(window)}.npz", allow_pickle=False) as scores:
            score = WindowScore(
                id=window.id, article=window.article, kind=window.kind, **{name: scores[name] for name in scores}
            )
        return Result(score, json.loads((folder / f"{key(window)}.json").read_text()))

    def _rows(self, name: str, results: list[Result]) -> list[dict[str, Any]]:
        prefixes = {window.prefix for window in self.windows}
        return rows_of(name, results, prefixes.pop() if len(prefixes) == 1 else None)


def _container_bytes(profile: str | None) -> int | None:
    """Size of the file a profile is in on this machine, where the process that decodes finds it."""
    path = home() / "profiles" / f"{profile}.safetensors"
    return path.stat().st_size if path.is_file() else None
