"""`causal/1`: every number coded given all that the decoder has by then, with arithmetic that is integer throughout.

Method. The cache of a token is walked from the first layer to the last, and in a layer number by number: keys, pair of
a rotary turn by pair, then values. Each number is foreseen by linear regression from the embeddings of the token and
the one before it, from the three layers above, and from the numbers of its own layer that came before, keys before
their turn. What the regression leaves has a deviation, which follows the text: the token's (is everything in it harder
to foresee?) and the channel's. The cell of the number's own bit pattern, between the middles to its neighbours, then
has a probability under that middle and deviation, and a range coder takes it. Nothing is rounded away, so NaN payloads,
infinities and −0 survive; every pattern keeps a probability of at least 2⁻²⁴.

Every block starts anew, so that it is decoded alone. The model is not run. All that decides a bit is integers of
stated widths: tables come from `decimal`, sums of products are whole numbers below 2⁵³ (exactness rules D1, D2).

Linear prediction with arithmetic coding of what is left is the method of lossless audio codecs (MPEG-4 ALS, Liebchen et
al. 2005), there over time; we differ in predicting over depth and within a layer, in the fold of the rotary turn, and
in coding cells of a float format rather than integers. Bytes and figures: docs/exact-small.md. Tried on: CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DamagedArchive, InvalidRecipe, ProfileMissing, UnsupportedCache
from ..stages import CausalCoder, Context
from . import causalkernels as kernels
from .byteplanes import BytePlanes
from .causalnumbers import logarithms, powers, shape
from .causalstate import Knowledge

if TYPE_CHECKING:
    from ..calibrate import Calibration
    from ..geometry import Geometry, LayerGeometry
    from ..profile import Profile

ID = "causal/1"
MAX_EXPANSION = 64
PART = "block part"
_PLAIN, _CODED = 0, 1
_FORMS = {"bfloat16": (7, 127, 1), "float16": (10, 15, 1), "float32": (7, 127, 0)}  # float32: its upper half


class Causal(CausalCoder):
    id = ID
    max_expansion = MAX_EXPANSION
    needs_profile = True

    def __init__(self, *, seen: int = 3, embedding: int = 160, before: int = 64):
        for name, number, least, most in (
            ("seen", seen, 0, 64),
            ("embedding", embedding, 1, 4096),
            ("before", before, 0, 4096),
        ):
            if type(number) is not int or not least <= number <= most:
                raise InvalidRecipe(f"{name} {number!r}; expected a whole number from {least} to {most}")
        self.seen, self.embedding, self.before = seen, embedding, before
        self.plain = BytePlanes()

    def fit_settings(self) -> Mapping[str, object]:
        return {"seen": self.seen, "embedding": self.embedding, "before": self.before}

    def fit(self, calibration: Calibration, fitted: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        from .. import causalfit

        return causalfit.fitted(calibration, self.seen, self.embedding, self.before)

    def bind(self, geometry: Geometry, profile: Profile | None) -> None:
        if profile is None:
            raise ProfileMissing(f"stage {self.id!r} needs a profile")
        for index, layer in enumerate(geometry.layers):
            if layer.key.dtype != layer.value.dtype:
                raise UnsupportedCache(
                    f"layer {index} has {layer.key.dtype} keys and {layer.value.dtype} values; stage {self.id!r} takes "
                    "layers of one dtype: use recipe 'exact'"
                )
        self.geometry = geometry
        self.known = Knowledge.read(profile.tensors, geometry, self.seen, self.before)

    def encode_block(self, groups: Sequence[Sequence[np.ndarray]], context: Context) -> list[bytes]:
        walk, parts = Walk(self.known, context), []
        for layer, arrays in enumerate(groups):
            raw = self._raw(layer, len(context.tokens))
            plain = bytes([_PLAIN]) + self.plain.encode(arrays, range(layer, layer + 1))
            coded = bytes([_CODED]) + walk.encode(layer, self.geometry.layers[layer], arrays)
            part = coded if len(coded) < len(plain) else plain
            parts.append(part + bytes(max(0, -(-raw // MAX_EXPANSION) - len(part))))
        return parts

    def decode_block(
        self, parts: Sequence[bytes | memoryview], out: Sequence[Sequence[np.ndarray]], context: Context
    ) -> None:
        walk = Walk(self.known, context)
        for layer, (part, arrays) in enumerate(zip(parts, out, strict=True)):
            mode = part[0] if len(part) else -1
            body = memoryview(part)[1:]
            if mode == _PLAIN:
                self.plain.decode([body], [arrays], [range(layer, layer + 1)])
                walk.encode(layer, self.geometry.layers[layer], arrays)  # so that layers behind it see the same
            elif mode == _CODED:
                used = 1 + walk.decode(layer, self.geometry.layers[layer], arrays, body)
                length = max(used, -(-self._raw(layer, len(context.tokens)) // MAX_EXPANSION))
                if len(part) != length or any(part[used:]):
                    raise DamagedArchive(PART, f"{len(part)} bytes, of which its numbers take {used}")
            else:
                raise DamagedArchive(PART, f"mode {mode}; expected {_PLAIN} or {_CODED}")

    def _raw(self, layer: int, tokens: int) -> int:
        return self.geometry.layers[layer].bytes_per_token * tokens


class Walk:
    """One block on its way from the first layer to the last."""

    def __init__(self, known: Knowledge, context: Context):
        self.known, self.positions = known, np.ascontiguousarray(context.positions, np.int64)
        self.token = np.zeros(len(self.positions), np.int64)
        first = context.earlier[:, 0] if len(self.positions) else np.empty(0, np.int64)
        self.embedded = known.embedded(np.asarray(context.tokens, np.int64), first)
        self.seen: list[np.ndarray] = []

    def encode(self, layer: int, geometry: LayerGeometry, arrays: Sequence[np.ndarray]) -> bytes:
        """The stream of a layer, which is then known to those behind it."""
        patterns, low = self._split(layer, arrays)
        token = self.token.copy()
        size = 3 * patterns.size + kernels.ROW_BYTES * patterns.shape[1] + 8
        while True:
            data, place = np.zeros(size, np.uint8), np.array([0, kernels.TOP, 0], np.int64)
            if self._run(kernels.ENCODE, layer, geometry, patterns, place, data) == kernels.DONE:
                break
            self.token, size = token.copy(), 2 * size
            self.seen.pop()
        end = kernels.flush(data, place[2], place[0])
        return low + data[:end].tobytes()

    def decode(self, layer: int, geometry: LayerGeometry, arrays: Sequence[np.ndarray], body: memoryview) -> int:
        """Fill the arrays; gives the bytes that took."""
        patterns = np.zeros((len(self.token), len(self.known.layers[layer].order.columns)), np.int64)
        halves = 2 * patterns.size if geometry.key.dtype == "float32" else 0
        data = np.frombuffer(body, np.uint8)[halves:].copy()
        if not len(data):
            raise DamagedArchive(PART, f"{len(body)} bytes, of which none is left for its numbers")
        first = int.from_bytes(data[:7].tobytes().ljust(7, b"\0"), "big")
        place = np.array([first, kernels.TOP, 7], np.int64)
        self._run(kernels.DECODE, layer, geometry, patterns, place, data)
        self._join(layer, patterns, np.frombuffer(body[:halves], "<u2"), arrays)
        return halves + int(place[2]) - 6

    def _run(
        self, mode: int, layer: int, geometry: LayerGeometry, patterns: np.ndarray, place: np.ndarray, data: np.ndarray
    ) -> int:
        known = self.known.layers[layer]
        shallower = self.seen[max(0, layer - self.known.seen) : layer]
        sums = np.ascontiguousarray(known.sums(np.concatenate([self.embedded, *shallower], axis=1)))
        seen = np.zeros(patterns.shape)
        result: int = kernels.walk(
            mode, patterns, seen, sums, known.followers(), known.order.pairs, self.known.angles(layer, self.positions),
            known.spread.astype(np.int64), known.exponent.astype(np.int64), self.token, _FORMS[geometry.key.dtype],
            (shape(), powers()), logarithms(), place, data,
        )  # fmt: skip
        self.seen.append(seen)
        return result

    def _split(self, layer: int, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, bytes]:
        """Patterns int64 (T, C) in coding order; lower halves of wide numbers in the order of the arrays."""
        flat = np.concatenate([a.transpose(1, 0, 2).reshape(a.shape[1], -1) for a in arrays], axis=1)
        columns = self.known.layers[layer].order.columns
        if flat.dtype.itemsize == 4:
            return (flat >> 16).astype(np.int64)[:, columns], (flat & 0xFFFF).astype("<u2").tobytes()
        return flat.astype(np.int64)[:, columns], b""

    def _join(self, layer: int, patterns: np.ndarray, lower: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
        flat = np.empty(patterns.shape, arrays[0].dtype)
        flat[:, self.known.layers[layer].order.columns] = patterns
        if flat.dtype.itemsize == 4:
            flat <<= flat.dtype.type(16)
            flat |= lower.reshape(flat.shape).astype(flat.dtype)
        at = 0
        for array in arrays:
            heads, tokens, width = array.shape
            array[...] = flat[:, at : at + heads * width].reshape(tokens, heads, width).transpose(1, 0, 2)
            at += heads * width
