"""What each layer of the Sequential paper's stack is worth: the expected predictor, bits by surprisal, `sequential`.

Reads tuning text that the profile has not seen (WikiText-2 valid from --data, the tuning half of the standard library),
one window a document: 1,024 tokens of context, 384 scored. Needs a profile for `cellar` (`kvcellar calibrate`). An
interrupted run goes on. Writes benchmarks/results/sequence.json and docs/sequential.png; the last line is JSON.

    python benchmarks/sequence.py --data DIR [--windows 8] [--part expected] [--part bits]

expected: of 256 tokens of each window the 20 likeliest are read by the model; energy explained in the loss metric by
the first 1, 4, 20 of them, by `linear/1` and by a ridge regression on the token alone (fitted on the other windows),
and bytes of `cellar`'s code on what each leaves, at `cellar`'s three steps and at the weighted error of `linear/1`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import HERE, machine, write_result
from kvcellar.calibrate import find_fitted
from kvcellar.errors import ProfileMissing
from kvcellar.evaluate.bootstrap import bca, bytes_at_kl
from kvcellar.evaluate.texts import Window, load_sources
from kvcellar.frontends.bench.ratevariants import roots_of
from kvcellar.frontends.bench.ratewindows import HeldOut, Kept, chosen, sides
from kvcellar.frontends.bench.run import source_digest
from kvcellar.frontends.cli.demo_model import demo_model
from kvcellar.frontends.cli.models import MeasuredModel, cache_geometry
from kvcellar.frontends.expected import candidate_caches
from kvcellar.pipeline import Pipeline
from kvcellar.profile import Profile, home
from kvcellar.recipe import CELLAR
from kvcellar.stages import Context, Grade
from kvcellar.tokens import Tokens
from kvcellar.transform.basis import times
from sequencebits import cases, compared, conditioned, energies, measured, premise

PREFIX, SCORED, SPAN, KS = 1024, 384, range(512, 768), (1, 4, 20)
RIDGE = 1e-2
SOURCES = ("quantize", "predict", "transform", "symbols", "frontends/bench")


class Given:
    """Predictions by layer that were made beforehand, in a predictor's place."""

    layers_per_group = (CELLAR[0].predict or {})["layers_per_group"]

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]]):
        self.layers = layers

    def predict(self, context: Context, like: list[Tensor]) -> list[Tensor]:
        first = len(context.restored) * self.layers_per_group
        return [side for i in range(first, first + len(like) // 2) for side in self.layers[i]]


class Study:
    """The windows of a run, and results that are kept."""

    def __init__(self, data: Path, count: int):
        self.local = MeasuredModel(demo_model())
        profile = find_fitted(CELLAR[0], self.local.identity, cache_geometry(self.local))
        if profile is None:
            raise ProfileMissing("no profile for recipe cellar: run kvcellar calibrate --recipe cellar")
        self.profile: Profile = profile
        documents = load_sources(HERE / "texts.toml", data).documents("tune")
        seen = [str(text) for text in profile.metadata.get("texts", [])]  # type: ignore[attr-defined]
        encode: Callable[[str], list[int]] = lambda text: self.local.encode(text, continues=True)  # noqa: E731
        self.windows = chosen(encode, documents, seen, PREFIX, SCORED, count)
        self.kept = Kept(home() / "bench" / "sequence" / self.local.identity.digest[:16])
        self.key = f"{source_digest(*SOURCES)} {profile.id}"
        self._read: tuple[str, HeldOut, np.ndarray] | None = None

    def read(self, window: Window) -> tuple[HeldOut, np.ndarray]:
        """A window and the surprisals of its prefix."""
        if self._read is None or self._read[0] != window.id:
            held = HeldOut.read(self.local, window)
            self._read = window.id, held, held.surprisal(self.local)
        return self._read[1], self._read[2]

    def get(self, part: str, window: Window, make: Callable[[HeldOut, np.ndarray], Any]) -> Any:
        found = self.kept.get(f"{self.key} {window.id} {part}", lambda: make(*self.read(window)))
        print(f"{part} on {window.article}", flush=True)
        return found

    def bits(self) -> dict[str, Any]:
        points: dict[str, list[list[dict[str, float]]]] = {}
        rows = []
        plan = cases()
        by_window = []
        for window in self.windows:
            held: dict[str, Any] = {}
            by_window.append(
                [
                    self.get(
                        f"{case.curve} {case.told} {case.recipe.digest.hex()}",
                        window,
                        lambda w, s, case=case, held=held: measured(self.local, w, s, case, self.profile, held),
                    )
                    for case in plan
                ]
            )
        for k, case in enumerate(plan):
            of = [each[k] for each in by_window]
            points.setdefault(case.curve, []).append(of)
            mean = {name: float(np.mean([w[name] for w in of])) for name in ("bytes", "kl")}
            rows.append({"curve": case.curve, "told": case.told, "quantize": case.recipe.quantize, **mean})
        coder = [self.get("coder", w, lambda h, s: conditioned(h, s, self.profile, CELLAR[0])) for w in self.windows]
        told = [self.get("energies", w, lambda h, s: energies(h, s, self.profile, CELLAR[0])) for w in self.windows]
        articles = [window.article for window in self.windows]
        return {
            "rows": rows,
            "at_equal_kl": compared(articles, points),
            "coder": {name: float(np.mean([each[name] for each in coder])) for name in coder[0]},
            "premise": premise(told),
        }

    def expected(self) -> dict[str, Any]:
        moments = [self.get("moments", w, self._moments) for w in self.windows]
        found = []
        for number, window in enumerate(self.windows):
            others = [each for i, each in enumerate(moments) if i != number]
            found.append(self.get("expected", window, lambda h, _, others=others: self._expected(h, others)))
        articles, rows = [window.article for window in self.windows], []
        for name in found[0]["by"]:
            of = [each["by"][name] for each in found]
            sums = np.array([[one["left"], each["all"]] for one, each in zip(of, found, strict=True)])
            explained = _explained(sums.sum(axis=0)[None])[0]
            row: dict[str, Any] = {"predictor": name, "explained": float(explained)}
            row["explained_ci"] = bca(articles, sums, _explained)
            row["mflop"], row["evaluations"] = of[0]["mflop"], of[0]["evaluations"]
            for at in ("bytes", "error"):
                row[at] = [float(np.mean([one[at][k] for one in of])) for k in range(len(CELLAR))]
            sizes = np.array([[*one["bytes"], *one["error"], 1.0] for one in of])
            row["bytes_ci"] = [bca(articles, sizes, lambda s, k=k: s[:, k] / s[:, -1]) for k in range(len(CELLAR))]
            rows.append(row)
        linear = next(row for row in rows if row["predictor"] == "linear/1")
        for row in rows:
            curve = list(zip(row["error"], row["bytes"], strict=True))
            row["bytes_at_error_of_linear"] = [bytes_at_kl(curve, error) for error in linear["error"]]
        hits = {str(k): float(np.mean([each["hits"][str(k)] for each in found])) for k in KS}
        calls = {name: int(np.sum([each[name] for each in found])) for name in ("calls", "prefix_calls", "evaluated")}
        return {"tokens": len(SPAN) * len(found), "hits": hits, **calls, "steps": _steps(), "rows": rows}

    def _flat(self, pipeline: Pipeline, layers: Sequence[tuple[Tensor, Tensor]], group: range) -> Tensor:
        rope: Any = pipeline.residual.transform.rope  # type: ignore[attr-defined]
        positions = torch.arange(SPAN.start, SPAN.stop)
        found: Tensor = rope.forward([side.float() for i in group for side in layers[i]], group, positions)
        return found

    def _features(self, ids: np.ndarray) -> Tensor:
        table = torch.from_numpy(np.asarray(self.profile.tensors["predict.table"]))[torch.from_numpy(ids)].float()
        scaled = table * torch.from_numpy(np.asarray(self.profile.tensors["predict.table_scale"]))
        return torch.cat([scaled, torch.ones(len(ids), 1)], dim=1)

    def _moments(self, window: HeldOut, _: np.ndarray) -> dict[str, Any]:
        """ΦᵀΦ, and ΦᵀY in the metric, of a window's span; the latter in a file beside the results."""
        pipeline = Pipeline(CELLAR[0], window.cache.geometry, self.profile)
        phi = self._features(np.array(window.window.ids)[SPAN.start : SPAN.stop])
        layers = [
            (kv.keys[:, SPAN.start : SPAN.stop], kv.values[:, SPAN.start : SPAN.stop]) for kv in window.cache.layers
        ]
        y = torch.cat([self._flat(pipeline, layers, group) for group in pipeline.groups], dim=1)
        name = f"moments-{window.window.id}.npy"
        np.save(self.kept.folder / name, (phi.T @ y).numpy(), allow_pickle=False)
        return {"gram": (phi.T @ phi).tolist(), "cross": name}

    def _alone(self, ids: np.ndarray, others: list[dict[str, Any]]) -> Tensor:
        """Rows (n, P of all layers) foreseen from the token alone."""
        gram = torch.tensor(np.sum([each["gram"] for each in others], axis=0))
        cross = sum(torch.from_numpy(np.load(self.kept.folder / each["cross"], allow_pickle=False)) for each in others)
        penalty = torch.diag(RIDGE * gram.diagonal().mean() * torch.ones(len(gram)))
        return self._features(ids) @ torch.linalg.solve(gram + penalty, cross.to(gram.dtype)).float()

    def _expected(self, window: HeldOut, others: list[dict[str, Any]]) -> dict[str, Any]:
        pipeline = Pipeline(CELLAR[0], window.cache.geometry, self.profile)
        ids = np.array(window.window.ids)
        asked = candidate_caches(self.local.model, ids[: SPAN.stop], SPAN, max(KS))
        x = [(kv.keys[:, SPAN.start : SPAN.stop], kv.values[:, SPAN.start : SPAN.stop]) for kv in window.cache.layers]
        linear: Any = pipeline.predictor
        means = [
            torch.from_numpy(np.array(self.profile.tensors[f"predict.mean.{g}"])) for g in range(len(pipeline.groups))
        ]
        alone = self._alone(ids[SPAN.start : SPAN.stop], others)
        widths = [len(mean) for mean in means]
        given: dict[str, tuple[Any, float, int]] = {
            "mean": (self._turned(pipeline, x, [m.expand(len(SPAN), -1) for m in means]), 0.0, 0),
            "token alone": (
                self._turned(pipeline, x, list(torch.split(alone, widths, dim=1))),
                2e-6 * alone.shape[1] * 129,
                0,
            ),
            "linear/1": (None, 2e-6 * sum(g.down.numel() + g.up.numel() for g in linear.groups), 0),
        }
        once = 2e-6 * sum(
            p.numel() for n, p in self.local.model.named_parameters() if "embed" not in n and "lm_head" not in n
        )
        for k in KS:
            kvs = [(kv.keys, kv.values) for kv in asked.expected(k)]
            given[f"expected, k = {k}"] = (kvs, once * (1 + k), 1 + k)
        by, total = {}, 0.0
        for name, (layers, mflop, evaluations) in given.items():
            row: dict[str, Any] = {"bytes": [], "error": [], "mflop": mflop, "evaluations": evaluations}
            for recipe in CELLAR:
                row |= self._coded(Pipeline(recipe, pipeline.geometry, self.profile), x, layers, ids, row)
            by[name] = row
            total = row["left"] if name == "mean" else total
        hits = {str(k): float(asked.hits(k).float().mean()) for k in KS}
        counted = {"calls": asked.calls, "prefix_calls": asked.prefix_calls, "evaluated": len(SPAN) * asked.k}
        return {"all": total, "by": by, "hits": hits, **counted}

    def _turned(self, pipeline: Pipeline, like: Any, rows: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Keys and values, rotated, of rows (n, P) by group."""
        rope: Any = pipeline.residual.transform.rope  # type: ignore[attr-defined]
        found: list[tuple[Tensor, Tensor]] = []
        for group, flat in zip(pipeline.groups, rows, strict=True):
            shaped = [side.float() for i in group for side in like[i]]
            back = rope.inverse(flat.contiguous(), shaped, group, torch.arange(SPAN.start, SPAN.stop))
            found += list(zip(back[::2], back[1::2], strict=True))
        return found

    def _coded(self, pipeline: Pipeline, x: Any, layers: Any, ids: np.ndarray, row: dict[str, Any]) -> dict[str, Any]:
        """Bytes a token, weighted error, and at the last step the energy that the prediction leaves."""
        if layers is not None:
            pipeline.predictor = Given(layers)  # type: ignore[assignment]
        tokens = Tokens.at(pipeline.recipe.block, SPAN, ids[SPAN.start : SPAN.stop], 0, ids[: SPAN.start])
        held = {i: _kv(*pair) for i, pair in enumerate(x)}
        symbols, restored = pipeline.quantize(held, tokens, Grade.COARSE, restore=True)
        size = sum(len(part) for part in pipeline.pack([symbols])) / len(SPAN)
        context, left, error = Context(tokens.ids, tokens.positions, tokens.earlier), 0.0, 0.0
        for group in pipeline.groups:
            assert pipeline.predictor is not None
            p = pipeline.predictor.predict(context, [side for i in group for side in x[i]])
            foreseen = dict(zip(group, zip(p[::2], p[1::2], strict=True), strict=True))
            back = {i: (restored[i].keys, restored[i].values) for i in group}
            for name, other in (("left", foreseen), ("error", back)):
                apart = [(x[i][0].float() - other[i][0].float(), x[i][1].float() - other[i][1].float()) for i in group]
                flat = self._flat(pipeline, dict(zip(group, apart, strict=True)), group)  # type: ignore[arg-type]
                energy = float(times(flat, roots_of(self.profile, group)).double().square().sum())
                left, error = (left + energy, error) if name == "left" else (left, error + energy)
            context.push(list(sides(restored, group)))
        return {"bytes": [*row["bytes"], size], "error": [*row["error"], error / len(SPAN)], "left": left}


def _kv(keys: Tensor, values: Tensor) -> Any:
    from kvcellar.cache import LayerKV

    return LayerKV(keys, values)


def _explained(sums: np.ndarray) -> np.ndarray:
    found: np.ndarray = 1 - sums[:, 0] / sums[:, 1]
    return found


def _steps() -> list[float]:
    return [float((recipe.quantize or {})["step"]) for recipe in CELLAR]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with wt2_valid.txt")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--part", action="append", choices=("expected", "bits"))
    parser.add_argument("--name", default="sequence", help="of the result file")
    arguments = parser.parse_args()
    study = Study(arguments.data, arguments.windows)
    named = [{"id": w.id, "article": w.article, "kind": w.kind} for w in study.windows]
    result: dict[str, Any] = {"benchmark": "sequence", "machine": machine(), "profile": study.profile.id}
    result |= {"windows": named, "prefix": PREFIX, "scored": SCORED}
    for part in arguments.part or ("expected", "bits"):
        result[part] = getattr(study, part)()
    write_result(arguments.name, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
