"""The study behind `kvcellar bench rate`: recipe `cellar`'s curve, its parts, its bits, its texts and their lengths.

Everything but the curve, which is read from result files, is measured on tuning text that no profile in use has seen.
Results are kept by all they depend on, so an interrupted study goes on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...calibrate import Calibration, find_fitted
from ...errors import ProfileMissing
from ...evaluate.texts import Document, Window
from ...pipeline import Pipeline
from ...profile import Profile, home
from ...recipe import PRESETS, Recipe
from ..cli.common import progress
from ..cli.models import LocalModel, cache_geometry
from .rateablation import POINTS, Ablation, compare, sources
from .ratelength import LENGTHS, averaged, by_length
from .ratewhere import Spent, file_parts, surprise, where
from .ratewindows import HeldOut, Kept, cache_of, chosen


@dataclass
class Study:
    """What the measured parts share. `documents` are tuning texts; windows are `prefix` tokens and those scored.

    `profile` is the one at hand for `recipe`; None is none.
    """

    local: LocalModel
    documents: Sequence[Document]
    recipe: Recipe
    profile: Profile | None
    prefix: int
    continuation: int
    count: int
    quiet: bool = False
    _read: dict[str, list[HeldOut]] = field(default_factory=dict, repr=False)

    @cached_property
    def kept(self) -> Kept:
        return Kept(home() / "bench" / "rate" / self.local.identity.digest[:16])

    def ablation(self, calibration: Calibration) -> dict[str, Any]:
        """Rows of variants and what they cost at the whole codec's divergences."""
        windows = self.windows(calibration.texts)
        ablation = Ablation(self.local, calibration, windows, self.kept.folder, quiet=self.quiet)
        rows = ablation.measure()
        articles = [window.window.article for window in windows]
        named = {"calibration_tokens": calibration.tokens, "windows": _named([each.window for each in windows])}
        return {**named, "rows": rows, "compared": compare(rows, articles)}

    def bits(self) -> dict[str, Any]:
        """Where the bits go, by layer group, layer and side, and by part of the file."""

        def measured() -> dict[str, Any]:
            rows = where(self._coded, self.pipeline, self._profile)
            windows, identity = self.windows(self._seen), self.local.identity
            return {"groups": rows, "file": file_parts(windows, self.recipe, self._profile, identity)}

        return self._kept_of_windows("bits", measured)

    def surprisal(self) -> dict[str, Any]:
        """Whether residuals and bits follow the model's surprise."""

        def measured() -> dict[str, Any]:
            windows, coded = self.windows(self._seen), self._coded
            with progress(f"surprisal of {len(windows)} windows", 1, quiet=self.quiet):
                return surprise(self.local, windows, coded, self.pipeline, self._profile)

        return self._kept_of_windows("surprisal", measured)

    def length(self, documents: int, longest: int) -> dict[str, Any]:
        """Bytes per token of files of the first `documents` texts that have `longest` tokens, under `POINTS`."""
        lengths = [length for length in LENGTHS if length <= longest]
        texts = chosen(self._encode, self.documents, self._seen, max(lengths) - 1, 1, documents)
        recipes = [PRESETS[name] for name in POINTS]
        measured: dict[str, list[list[dict[str, Any]]]] = {recipe.name: [] for recipe in recipes}
        with progress(f"{len(texts)} texts of {max(lengths):,} tokens", len(texts), quiet=self.quiet) as advance:
            for window in texts:
                for name, rows in self._lengths(window, recipes, lengths).items():
                    measured[name].append(rows)
                advance(1)
        rows = {name: averaged(each) for name, each in measured.items()}
        return {"profile": self._profile.id, "windows": _named(texts), "recipes": rows}

    def _lengths(self, window: Window, recipes: Sequence[Recipe], lengths: Sequence[int]) -> dict[str, Any]:
        key = f"length {sources()} {self._profile.id} {window.id} {lengths} {[r.digest.hex() for r in recipes]}"

        def measured() -> dict[str, Any]:
            cache, identity = cache_of(self.local, window.ids), self.local.identity
            return {r.name: by_length(cache, window.ids, r, self._profile, identity, lengths) for r in recipes}

        found: dict[str, Any] = self.kept.get(key, measured)
        return found

    @cached_property
    def pipeline(self) -> Pipeline:
        return Pipeline(self.recipe, cache_geometry(self.local), self._profile)

    @cached_property
    def _coded(self) -> list[Spent]:
        windows, found = self.windows(self._seen), []
        with progress(f"bits of {len(windows)} windows", len(windows), quiet=self.quiet) as advance:
            for window in windows:
                found.append(Spent(window, self.pipeline))
                advance(1)
        return found

    @property
    def _profile(self) -> Profile:
        if self.profile is None:
            raise ProfileMissing(
                f"where bits go needs a profile for recipe {self.recipe.name}: run kvcellar calibrate, or --quick"
            )
        return self.profile

    @property
    def _seen(self) -> list[str]:
        texts = self._profile.metadata.get("texts")
        return [str(text) for text in texts] if isinstance(texts, list) else []

    def windows(self, seen: Collection[str]) -> list[HeldOut]:
        """Held-out windows of documents whose SHA-256 is not among those seen, read once."""
        key = hashlib.sha256(" ".join(sorted(seen)).encode()).hexdigest()
        if key not in self._read:
            texts = self._texts(seen)
            with progress(f"{len(texts)} held-out windows", len(texts), quiet=self.quiet) as advance:
                self._read[key] = []
                for window in texts:
                    self._read[key].append(HeldOut.read(self.local, window))
                    advance(1)
        return self._read[key]

    def _encode(self, text: str) -> list[int]:
        return self.local.encode(text, continues=True)

    def _texts(self, seen: Collection[str]) -> list[Window]:
        return chosen(self._encode, self.documents, seen, self.prefix, self.continuation, self.count)

    def _kept_of_windows(self, part: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `measure` says of the recipe on the held-out windows, with what it depends on."""
        texts, profile = self._texts(self._seen), self._profile
        depends = [sources(), profile.id, self.recipe.digest.hex(), *(f"{w.id}-{w.prefix}" for w in texts)]
        found = self.kept.get(" ".join([part, *depends]), measure)
        named = {"recipe": self.recipe.name, "profile": profile.id, "fitted_on": profile.metadata.get("tokens")}
        return {**named, "windows": _named(texts), **found}


def at_hand(recipe: Recipe, local: LocalModel) -> Profile | None:
    """The newest profile for the recipe and model on this machine."""
    return find_fitted(recipe, local.identity, cache_geometry(local))


def _named(windows: Sequence[Window]) -> list[dict[str, Any]]:
    return [{"id": w.id, "article": w.article, "kind": w.kind, "prefix": w.prefix} for w in windows]
