"""What each layer of the Sequential paper's stack is worth, and the whole curve from the tokens to the exact cache.

Reads tuning text that the profile has not seen (WikiText-2 valid from --data, the tuning half of the standard library),
one window a document. Needs a profile for `cellar`, which `sequential` shares (`kvcellar calibrate --recipe cellar`).

    python benchmarks/sequence.py --data DIR [--windows 8] [--part expected bits curve length] [--quick]

expected: the expected predictor at k = 1, 4, 20 beside cheap ones (`sequenceexpected.py`): calls, energy, bytes.
bits:     bits by surprisal, by variance, by energy, TurboQuant alone, and the paper's premise (`sequencebits.py`).
curve:    files, restores and divergence of all recipes that have a profile here, over the floor (`sequencecurve.py`).
length:   bytes a token against the length of the text, of static codes and codes by surprisal.

Writes benchmarks/results/sequence.json and docs/sequential.png, both after every part; parts that are not asked for
stay as they are there, if they are of the same profile and windows. What is measured on a window is kept under
$KVCELLAR_HOME: an interrupted run goes on, and every window is told as it is done. --quick is a look at whether all
of it works: two windows of 576 tokens and few cases; results and plot under $KVCELLAR_HOME/bench/sequence alone. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import sequencebits
import sequencecurve
import sequenceplot
from common import HERE, RESULTS, machine, rounded
from kvcellar.calibrate import find_fitted
from kvcellar.errors import ProfileMissing
from kvcellar.evaluate.texts import Window, load_sources
from kvcellar.frontends.bench.ratelength import LENGTHS, averaged
from kvcellar.frontends.bench.ratewindows import HeldOut, Kept, chosen
from kvcellar.frontends.bench.run import source_digest
from kvcellar.frontends.cli.demo_model import demo_model
from kvcellar.frontends.cli.models import MeasuredModel, cache_geometry
from kvcellar.profile import Profile, home
from kvcellar.recipe import CELLAR
from sequenceexpected import Predictors

SOURCES = ("quantize", "predict", "transform", "symbols", "frontends/bench")
PARTS = ("expected", "bits", "curve", "length")


class Scale(NamedTuple):
    """Tokens of a window's prefix and behind it, the span of the expected predictor, lengths, and texts for those."""

    prefix: int
    scored: int
    span: range
    lengths: tuple[int, ...]
    documents: int


WHOLE = Scale(1024, 384, range(512, 768), LENGTHS, 4)
QUICK = Scale(576, 32, range(512, 528), (256, 576), 2)  # of fewer tokens no block of coarse ones is full


class Study:
    """The windows of a run, and results that are kept."""

    def __init__(self, data: Path, count: int, *, quick: bool):
        self.local, self.quick, self.scale = MeasuredModel(demo_model()), quick, QUICK if quick else WHOLE
        profile = find_fitted(CELLAR[0], self.local.identity, cache_geometry(self.local))
        if profile is None:
            raise ProfileMissing("no profile for recipe cellar: run kvcellar calibrate --recipe cellar")
        self.profile: Profile = profile
        self.documents = load_sources(HERE / "texts.toml", data).documents("tune")
        self.windows = self._windows(self.scale.prefix, self.scale.scored, count)
        self.kept = Kept(home() / "bench" / "sequence" / self.local.identity.digest[:16])
        self.key = f"{source_digest(*SOURCES)} {profile.id} {self.scale}"
        self._read: tuple[str, HeldOut, np.ndarray] | None = None

    def _windows(self, prefix: int, scored: int, count: int) -> list[Window]:
        seen = [str(text) for text in self.profile.metadata.get("texts", [])]  # type: ignore[attr-defined]
        encode: Callable[[str], list[int]] = lambda text: self.local.encode(text, continues=True)  # noqa: E731
        return chosen(encode, self.documents, seen, prefix, scored, count)

    def read(self, window: Window) -> tuple[HeldOut, np.ndarray]:
        """A window and the surprisals of its prefix."""
        if self._read is None or self._read[0] != window.id:
            held = HeldOut.read(self.local, window)
            self._read = window.id, held, held.surprisal(self.local)
        return self._read[1], self._read[2]

    def get(self, part: str, window: Window, make: Callable[[], Any]) -> Any:
        """What is kept of a part of a window, or `make()`."""
        made, started = [], time.perf_counter()
        found = self.kept.get(f"{self.key} {window.id} {window.prefix} {part}", lambda: made.append(1) or make())
        what = f"{time.perf_counter() - started:.0f} s" if made else "kept"
        print(f"{part[:40]} on {window.article}: {what}", flush=True)
        return found

    def expected(self) -> dict[str, Any]:
        predictors = Predictors(self.local.model, self.profile, self.kept, self.scale.span)
        moments = [self.get("moments", w, lambda w=w: predictors.moments(self.read(w)[0])) for w in self.windows]
        found = []
        for number, window in enumerate(self.windows):
            others = [each for i, each in enumerate(moments) if i != number] or moments
            asked = " ".join(each["cross"] for each in others)
            make: Callable[[], Any] = lambda w=window, o=others: predictors.measured(self.read(w)[0], o)  # noqa: E731
            found.append(self.get(f"expected {asked}", window, make))
        return predictors.table([window.article for window in self.windows], found)

    def bits(self) -> dict[str, Any]:
        plan = sequencebits.cases(quick=self.quick)
        by_window: list[list[dict[str, float]]] = []
        told, coder = [], []
        for window in self.windows:
            held: dict[str, Any] = {}
            of: list[dict[str, float]] = []
            for case in plan:
                name = f"{case.curve} {case.told} {case.recipe.digest.hex()}"
                of.append(self.get(name, window, lambda c=case, h=held, w=window: self._case(c, w, h)))
            by_window.append(of)
            for name, make, into in (
                ("coder", sequencebits.conditioned, coder),
                ("energies", sequencebits.energies, told),
            ):
                ask: Callable[[], Any] = lambda m=make, w=window: m(*self.read(w), self.profile, CELLAR[0])  # noqa: E731
                into.append(self.get(name, window, ask))
        points: dict[str, list[list[dict[str, float]]]] = {}
        rows = []
        for k, case in enumerate(plan):
            of = [each[k] for each in by_window]
            points.setdefault(case.curve, []).append(of)
            mean = {name: float(np.mean([w[name] for w in of])) for name in ("bytes", "kl")}
            rows.append({"curve": case.curve, "told": case.told, "quantize": case.recipe.quantize, **mean})
        articles = [window.article for window in self.windows]
        presets = [case.recipe.name for case in plan if case.curve == "turbo"]
        return {
            "rows": rows,
            "at_equal_kl": sequencebits.compared(articles, points, presets),
            "coder": {name: float(np.mean([each[name] for each in coder])) for name in coder[0]},
            "premise": sequencebits.premise(told),
        }

    def _case(self, case: sequencebits.Case, window: Window, held: dict[str, Any]) -> dict[str, float]:
        return sequencebits.measured(self.local, *self.read(window), case, self.profile, held)

    def curve(self) -> dict[str, Any]:
        return sequencecurve.points(self.local, self.windows, self.profile, quick=self.quick)

    def length(self) -> dict[str, Any]:
        lengths = self.scale.lengths
        texts = self._windows(max(lengths) - 1, 1, self.scale.documents)
        found = []
        for text in texts:
            make: Callable[[], Any] = lambda t=text: sequencecurve.by_text_length(  # noqa: E731
                self.local, t, self.profile, lengths
            )
            found.append(self.get(f"length {lengths}", text, make))
        recipes = {name: averaged([each[name] for each in found]) for name in found[0]}
        return {"documents": len(texts), "articles": [text.article for text in texts], "recipes": recipes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with wt2_valid.txt")
    parser.add_argument("--windows", type=int, help="default: 8, of which 256 tokens each make 2,048; --quick: 2")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="a look at whether all of it works")
    arguments = parser.parse_args()
    study = Study(arguments.data, arguments.windows or (2 if arguments.quick else 8), quick=arguments.quick)
    result: dict[str, Any] = {"benchmark": "sequence", "profile": study.profile.id}
    result |= {"windows": [{"id": w.id, "article": w.article, "kind": w.kind} for w in study.windows]}
    result |= {"prefix": study.scale.prefix, "scored": study.scale.scored}
    quick = study.kept.folder / "quick"
    path = quick.with_suffix(".json") if arguments.quick else RESULTS / "sequence.json"
    plot = quick.with_suffix(".png") if arguments.quick else HERE.parent / "docs" / "sequential.png"
    before = json.loads(path.read_text()) if path.is_file() else {}
    if all(before.get(key) == rounded(value) for key, value in result.items()):
        result |= {part: before[part] for part in PARTS if part in before}
    for part in arguments.part:
        result |= {part: getattr(study, part)(), "machine": machine()}
        path.write_text(json.dumps(rounded(result), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        sequenceplot.draw(result, plot)
    print(json.dumps(rounded({"written": str(path.name), **{part: result[part] for part in arguments.part}})))


if __name__ == "__main__":
    main()
