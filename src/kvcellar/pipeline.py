"""The whole flow of a block, both ways.

    encode   for each layer group, shallow to deep:      decode   for each layer group, shallow to deep:
               p   = predict(context)                               p   = predict(context)
               q   = quantize(T(x − p))                             q   = symbols⁻¹(part)
               part = symbols(q)                                    rec = p + T⁻¹(dequantize(q))
               context.push(p + T⁻¹(dequantize(q)))                 context.push(rec)

The loop is closed: the encoder predicts from what the decoder will have, never from x. Without a predictor, a
transform and a quantizer it is the bit-exact path. Reduction changes which tokens there are and happens before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from .cache import KVCache, LayerKV, allocate
from .errors import DamagedArchive, InvalidRecipe, ProfileMissing, UnsupportedCache
from .geometry import FULL, Geometry
from .profile import Profile
from .quantize.bits import BitExact
from .recipe import Recipe
from .stages import Context, Predictor, Quantizer, Residual, SymbolCoder, Transform, build


class Coefficients(Residual):
    """The lossy middle of the loop: q = quantize(T(x − p)); the restored group is p + T⁻¹(dequantize(q))."""

    lossless = False

    def __init__(self, transform: Transform | None, quantizer: Quantizer):
        self.transform, self.quantizer = transform, quantizer

    def encode(self, x: list[Tensor], p: list[Tensor] | None) -> list[np.ndarray]:
        residual = [t.float() for t in x] if p is None else [a.float() - b for a, b in zip(x, p, strict=True)]
        flat = self.transform.forward(residual) if self.transform else _flatten(residual)
        return [self.quantizer.quantize(flat)]

    def buffers(self, out: list[Tensor]) -> list[np.ndarray]:
        width = sum(t.shape[0] * t.shape[2] for t in out)
        return [np.empty((out[0].shape[1], width), np.int32)]

    def decode(self, symbols: list[np.ndarray], p: list[Tensor] | None, out: list[Tensor]) -> None:
        flat = self.quantizer.dequantize(symbols[0])
        residual = self.transform.inverse(flat, out) if self.transform else _unflatten(flat, out)
        for i, tensor in enumerate(out):
            tensor.copy_(residual[i] if p is None else p[i] + residual[i])


class Pipeline:
    """A recipe made ready for one geometry and profile. Raises InvalidRecipe when its stages do not fit together."""

    def __init__(self, recipe: Recipe, geometry: Geometry, profile: Profile | None = None):
        if recipe.reduce is not None:
            raise InvalidRecipe(f"recipe {recipe.name!r} reduces tokens, which this kvcellar cannot store yet")
        if recipe.window is not None:
            raise InvalidRecipe(f"recipe {recipe.name!r} keeps a fine window, which this kvcellar cannot code yet")
        self.recipe, self.geometry = recipe, geometry
        self.predictor: Predictor | None = build("predict", recipe.predict)
        transform: Transform | None = build("transform", recipe.transform)
        quantizer: Quantizer | None = build("quantize", recipe.quantize)
        self.symbols: SymbolCoder = build("symbols", recipe.symbols)
        if quantizer is None and transform is not None:
            raise InvalidRecipe(f"recipe {recipe.name!r} transforms without a quantizer: that cannot be exact")
        self.residual: Residual = BitExact() if quantizer is None else Coefficients(transform, quantizer)
        for stage in (self.predictor, transform, quantizer, self.symbols):
            if stage is not None:
                if stage.needs_profile and profile is None:
                    raise ProfileMissing(
                        f"recipe {recipe.name!r} needs a profile of this model, and there is none: "
                        f"run kvcellar calibrate --model DIR --recipe {recipe.name}"
                    )
                stage.bind(geometry, profile)
        per_group = {s.layers_per_group for s in (self.predictor, transform) if s is not None} or {1}
        if len(per_group) > 1:
            raise InvalidRecipe(f"recipe {recipe.name!r}: its stages group layers by {sorted(per_group)}; expected one")
        step = per_group.pop()
        self.groups = [range(i, min(i + step, len(geometry))) for i in range(0, len(geometry), step)]
        if not geometry.uniform and (self.predictor is not None or step > 1):
            odd = next(i for i, layer in enumerate(geometry.layers) if layer.kind != FULL)
            raise UnsupportedCache(
                f"layer {odd} is a {geometry.layers[odd].kind} layer; recipe {recipe.name!r} codes layers together and "
                "needs each to hold every token: use recipe 'exact'"
            )

    @property
    def lossless(self) -> bool:
        return self.residual.lossless

    def encode(self, block: KVCache, tokens: np.ndarray, first_position: int) -> list[bytes]:
        """One part per layer group from the (views of) tokens of a block."""
        context, parts = Context(tokens, first_position), []
        for group in self.groups:
            x = _sides(block.layers[i] for i in group)
            p = self.predictor.predict(context, x) if self.predictor else None
            q = self.residual.encode(x, p)
            parts.append(self.symbols.encode(q))
            if self.predictor:
                context.push(self._restore(q, p, [torch.empty_like(t) for t in x]) if not self.lossless else x)
        return parts

    def decode(
        self,
        groups: Sequence[int],
        parts: Sequence[memoryview],
        tokens: np.ndarray,
        first_position: int,
        out: Mapping[int, LayerKV],
    ) -> None:
        """Restore `groups` (those of `needed`, in order) of one block into `out`, layers (H, T, D) by index.

        Layers a prediction needs but `out` lacks are restored into memory of their own. Raises DamagedArchive.
        """
        targets = [
            _sides(out[i] if i in out else self._spare(i, len(tokens)) for i in self.groups[group]) for group in groups
        ]
        symbols = [self.residual.buffers(target) for target in targets]
        self.symbols.decode(parts, symbols)
        context = Context(tokens, first_position)
        for target, q in zip(targets, symbols, strict=True):
            p = self.predictor.predict(context, target) if self.predictor else None
            self.residual.decode(q, p, target)
            context.push(target)

    def needed(self, layers: Iterable[int]) -> list[int]:
        """Groups to decode for `layers`: their own, and all shallower ones when there is a predictor."""
        wanted = set(layers)
        groups = [g for g, members in enumerate(self.groups) if wanted & set(members)]
        return list(range(groups[-1] + 1)) if groups and self.predictor else groups

    def require_plausible(self, group: int, tokens: Callable[[int], int], part_length: int) -> None:
        """Raise DamagedArchive, before anything is allocated, for a part too short to hold `tokens(layer)` tokens."""
        layers = [(self.geometry.layers[i], tokens(i)) for i in self.groups[group]]
        if self.lossless:
            symbols = sum(layer.bytes_per_token * count for layer, count in layers)
        else:
            symbols = sum(layer.numbers_per_token * count * 4 for layer, count in layers)
        if symbols > self.symbols.max_expansion * part_length:
            raise DamagedArchive("block part", f"{part_length} bytes cannot decode to {symbols}")

    def _restore(self, symbols: list[np.ndarray], p: list[Tensor] | None, out: list[Tensor]) -> list[Tensor]:
        self.residual.decode(symbols, p, out)
        return out

    def _spare(self, layer: int, tokens: int) -> LayerKV:
        return allocate(self.geometry, {layer: tokens})[layer]


def _sides(layers: Iterable[LayerKV]) -> list[Tensor]:
    return [side for layer in layers for side in (layer.keys, layer.values)]


def _flatten(group: list[Tensor]) -> Tensor:
    """(T, C) from tensors (H, T, D): one row per token."""
    return torch.cat([t.transpose(0, 1).reshape(t.shape[1], -1) for t in group], dim=1)


def _unflatten(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    widths = [t.shape[0] * t.shape[2] for t in like]
    columns = torch.split(flat, widths, dim=1)
    return [c.reshape(t.shape[1], t.shape[0], t.shape[2]).transpose(0, 1) for c, t in zip(columns, like, strict=True)]
