"""The one-pass way out of the lossy loop gives what the plain way gives, in the same places, and nothing elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcellar.geometry import HALF, INTERLEAVED
from kvcellar.placing import Angles, place
from kvcellar.quantize.coefficients import unflatten
from kvcellar.rope import Turn, turned

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
AHEAD, BEHIND = 2, 3  # tokens of the cache that are not written


def _room(heads: int, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.full((heads, AHEAD + tokens + BEHIND, width), 7.0, dtype=dtype)


def _inside(room: Tensor) -> Tensor:
    return room[:, AHEAD : room.shape[1] - BEHIND]


def _plain(flat: Tensor, turns: list[Turn | None], positions: np.ndarray, like: list[Tensor]) -> list[Tensor]:
    """float32 sides, turned by torch, within what the dtype holds."""
    sides = [t.contiguous() for t in unflatten(flat, like)]
    for i, turn in enumerate(turns):
        if turn is not None:
            keys, sides[i] = sides[i], torch.empty_like(sides[i])
            turned(keys, turn, positions.tobytes(), sides[i], back=False)
    return [x.clamp(-torch.finfo(t.dtype).max, torch.finfo(t.dtype).max) for x, t in zip(sides, like, strict=True)]


def _angles(turn: Turn, positions: np.ndarray) -> Angles:
    at = torch.outer(torch.from_numpy(positions).float(), torch.tensor(np.frombuffer(turn.frequencies, np.float32)))
    return Angles(at.cos().numpy(), at.sin().numpy(), turn.layout)


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from([HALF, INTERLEAVED]),
    tokens=st.integers(0, 5),
    heads=st.integers(1, 3),
    width=st.integers(1, 21),
    scale=st.sampled_from([1e-42, 1e-7, 3e-5, 1.0, 6e4, 3e38]),
    data=st.data(),
)
def test_as_the_plain_way(
    dtype: torch.dtype, layout: int, tokens: int, heads: int, width: int, scale: float, data: st.DataObject
) -> None:
    pairs = data.draw(st.integers(0, width // 2))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    flat = torch.from_numpy(rng.uniform(-scale, scale, (tokens, 2 * heads * width)).astype(np.float32))
    turn = Turn(rng.uniform(0, 1, pairs).astype(np.float32).tobytes(), layout)
    positions = np.arange(100, 100 + tokens)
    rooms = [_room(heads, tokens, width, dtype) for _ in range(2)]
    out = [_inside(room) for room in rooms]
    assert place(flat, out, [_angles(turn, positions), None])
    keys, values = _plain(flat, [turn, None], positions, out)
    assert torch.equal(out[1], values.to(dtype)), "values are rounded once, as torch rounds"
    ulp = torch.finfo(torch.float32).eps * 2 * scale  # of the products, which torch may or may not round
    below, above = ((keys.double() + side * ulp).float().clamp(-_largest(dtype), _largest(dtype)) for side in (-1, 1))
    assert (out[0] >= below.to(dtype)).all()
    assert (out[0] <= above.to(dtype)).all()
    for room in rooms:
        room[:, AHEAD : room.shape[1] - BEHIND] = 7
        assert (room == 7).all(), "a token that is not of these rows was written"


def _largest(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).max)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_number_of_a_dtype_its_midpoints_and_their_neighbours(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    every = every[every.isfinite()].float().sort().values
    midpoints = ((every[1:].double() + every[:-1].double()) / 2).float()
    numbers = torch.cat([every, midpoints, *(torch.nextafter(midpoints, torch.tensor(way)) for way in (-9e38, 9e38))])
    numbers = numbers.clamp(-_largest(dtype), _largest(dtype))
    out = torch.empty(1, len(numbers), 1, dtype=dtype)
    assert place(numbers[:, None].contiguous(), [out], [None])
    expected = numbers.to(dtype)
    assert torch.equal(out.flatten(), expected)


def test_what_is_too_large_becomes_the_largest_number() -> None:
    for dtype in DTYPES:
        out = torch.empty(1, 1, 2, dtype=dtype)
        assert place(torch.tensor([[3.4e38, -3.4e38]]), [out], [None])
        assert out.isfinite().all()
    out = torch.empty(1, 1, 2)
    half = np.full((1, 1), np.sqrt(0.5), np.float32)
    eighth = Angles(half, half, HALF)
    assert place(torch.tensor([[3.4e38, 3.4e38]]), [out], [eighth])
    assert out.isfinite().all()
    assert out[0, 0, 1] == torch.finfo(torch.float32).max


def test_tensors_it_cannot_write_into_are_left_alone() -> None:
    flat = torch.randn(3, 8)
    for out in (
        torch.zeros(2, 3, 4, dtype=torch.float64),
        torch.zeros(2, 4, 3).transpose(1, 2),
        torch.zeros(2, 3, 5),
        torch.zeros(2, 3, 4, device="meta"),
    ):
        assert not place(flat, [out], [None])
        assert out.device.type == "meta" or not out.any()
    assert not place(torch.randn(8, 3).T, [torch.zeros(2, 3, 4)], [None]), "rows must lie one behind the other"
