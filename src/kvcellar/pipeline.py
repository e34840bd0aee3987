"""The whole flow of a block, both ways.

    encode   for each layer group, shallow to deep:      decode   for each layer group, shallow to deep:
               p   = predict(context)                               p   = predict(context)
               q   = quantize(T(x − p))                             q   = symbols⁻¹(part)
               part = symbols(q)                                    rec = p + T⁻¹(dequantize(q))
               context.push(p + T⁻¹(dequantize(q)))                 context.push(rec)

The loop is closed: the encoder predicts from what the decoder will have, never from x. Without a predictor, a
transform and a quantizer it is the bit-exact path. Reduction changes which tokens there are and happens before.

Where a recipe keeps a fine window (`window.py`), a block's tokens are of two grades, and each grade passes the loop by
itself: a prediction never mixes them, since a token changes its grade while its neighbours keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from .cache import KVCache, LayerKV, allocate
from .errors import DamagedArchive, InvalidInput, InvalidRecipe, ModelMissing, ProfileMissing, UnsupportedCache
from .geometry import FULL, Geometry
from .profile import Profile
from .quantize.bits import BitExact
from .quantize.coefficients import Coefficients
from .recipe import Recipe
from .replayed import Replay, Replayed, fill, known_layers
from .residual import Place, Residual
from .stages import CausalCoder, Grade, Predictor, Quantizer, SymbolCoder, Transform, build
from .tokens import Tokens

Arrays = list[np.ndarray]
Layout = Sequence[tuple[int, type[np.generic]]]
MAX_BYTES_PER_SYMBOL_BYTE = 1024


class Pipeline:
    """A recipe made ready for one geometry and profile. Raises InvalidRecipe when its stages do not fit together."""

    def __init__(self, recipe: Recipe, geometry: Geometry, profile: Profile | None = None):
        if recipe.reduce is not None:
            raise InvalidRecipe(f"recipe {recipe.name!r} reduces tokens: its archives are restored whole or not at all")
        self.recipe, self.geometry = recipe, geometry
        self._sizes: dict[tuple[range, Grade], int] = {}
        self.predictor: Predictor | None = build("predict", recipe.predict)
        transform: Transform | None = build("transform", recipe.transform)
        quantizer: Quantizer | None = build("quantize", recipe.quantize)
        self.symbols: SymbolCoder = build("symbols", recipe.symbols)
        if quantizer is None and (transform is not None or recipe.window is not None):
            what = "transforms" if transform is not None else "keeps a fine window"
            raise InvalidRecipe(f"recipe {recipe.name!r} {what} without a quantizer: that cannot be exact")
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
        firsts = {s.first_layer for s in (self.predictor, transform) if s is not None} or {0}
        if len(firsts) > 1 or max(firsts) >= len(geometry):
            raise InvalidRecipe(
                f"recipe {recipe.name!r}: its stages begin at layers {sorted(firsts)} of {len(geometry)}; expected one"
            )
        self.known = range(firsts.pop())
        self.replays = self.predictor.replays if self.predictor is not None else 0
        self.groups = [range(i, min(i + step, len(geometry))) for i in range(self.known.stop, len(geometry), step)]
        if not geometry.uniform and (self.chained or step > 1 or quantizer is not None):
            odd = next(i for i, layer in enumerate(geometry.layers) if layer.kind != FULL)
            raise UnsupportedCache(
                f"layer {odd} is a {geometry.layers[odd].kind} layer; recipe {recipe.name!r} is lossy or codes layers "
                "together, and needs each to hold every token: use recipe 'exact'"
            )
        if quantizer is not None:
            self._require_bounded(quantizer)
        if isinstance(self.symbols, CausalCoder) and (quantizer is not None or self.predictor is not None):
            raise InvalidRecipe(f"recipe {recipe.name!r}: stage {self.symbols.id!r} foresees and codes the bits itself")

    @property
    def lossless(self) -> bool:
        return self.residual.lossless

    @property
    def chained(self) -> bool:
        """Whether a layer group can be decoded only after all shallower ones."""
        return self.predictor is not None or isinstance(self.symbols, CausalCoder)

    def encode(self, block: KVCache, tokens: Tokens) -> list[bytes]:
        """One part per layer group from the (views of) tokens of a block, all coarse."""
        symbols = self.quantize(block.layers, tokens, Grade.COARSE)[0]
        if isinstance(self.symbols, CausalCoder):
            return self.symbols.encode_block(symbols, tokens.context())
        return self.pack([symbols])

    def pack(self, grades: Sequence[Sequence[Arrays]]) -> list[bytes]:
        """One part per layer group from the symbols of each grade that a block has, coarse before fine."""
        return [
            self.symbols.encode([array for arrays in of_group for array in arrays], layers)
            for layers, of_group in zip(self.groups, zip(*grades, strict=True), strict=True)
        ]

    def quantize(
        self,
        layers: Sequence[LayerKV] | Mapping[int, LayerKV],
        tokens: Tokens,
        grade: Grade,
        groups: Sequence[int] | None = None,
        kept: Callable[[int, Arrays], None] | None = None,
        restore: bool = False,
    ) -> tuple[list[Arrays], dict[int, LayerKV]]:
        """Symbols of each group, or of `groups`, and with `restore` what the decoder will make of them, by layer.

        `kept(group, arrays)` may put symbols that are known already into those of a group.
        """
        positions = torch.from_numpy(np.ascontiguousarray(tokens.positions, np.int64))
        context = tokens.context(grade)
        symbols: list[Arrays] = []
        restored = known_layers(self.known, tokens.replayed)
        numbers = range(len(self.groups)) if groups is None else groups
        for number in numbers:
            group = self.groups[number]
            x = _sides(layers[i] for i in group)
            at = Place(group, positions, grade, tokens.surprisal)
            p = self.predictor.predict(context, x) if self.predictor else None
            q = self.residual.encode(x, p, at)
            if kept is not None:
                kept(number, q)
            symbols.append(q)
            if restore or (self.predictor and number != numbers[-1]):  # nothing is predicted from the last
                back = x if self.lossless else [torch.empty_like(t) for t in x]
                if not self.lossless:
                    self.residual.decode(q, p, back, at)
                context.push(back)
                restored.update(zip(group, map(LayerKV, back[::2], back[1::2]), strict=True))
        return symbols, restored

    def dequantize(
        self,
        groups: Sequence[int],
        symbols: Sequence[Arrays],
        tokens: Tokens,
        grade: Grade,
        out: Mapping[int, LayerKV],
    ) -> None:
        """Restore `groups` (those of `needed`, in order) of one grade into `out`, layers (H, T, D) by index."""
        positions = torch.from_numpy(np.ascontiguousarray(tokens.positions, np.int64))
        context = tokens.context(grade)
        for group, q in zip(groups, symbols, strict=True):
            target = _sides(out[i] for i in self.groups[group])
            p = self.predictor.predict(context, target) if self.predictor else None
            self.residual.decode(q, p, target, Place(self.groups[group], positions, grade))
            context.push(target)

    def unpack(
        self, groups: Sequence[int], parts: Sequence[memoryview], symbols: Mapping[Grade, Sequence[Arrays]]
    ) -> None:
        """Fill the arrays of each grade that a block has, coarse before fine, for each of `groups`, from their parts.

        Raises DamagedArchive.
        """
        of_group = [[array for arrays in each for array in arrays] for each in zip(*symbols.values(), strict=True)]
        self.symbols.decode(parts, of_group, [self.groups[group] for group in groups])

    def buffers(self, groups: Sequence[int], count: int, grade: Grade) -> list[Arrays]:
        """Arrays for the symbols of `count` tokens of one grade, lossy recipes."""
        layouts = [self._layout(self.groups[group], grade) for group in groups]
        return [[np.empty((count, columns), dtype) for columns, dtype in layout] for layout in layouts]

    def decode(
        self,
        groups: Sequence[int],
        parts: Sequence[Sequence[memoryview]],
        tokens: Sequence[Tokens],
        out: Mapping[int, LayerKV],
    ) -> None:
        """Restore `groups` (those of `needed`, in order) of one block into `out`, layers (H, T, D) by index.

        Or of several blocks, one behind the other, where nothing is predicted and no token is due; `parts` and `tokens`
        are theirs. Layers a prediction needs but `out` lacks are restored into memory of their own; those that are
        known before come from the replay. Raises DamagedArchive.
        """
        of_all = Tokens.joined(tokens)
        fill(out, known_layers(self.known, of_all.replayed))
        layers = [i for group in groups for i in self.groups[group]]
        spare = allocate(self.geometry, {i: len(of_all.ids) for i in layers if i not in out})
        whole = {i: out[i] if i in out else spare[i] for i in layers}
        if isinstance(self.residual, BitExact):
            symbols = [self.residual.buffers(_sides(whole[i] for i in self.groups[group])) for group in groups]
            if isinstance(self.symbols, CausalCoder):
                self.symbols.decode_block(parts[0], symbols, of_all.context())
                return
            self.unpack(groups, parts[0], {Grade.COARSE: symbols})
            self.dequantize(groups, symbols, of_all, Grade.COARSE, whole)
            return
        rows = {Grade.COARSE: np.r_[_slice(of_all.coarse)], Grade.FINE: of_all.fine}
        coded = {grade: self.buffers(groups, len(at), grade) for grade, at in rows.items() if len(at)}
        ends = dict.fromkeys(Grade, 0)
        for of_block, each in zip(parts, tokens, strict=True):
            counts = {Grade.COARSE: len(each.coarse), Grade.FINE: len(each.ids) - len(each.coarse)}
            mine = {grade: slice(ends[grade], ends[grade] + count) for grade, count in counts.items() if count}
            self.unpack(groups, of_block, {g: [[a[at] for a in of] for of in coded[g]] for g, at in mine.items()})
            ends = {grade: ends[grade] + count for grade, count in counts.items()}
        for grade, arrays in coded.items():
            at = rows[grade]
            first, last = int(at[0]), int(at[-1])
            place = {i: kv.tokens(first, last + 1) for i, kv in whole.items()}
            apart = last - first >= len(at)  # fine tokens on both sides of coarse ones
            if apart:
                place = allocate(self.geometry, dict.fromkeys(whole, len(at)))
            self.dequantize(groups, arrays, of_all.take(at), grade, place)
            for i, kv in place.items() if apart else ():
                whole[i].keys[:, at], whole[i].values[:, at] = kv.keys, kv.values
        if of_all.due:
            place = {i: kv.tokens(of_all.due.start, of_all.due.stop) for i, kv in whole.items()}
            due = of_all.take(_slice(of_all.due))
            if (told := self.residual.surprisal(coded[Grade.FINE][0])) is not None:
                due = due._replace(
                    surprisal=told[np.searchsorted(rows[Grade.FINE], np.arange(of_all.due.start, of_all.due.stop))]
                )
            self.dequantize(groups, self.quantize(place, due, Grade.COARSE, groups)[0], due, Grade.COARSE, place)

    def replayed(self, replay: Replay | None, ids: np.ndarray) -> Replayed:
        """What `replay` says of `ids`, for a recipe that replays. Raises ModelMissing where there is none."""
        if replay is None:
            raise ModelMissing(
                f"recipe {self.recipe.name!r} stores nothing of what {self.replays} decoder layers of the model "
                "compute again: give the model, as model= or, beside an identity, as replay_with="
            )
        return replay(ids)

    def column(self, layer: int, side: str, head: int, stage: int) -> tuple[int, int]:
        """Where a head's coarse symbols are among the arrays of its group: array and column. Raises InvalidInput."""
        if not isinstance(self.residual, Coefficients):
            raise InvalidInput(f"recipe {self.recipe.name!r} keeps the numbers' own bits: there are no codes to search")
        (group,) = (layers for layers in self.groups if layer in layers)
        return self.residual.quantizer.column(group, layer, side, head, stage)

    def needed(self, layers: Iterable[int]) -> list[int]:
        """Groups to decode for `layers`: their own, and all shallower ones where those are needed first."""
        wanted = set(layers)
        groups = [g for g, members in enumerate(self.groups) if wanted & set(members)]
        return list(range(groups[-1] + 1)) if groups and self.chained else groups

    def require_plausible(self, group: int, tokens: Callable[[int], int], coarse: int, part_length: int) -> None:
        """Raise DamagedArchive, before anything is allocated, for a part too short to hold its tokens.

        They are `tokens(layer)`, of which in a lossy recipe `coarse` are coarse.
        """
        layers = self.groups[group]
        if self.lossless:
            symbols = sum(self.geometry.layers[i].bytes_per_token * tokens(i) for i in layers)
        else:
            of_grade = {Grade.COARSE: coarse, Grade.FINE: tokens(layers.start) - coarse}
            symbols = sum(self._symbol_bytes(layers, grade) * count for grade, count in of_grade.items())
        if symbols > self.symbols.max_expansion * part_length:
            raise DamagedArchive("block part", f"{part_length} bytes cannot decode to {symbols}")

    def _require_bounded(self, quantizer: Quantizer) -> None:
        """A file says which settings the stages have: none may restore without end from next to nothing."""
        for layers in self.groups:
            raw = sum(self.geometry.layers[i].bytes_per_token for i in layers)
            for grade in Grade if self.recipe.window is not None else (Grade.COARSE,):
                if raw > MAX_BYTES_PER_SYMBOL_BYTE * self._symbol_bytes(layers, grade):
                    raise InvalidRecipe(
                        f"recipe {self.recipe.name!r}: stage {quantizer.id!r} makes {raw} bytes of layers "
                        f"{layers.start}…{layers.stop} from {self._symbol_bytes(layers, grade)} bytes of symbols"
                    )

    def _symbol_bytes(self, layers: range, grade: Grade) -> int:
        """Bytes a token takes in the symbol arrays of a group, lossy recipes."""
        if (layers, grade) not in self._sizes:  # a restore asks for that of each group of each block
            layout = self._layout(layers, grade)
            self._sizes[layers, grade] = sum(columns * np.dtype(dtype).itemsize for columns, dtype in layout)
        return self._sizes[layers, grade]

    def _layout(self, layers: range, grade: Grade) -> Layout:
        assert isinstance(self.residual, Coefficients)
        return self.residual.layout(layers, grade)


def _slice(span: range) -> slice:
    return slice(span.start, span.stop)


def _sides(layers: Iterable[LayerKV]) -> list[Tensor]:
    return [side for layer in layers for side in (layer.keys, layer.values)]
