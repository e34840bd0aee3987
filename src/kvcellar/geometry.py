"""The shape of a cache, layer by layer and side by side, without its numbers.

Geometry is data: every layer states its own heads, width and dtype for keys and for values, so a file never
assumes one shape for all layers, nor that head width = hidden size / heads. No torch here: `kvcellar info` reads it.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .errors import DamagedArchive, UnsupportedCache

MAX_LAYERS = 4096
FULL, SLIDING, NONE = "full", "sliding", "none"
KINDS = {FULL: 1, SLIDING: 2, NONE: 3}
MAX_WINDOW = (1 << 32) - 1
HALF, INTERLEAVED = 0, 1  # how rotary pairs lie in a key: number j with j + R/2, or 2j with 2j + 1
_KIND_NAMES = {code: name for name, code in KINDS.items()}
_RUN = struct.Struct("<HBBHHBBHHBB")  # layers, kind, 0, K heads, K width, K dtype, 0, V heads, V width, V dtype, 0
_WINDOW = struct.Struct("<I")


@dataclass(frozen=True)
class DType:
    """A floating point format as the file knows it: its code and bytes per number."""

    name: str
    code: int
    size: int


DTYPES = {d.name: d for d in (DType("float32", 1, 4), DType("float16", 2, 2), DType("bfloat16", 3, 2))}
_DTYPES_BY_CODE = {d.code: d for d in DTYPES.values()}


@dataclass(frozen=True)
class SideGeometry:
    """Keys or values of one layer: `heads` KV heads of `width` numbers of `dtype` per token.

    A width of 0 is a side that holds nothing, as the values of a layer whose one latent stands for both.
    """

    heads: int
    width: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UnsupportedCache(f"dtype {self.dtype} cannot be stored; expected one of {', '.join(DTYPES)}")
        for name, number, least in (("heads", self.heads, 1), ("width", self.width, 0)):
            if type(number) is not int or not least <= number <= 65535:
                raise UnsupportedCache(f"{name} {number!r}: must lie in {least}..65535")

    @property
    def bytes_per_token(self) -> int:
        return self.heads * self.width * DTYPES[self.dtype].size

    @property
    def numbers_per_token(self) -> int:
        return self.heads * self.width

    def to_json(self) -> dict[str, Any]:
        return {"heads": self.heads, "width": self.width, "dtype": self.dtype}


@dataclass(frozen=True)
class LayerGeometry:
    """One layer: the two sides and its kind.

    ``full`` attention holds every token; ``sliding`` the last `window` − 1 of them, which is what the next token sees
    besides itself; ``none`` has no keys and values of its own (it shares another layer's, or attends to nothing).
    """

    key: SideGeometry
    value: SideGeometry
    kind: str = FULL
    window: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnsupportedCache(f"layer kind {self.kind!r}; expected one of {', '.join(KINDS)}")
        if (self.kind == SLIDING) != (self.window > 0) or not 0 <= self.window <= MAX_WINDOW:
            raise UnsupportedCache(f"a {self.kind} layer with a window of {self.window} tokens")
        if (self.kind == NONE) != (self.numbers_per_token == 0) or (self.kind != NONE and not self.key.width):
            raise UnsupportedCache(f"a {self.kind} layer with {self.numbers_per_token} numbers per token")

    @property
    def bytes_per_token(self) -> int:
        return self.key.bytes_per_token + self.value.bytes_per_token

    @property
    def numbers_per_token(self) -> int:
        return self.key.numbers_per_token + self.value.numbers_per_token

    def to_json(self) -> dict[str, Any]:
        window = {"window": self.window} if self.kind == SLIDING else {}
        return {"kind": self.kind, **window, "key": self.key.to_json(), "value": self.value.to_json()}


NO_LAYER = LayerGeometry(SideGeometry(1, 0, "float32"), SideGeometry(1, 0, "float32"), NONE)


@dataclass(frozen=True)
class Geometry:
    """All layers of a cache, in the model's order. Raises UnsupportedCache when no layer holds anything."""

    layers: tuple[LayerGeometry, ...]

    def __post_init__(self) -> None:
        if all(layer.kind == NONE for layer in self.layers):
            raise UnsupportedCache("no layer has keys and values of its own")

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Raw bytes of one token in the stored dtypes."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def bytes_per_token_16bit(self) -> int:
        """Raw bytes of one token in any 16-bit dtype: what ratios are stated against."""
        return sum(2 * layer.numbers_per_token for layer in self.layers)

    @cached_property
    def sliding_runs(self) -> dict[int, int]:
        """For every sliding layer, the number of its run among the runs of sliding layers."""
        found: dict[int, int] = {}
        at = number = 0
        for count, layer in self.runs():
            if layer.kind == SLIDING:
                found.update(dict.fromkeys(range(at, at + count), number))
                number += 1
            at += count
        return found

    @property
    def uniform(self) -> bool:
        """Whether every layer holds every token."""
        return all(layer.kind == FULL for layer in self.layers)

    def runs(self) -> list[tuple[int, LayerGeometry]]:
        """Equal neighbouring layers as (count, layer)."""
        return [(sum(1 for _ in same), layer) for layer, same in itertools.groupby(self.layers)]

    def to_json(self) -> list[dict[str, Any]]:
        return [{"layers": count, **layer.to_json()} for count, layer in self.runs()]

    @property
    def summary(self) -> str:
        """The runs in words, for messages."""
        return "; ".join(f"{run['layers']} layers of {run['key']} ({run['kind']})" for run in self.to_json())

    def pack(self) -> bytes:
        """Runs of 16 bytes each, 20 for sliding layers, as docs/format.md lists them."""
        packed = [struct.pack("<H", len(self.runs()))]
        for count, layer in self.runs():
            k, v = layer.key, layer.value
            packed.append(
                _RUN.pack(
                    *(count, KINDS[layer.kind], 0),
                    *(k.heads, k.width, DTYPES[k.dtype].code, 0),
                    *(v.heads, v.width, DTYPES[v.dtype].code, 0),
                )
            )
            if layer.kind == SLIDING:
                packed.append(_WINDOW.pack(layer.window))
        return b"".join(packed)

    @classmethod
    def unpack(cls, data: bytes | memoryview, offset: int, part: str) -> tuple[Geometry, int]:
        """Geometry at `offset` and the offset behind it; raises DamagedArchive naming `part`."""
        try:
            (runs,) = struct.unpack_from("<H", data, offset)
            offset += 2
            layers: list[LayerGeometry] = []
            for _ in range(runs):
                count, kind, _, kh, kw, kd, _, vh, vw, vd, _ = _RUN.unpack_from(data, offset)
                offset += _RUN.size
                if not 1 <= count <= MAX_LAYERS - len(layers):
                    raise DamagedArchive(part, f"a run of {count} layers; at most {MAX_LAYERS} in all")
                key = SideGeometry(kh, kw, _DTYPES_BY_CODE[kd].name)
                value = SideGeometry(vh, vw, _DTYPES_BY_CODE[vd].name)
                window = 0
                if kind == KINDS[SLIDING]:
                    (window,) = _WINDOW.unpack_from(data, offset)
                    offset += _WINDOW.size
                layers += [LayerGeometry(key, value, _KIND_NAMES[kind], window)] * count
            return cls(tuple(layers)), offset
        except (struct.error, KeyError, UnsupportedCache) as error:
            raise DamagedArchive(part, f"unreadable geometry ({error})") from error
