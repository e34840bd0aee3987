"""The fields of a token log: numbers, texts, and the geometry of a cache in a few bytes (docs/format.md, "Token logs").

A file of a hundred bytes is mostly such fields. A geometry is how many layers there are, and the runs of equal layers
after which all begins again: one run for a model whose layers are alike, two where every sixth layer sees everything.
A block's head (`geometry.py`) keeps its plain form, which is a small part of it.
"""

from __future__ import annotations

import itertools

from ..geometry import DTYPES, KINDS, MAX_LAYERS, SLIDING, Geometry, LayerGeometry, SideGeometry

RUNTIME_BYTES = 4
_KINDS = {code: name for name, code in KINDS.items()}
_DTYPES = {dtype.code: name for name, dtype in DTYPES.items()}
_ALIKE = 64  # values have the heads and the width of the keys
_LEAST_RUN = 4  # bytes


def number(value: int) -> bytes:
    """Seven bits a byte, lowest first, the top bit set on all but the last."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def text(written: str) -> bytes:
    """Bytes of UTF-8 and their number before them."""
    raw = written.encode()
    return number(len(raw)) + raw


def geometry(shape: Geometry) -> bytes:
    """Number of layers, number of runs, the runs: count, kind and dtypes [1], keys' heads and width, the values' unless
    they are alike, and the window of layers that slide."""
    layers = shape.layers
    period = next(p for p in range(1, len(layers) + 1) if layers[p:] == layers[: len(layers) - p])
    runs = [(sum(1 for _ in same), layer) for layer, same in itertools.groupby(layers[:period])]
    out = [number(len(layers)), number(len(runs))]
    for count, layer in runs:
        k, v = layer.key, layer.value
        alike = (k.heads, k.width) == (v.heads, v.width)
        codes = KINDS[layer.kind] | DTYPES[k.dtype].code << 2 | DTYPES[v.dtype].code << 4 | _ALIKE * alike
        numbers = [k.heads, k.width, *([] if alike else [v.heads, v.width])]
        numbers += [layer.window] if layer.kind == SLIDING else []
        out += [number(count), bytes([codes]), *map(number, numbers)]
    return b"".join(out)


class Cursor:
    """Reads fields one by one; a length that passes the end is a ValueError before anything is made for it."""

    def __init__(self, data: bytes, at: int):
        self.data, self.at = data, at

    def taken(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise ValueError(f"{count} bytes at {self.at} of {len(self.data)}")
        self.at += count
        return self.data[self.at - count : self.at]

    def rest(self) -> bytes:
        return self.taken(len(self.data) - self.at)

    def number(self) -> int:
        value = 0
        for shift in range(0, 63, 7):
            (byte,) = self.taken(1)
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError(f"a number of more than 63 bits at {self.at}")

    def count(self, least: int) -> int:
        """How many things of at least so many bytes each follow."""
        count = self.number()
        if count * least > len(self.data) - self.at:
            raise ValueError(f"{count} things of {least} bytes or more at {self.at} of {len(self.data)} bytes")
        return count

    def text(self, limit: int) -> str:
        found = self.taken(self.number()).decode()
        if len(found) > limit:
            raise ValueError(f"text of {len(found)} characters; at most {limit}")
        return found

    def geometry(self) -> Geometry:
        """Raises ValueError, and UnsupportedCache for layers that no cache has."""
        total, runs = self.number(), self.count(_LEAST_RUN)
        if not 1 <= total <= MAX_LAYERS:
            raise ValueError(f"{total} layers; expected 1…{MAX_LAYERS}")
        period: list[LayerGeometry] = []
        for _ in range(runs):
            count = self.number()
            if not 1 <= count <= total - len(period):
                raise ValueError(f"a run of {count} layers behind {len(period)} of {total}")
            period += [self._layer()] * count
        if not period:
            raise ValueError("a geometry without a run of layers")
        return Geometry(tuple(period[i % len(period)] for i in range(total)))

    def _layer(self) -> LayerGeometry:
        (codes,) = self.taken(1)
        kind, dtypes = _KINDS.get(codes & 3), [_DTYPES.get(codes >> shift & 3) for shift in (2, 4)]
        if kind is None or None in dtypes or codes > 2 * _ALIKE - 1:
            raise ValueError(f"a layer of kind and dtypes {codes:#x}")
        keys = self.number(), self.number()
        values = keys if codes & _ALIKE else (self.number(), self.number())
        window = self.number() if kind == SLIDING else 0
        key, value = (SideGeometry(*shape, str(dtype)) for shape, dtype in zip((keys, values), dtypes, strict=True))
        return LayerGeometry(key, value, kind, window)
