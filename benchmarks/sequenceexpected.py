"""The expected predictor beside cheap ones: model calls, energy explained, bytes of `cellar`'s code on what is left.

Of a span of each window the 20 likeliest tokens of every position are read by the model, once; the first 1, 4 and 20 of
them make the predictions. Beside them: the calibrated mean, a ridge regression on the token alone (fitted on the other
windows), and `linear/1`. Energies are in the loss metric; bytes are those of `cellar`'s code at its three steps, and at
the weighted error of `linear/1`. FLOPs are those of a restore: twice the parameters that a token meets, 1 + k times for
the expected predictor, whose candidates come beside the true token. At the FLOPs of one evaluation there is another
predictor, the model on the stored token itself, which leaves nothing: `token_itself`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcellar.cache import LayerKV
from kvcellar.evaluate.bootstrap import bca, bytes_at_kl
from kvcellar.frontends.bench.ratevariants import roots_of
from kvcellar.frontends.bench.ratewindows import HeldOut, Kept, sides
from kvcellar.frontends.expected import candidate_caches
from kvcellar.pipeline import Pipeline
from kvcellar.profile import Profile
from kvcellar.recipe import CELLAR
from kvcellar.stages import Context, Grade
from kvcellar.tokens import Tokens
from kvcellar.transform.basis import times
from sequencebits import prepared

KS = (1, 4, 20)
RIDGE = 1e-2
Layers = Sequence[tuple[Tensor, Tensor]]


class Given:
    """Predictions by layer that were made beforehand, in a predictor's place."""

    layers_per_group = (CELLAR[0].predict or {})["layers_per_group"]

    def __init__(self, layers: Layers):
        self.layers = layers

    def predict(self, context: Context, like: list[Tensor]) -> list[Tensor]:
        first = len(context.restored) * self.layers_per_group
        return [side for i in range(first, first + len(like) // 2) for side in self.layers[i]]


class Predictors:
    """What is measured of a window's `span`; large sums are in files of the folder of `kept`."""

    def __init__(self, model: Any, profile: Profile, kept: Kept, span: range):
        self.model, self.profile, self.kept, self.span = model, profile, kept, span
        self.positions = torch.arange(span.start, span.stop)
        self.once = 2e-6 * sum(
            p.numel() for name, p in model.named_parameters() if "embed" not in name and "lm_head" not in name
        )

    def moments(self, window: HeldOut) -> dict[str, Any]:
        """ΦᵀΦ, and ΦᵀY in the metric, of a window's span; the latter in a file beside the results."""
        pipeline = prepared(CELLAR[0], window.cache.geometry, self.profile)
        phi = self._features(np.array(window.window.ids)[self.span.start : self.span.stop])
        y = torch.cat([self._flat(pipeline, self._of_span(window), group) for group in pipeline.groups], dim=1)
        name = f"moments-{window.window.id}-{self.span.start}-{self.span.stop}.npy"
        np.save(self.kept.folder / name, (phi.T @ y).numpy(), allow_pickle=False)
        return {"gram": (phi.T @ phi).tolist(), "cross": name}

    def measured(self, window: HeldOut, others: list[dict[str, Any]]) -> dict[str, Any]:
        """Every predictor on a window, the token alone as `others`, the moments of other windows, have it."""
        pipeline = prepared(CELLAR[0], window.cache.geometry, self.profile)
        ids = np.array(window.window.ids)
        span, x = self.span, self._of_span(window)
        asked = candidate_caches(self.model, ids[: span.stop], span, max(KS))
        linear: Any = pipeline.predictor
        means = [
            torch.from_numpy(np.array(self.profile.tensors[f"predict.mean.{g}"])) for g in range(len(pipeline.groups))
        ]
        alone = self._alone(ids[span.start : span.stop], others)
        widths = [len(mean) for mean in means]
        given: dict[str, tuple[Layers | None, float, int]] = {
            "mean": (self._turned(pipeline, x, [m.expand(len(span), -1) for m in means]), 0.0, 0),
            "token alone": (
                self._turned(pipeline, x, list(torch.split(alone, widths, dim=1))),
                2e-6 * alone.shape[1] * self._features(ids[:1]).shape[1],
                0,
            ),
            "linear/1": (None, 2e-6 * sum(g.down.numel() + g.up.numel() for g in linear.groups), 0),
        }
        for k in KS:
            kvs = [(kv.keys, kv.values) for kv in asked.expected(k)]
            given[f"expected, k = {k}"] = (kvs, self.once * (1 + k), 1 + k)
        by: dict[str, dict[str, Any]] = {}
        for name, (layers, mflop, evaluations) in given.items():
            row: dict[str, Any] = {"bytes": [], "error": [], "mflop": mflop, "evaluations": evaluations}
            for recipe in CELLAR:
                row |= self._coded(prepared(recipe, pipeline.geometry, self.profile), x, layers, ids, row)
            by[name] = row
        hits = {str(k): float(asked.hits(k).float().mean()) for k in KS}
        counted = {"calls": asked.calls, "prefix_calls": asked.prefix_calls, "evaluated": len(span) * asked.k}
        return {"all": by["mean"]["left"], "by": by, "hits": hits, **counted}

    def table(self, articles: Sequence[str], found: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Rows by predictor, sums over windows with 95 % BCa limits over articles (None for a single one)."""
        rows = []
        for name in found[0]["by"]:
            of = [each["by"][name] for each in found]
            sums = np.array([[one["left"], each["all"]] for one, each in zip(of, found, strict=True)])
            row: dict[str, Any] = {"predictor": name, "explained": float(_explained(sums.sum(axis=0)[None])[0])}
            row["explained_ci"] = bca(articles, sums, _explained) if sums[:, 0].any() else None
            row["mflop"], row["evaluations"] = of[0]["mflop"], of[0]["evaluations"]
            for at in ("bytes", "error"):
                row[at] = [float(np.mean([one[at][k] for one in of])) for k in range(len(CELLAR))]
            sizes = np.array([[*one["bytes"], 1.0] for one in of])
            row["bytes_ci"] = [bca(articles, sizes, lambda s, k=k: s[:, k] / s[:, -1]) for k in range(len(CELLAR))]
            rows.append(row)
        linear = next(row for row in rows if row["predictor"] == "linear/1")
        for row in rows:
            curve = list(zip(row["error"], row["bytes"], strict=True))
            row["bytes_at_error_of_linear"] = [bytes_at_kl(curve, error) for error in linear["error"]]
        hits = {str(k): float(np.mean([each["hits"][str(k)] for each in found])) for k in KS}
        calls = {name: int(np.sum([each[name] for each in found])) for name in ("calls", "prefix_calls", "evaluated")}
        itself = {"mflop": self.once, "evaluations": 1, "explained": 1.0, "bytes": 0.0}
        steps = [float((recipe.quantize or {})["step"]) for recipe in CELLAR]
        tokens = len(self.span) * len(found)
        return {"tokens": tokens, "hits": hits, **calls, "steps": steps, "rows": rows, "token_itself": itself}

    def _of_span(self, window: HeldOut) -> Layers:
        rows = slice(self.span.start, self.span.stop)
        return [(kv.keys[:, rows], kv.values[:, rows]) for kv in window.cache.layers]

    def _flat(self, pipeline: Pipeline, layers: Any, group: range) -> Tensor:
        rope: Any = pipeline.residual.transform.rope  # type: ignore[attr-defined]
        found: Tensor = rope.forward([side.float() for i in group for side in layers[i]], group, self.positions)
        return found

    def _features(self, ids: np.ndarray) -> Tensor:
        table = torch.from_numpy(np.asarray(self.profile.tensors["predict.table"]))[torch.from_numpy(ids)].float()
        scaled = table * torch.from_numpy(np.asarray(self.profile.tensors["predict.table_scale"]))
        return torch.cat([scaled, torch.ones(len(ids), 1)], dim=1)

    def _alone(self, ids: np.ndarray, others: list[dict[str, Any]]) -> Tensor:
        """Rows (n, P of all layers) foreseen from the token alone."""
        gram = torch.tensor(np.sum([each["gram"] for each in others], axis=0))
        cross = np.sum([np.load(self.kept.folder / each["cross"], allow_pickle=False) for each in others], axis=0)
        penalty = RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
        return self._features(ids) @ torch.linalg.solve(gram + penalty, torch.from_numpy(cross).to(gram.dtype)).float()

    def _turned(self, pipeline: Pipeline, like: Layers, rows: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Keys and values, rotated, of rows (n, P) by group."""
        rope: Any = pipeline.residual.transform.rope  # type: ignore[attr-defined]
        found: list[tuple[Tensor, Tensor]] = []
        for group, flat in zip(pipeline.groups, rows, strict=True):
            shaped = [side.float() for i in group for side in like[i]]
            back = rope.inverse(flat.contiguous(), shaped, group, self.positions)
            found += list(zip(back[::2], back[1::2], strict=True))
        return found

    def _coded(
        self, pipeline: Pipeline, x: Layers, layers: Layers | None, ids: np.ndarray, row: dict[str, Any]
    ) -> dict[str, Any]:
        """Bytes a token, weighted error, and at the last step the energy that the prediction leaves."""
        if layers is not None:
            pipeline.predictor = Given(layers)  # type: ignore[assignment]
        span = self.span
        tokens = Tokens.at(pipeline.recipe.block, span, ids[span.start : span.stop], 0, ids[: span.start])
        held = {i: LayerKV(*pair) for i, pair in enumerate(x)}
        symbols, restored = pipeline.quantize(held, tokens, Grade.COARSE, restore=True)
        size = sum(len(part) for part in pipeline.pack([symbols])) / len(span)
        context, left, error = Context(tokens.ids, tokens.positions, tokens.earlier), 0.0, 0.0
        for group in pipeline.groups:
            assert pipeline.predictor is not None
            p = pipeline.predictor.predict(context, [side for i in group for side in x[i]])
            foreseen = dict(zip(group, zip(p[::2], p[1::2], strict=True), strict=True))
            back = {i: (restored[i].keys, restored[i].values) for i in group}
            left += self._energy(pipeline, x, foreseen, group)
            error += self._energy(pipeline, x, back, group)
            context.push(list(sides(restored, group)))
        return {"bytes": [*row["bytes"], size], "error": [*row["error"], error / len(span)], "left": left}

    def _energy(self, pipeline: Pipeline, x: Layers, other: dict[int, tuple[Tensor, Tensor]], group: range) -> float:
        """|A (x − other)|² of a group."""
        apart = {i: tuple(a.float() - b.float() for a, b in zip(x[i], other[i], strict=True)) for i in group}
        flat = self._flat(pipeline, apart, group)
        return float(times(flat, roots_of(self.profile, group)).double().square().sum())


def _explained(sums: np.ndarray) -> np.ndarray:
    found: np.ndarray = 1 - sums[:, 0] / sums[:, 1]
    return found
