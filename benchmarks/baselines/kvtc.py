"""KVTC as a codec of a transformers cache: PCA over all layers and heads, bits by dynamic program, DEFLATE.

Keys before RoPE of all layers and heads form one vector of a token, values another. Each is centred and turned into the
basis of its PCA, fitted once on calibration text; `allocation` gives each coefficient 0…8 bits under one budget for
both; uniform quantization, bit packing (coefficient by coefficient, equal widths together) and zlib level 9 follow. The
first 4 and the last 32 tokens are kept in 16 bits (the paper: 4 and 128).
Source: KV Cache Transform Coding (arXiv 2511.01815), written from its description. We differ: an exact PCA instead of a
randomised SVD; widths for single coefficients, see `allocation`; zlib instead of nvCOMP; 32 recent tokens.

Bytes, little-endian: header (magic, version, dtype, T, first and last exact tokens, budget, L, H, D, length of the
payload), exact tokens (keys, then values, (2, L, H, n, D) raw 16 bit), payload (DEFLATE).
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from .allocation import centres, levels
from .rotary import Pairs, layers, matrices

SINKS, RECENT = 4, 32
_HEADER = struct.Struct("<4sBBIHHIHHHI")
HEADER_BYTES = _HEADER.size
_MAGIC, _VERSION = b"KVTC", 1
DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # float32: exact tokens are kept as float16


@dataclass(frozen=True)
class State:
    """Means (P,) and bases (P, R) of keys and of values, and per budget bits and steps (Rk + Rv,)."""

    key_mean: Tensor
    key_basis: Tensor
    value_mean: Tensor
    value_basis: Tensor
    inv_freq: Tensor
    shape: tuple[int, int, int]  # layers, KV heads, width
    plans: dict[int, tuple[Tensor, Tensor]]

    def save(self, path: Path) -> None:
        named = {f"plan.{b}.bits": plan[0] for b, plan in self.plans.items()}
        named |= {f"plan.{b}.steps": plan[1] for b, plan in self.plans.items()}
        named |= {n: getattr(self, n) for n in _TENSORS} | {"shape": torch.tensor(self.shape)}
        safetensors.torch.save_file({n: x.contiguous() for n, x in named.items()}, path)

    def only(self, budgets: list[int]) -> State:
        """The same for some of its budgets, without the components that they do not use."""
        plans = {b: _plan(self, b) for b in budgets}
        used = torch.stack([bits for bits, _ in plans.values()]).amax(0) > 0
        of_keys, of_values = used.split((self.key_basis.shape[1], self.value_basis.shape[1]))
        return replace(
            self,
            key_basis=self.key_basis[:, of_keys].contiguous(),
            value_basis=self.value_basis[:, of_values].contiguous(),
            plans={b: (bits[used], steps[used]) for b, (bits, steps) in plans.items()},
        )

    @property
    def nbytes(self) -> int:
        """Bytes of means, bases and one plan."""
        plan = next(iter(self.plans.values()))
        return sum(x.nbytes for x in (*(getattr(self, n) for n in _TENSORS), *plan))


_TENSORS = ("key_mean", "key_basis", "value_mean", "value_basis", "inv_freq")


def load(path: Path) -> State:
    """The state that `State.save` wrote."""
    named = safetensors.torch.load_file(path)
    budgets = sorted(int(n.split(".")[1]) for n in named if n.startswith("plan.") and n.endswith(".bits"))
    plans = {b: (named[f"plan.{b}.bits"], named[f"plan.{b}.steps"]) for b in budgets}
    count, heads, width = named["shape"].tolist()
    return State(*(named[n] for n in _TENSORS), (count, heads, width), plans)


def encode(pairs: Pairs, state: State, budget: int, sinks: int = SINKS, recent: int = RECENT) -> bytes:
    """All of the cache, (1, H, T, D) keys and values per layer; `budget` is one that the state has a plan for."""
    dtype, tokens = pairs[0][0].dtype, pairs[0][0].shape[2]
    start, stop = _coded(tokens, sinks, recent)
    keys, values = matrices(pairs, state.inv_freq, start, stop)
    coefficients = torch.cat(
        ((keys - state.key_mean) @ state.key_basis, (values - state.value_mean) @ state.value_basis), 1
    )
    bits, steps = _plan(state, budget)
    parts = []
    for width, columns in _widths(bits):
        numbers = levels(coefficients[:, columns], steps[columns], bits[columns]).T.to(torch.uint8).numpy()
        parts.append(np.packbits(np.unpackbits(numbers[..., None], axis=-1)[..., 8 - width :]).tobytes())
    payload = zlib.compress(b"".join(parts), 9)
    exact = _exact(pairs, start, stop)
    code = DTYPES.index(dtype)
    head = _HEADER.pack(_MAGIC, _VERSION, code, tokens, start, tokens - stop, budget, *state.shape, len(payload))
    return head + exact + payload


def sizes(data: bytes) -> tuple[int, int]:
    """Bytes of the coded tokens, and of everything."""
    return _HEADER.unpack_from(data)[-1], len(data)


def decode(data: bytes, state: State) -> Pairs:
    """Keys and values (1, H, T, D) per layer, in the dtype they had. Raises ValueError for bytes that are not whole."""
    if len(data) < _HEADER.size:
        raise ValueError(f"{len(data)} bytes, expected at least {_HEADER.size}")
    magic, version, code, tokens, sinks, recent, budget, *shape, length = _HEADER.unpack_from(data)
    if (magic, version, tuple(shape)) != (_MAGIC, _VERSION, state.shape) or code >= len(DTYPES):
        raise ValueError(f"version {version}, shape {shape}: expected {_VERSION}, {state.shape}")
    exact_bytes = 4 * (sinks + recent) * shape[0] * shape[1] * shape[2]
    if len(data) != _HEADER.size + exact_bytes + length:
        raise ValueError(f"{len(data)} bytes, expected {_HEADER.size + exact_bytes + length}")
    coded = tokens - sinks - recent
    bits, steps = _plan(state, budget)
    packed = _inflated(data[_HEADER.size + exact_bytes :], sum(_packed_size(b, c, coded) for b, c in _widths(bits)))
    coefficients, at = torch.zeros(coded, len(bits)), 0
    for width, columns in _widths(bits):
        size = _packed_size(width, columns, coded)
        flat = np.unpackbits(packed[at : at + size], count=len(columns) * coded * width)
        numbers = np.packbits(np.pad(flat.reshape(-1, width), ((0, 0), (8 - width, 0))), axis=-1)
        numbers = torch.from_numpy(numbers.reshape(len(columns), coded)).T
        coefficients[:, columns] = centres(numbers.float(), steps[columns], bits[columns])
        at += size
    keys, values = coefficients.split((state.key_basis.shape[1], state.value_basis.shape[1]), 1)
    middle = layers(
        keys @ state.key_basis.T + state.key_mean,
        values @ state.value_basis.T + state.value_mean,
        state.inv_freq,
        state.shape,
        sinks,
    )
    raw = data[_HEADER.size : _HEADER.size + exact_bytes]
    return _joined(middle, raw, sinks, recent, DTYPES[code])


def _plan(state: State, budget: int) -> tuple[Tensor, Tensor]:
    if budget not in state.plans:
        raise ValueError(f"no plan for {budget} bits, expected one of {sorted(state.plans)}")
    return state.plans[budget]


def _coded(tokens: int, sinks: int, recent: int) -> tuple[int, int]:
    start = min(sinks, tokens)
    return start, max(start, tokens - recent)


def _widths(bits: Tensor) -> list[tuple[int, Tensor]]:
    """Each width but zero, with the columns that have it."""
    return [(b, (bits == b).nonzero()[:, 0]) for b in range(1, 9) if bool((bits == b).any())]


def _packed_size(width: int, columns: Tensor, coded: int) -> int:
    return -(-len(columns) * coded * width // 8)


def _inflated(payload: bytes, size: int) -> np.ndarray:
    """The `size` bytes that DEFLATE made into `payload`, and no more than that whatever it says."""
    inflate = zlib.decompressobj()
    try:
        packed = inflate.decompress(payload, size + 1)
    except zlib.error as error:
        raise ValueError(f"damaged payload ({error}), expected DEFLATE") from None
    if len(packed) != size or not inflate.eof or inflate.unused_data:
        raise ValueError(f"{len(packed)} bytes of packed bits, expected {size}")
    return np.frombuffer(packed, np.uint8)


def _exact(pairs: Pairs, start: int, stop: int) -> bytes:
    sides = torch.stack([torch.stack([pair[side][0] for pair in pairs]) for side in (0, 1)])
    kept = torch.cat((sides[..., :start, :], sides[..., stop:, :]), -2)
    kept = kept.half() if kept.dtype == torch.float32 else kept
    return kept.contiguous().view(torch.int16).numpy().tobytes()


def _joined(middle: Pairs, raw: bytes, sinks: int, recent: int, dtype: torch.dtype) -> Pairs:
    heads, width = middle[0][0].shape[1], middle[0][0].shape[3]
    stored = torch.float16 if dtype == torch.float32 else dtype
    whole = torch.from_numpy(np.frombuffer(raw, np.int16).copy()).view(stored).to(dtype)
    whole = whole.reshape(2, len(middle), 1, heads, sinks + recent, width)
    first, last = whole.split((sinks, recent), -2)
    return [
        (torch.cat((first[0, i], k.to(dtype), last[0, i]), -2), torch.cat((first[1, i], v.to(dtype), last[1, i]), -2))
        for i, (k, v) in enumerate(middle)
    ]
