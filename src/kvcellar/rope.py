"""Keys without their rotary turn (RoPE: Su et al. 2021, arXiv 2104.09864), and the turn put back.

A model turns the pairs (x_a, x_b) of a key at position p by the angles p · f_j. Turned keys of a head fill many rings;
before the turn they lie in few clusters, which is what codebooks and bases want. A turn by −p · f_j undoes it.

Which pairs turn how fast is not read from the model's name but found by asking the model (`fit`): a token that stands
alone attends to itself only, so every layer computes the same for it at any position, but for the turn. The
frequencies and layout that explain the keys at several positions are the layer's; when none does, nothing is guessed.
Layouts are `half`, x_j with x_{j+R/2} (Llama), and `interleaved`, x_{2j} with x_{2j+1} (Cohere), of the first R numbers
of a key; the rest, and layers that do not turn keys, pass as they are. A scale that goes with the turn (YaRN's
attention factor) stays in the keys, which the inverse does not mind.

Angles are float32 positions times float32 frequencies, as transformers computes them. What turns by the length of the
text as well (dynamic NTK, longrope) cannot be undone from the position alone and is refused. Tried on: CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Int
from torch import Tensor

from .errors import InvalidInput, ProfileMismatch, ProfileMissing, UnsupportedCache
from .geometry import HALF, INTERLEAVED, Geometry
from .placing import Angles, place
from .profile import Profile
from .stages import Grade, Transform

if TYPE_CHECKING:
    from .calibrate import Calibration

BY_LENGTH = ("dynamic", "longrope")
ASKED = (1, 2, 7, 100)
TOKENS = 4


class Turn(NamedTuple):
    """How a layer turns its keys: float32 bytes of the frequencies (R/2), and the layout."""

    frequencies: bytes
    layout: int


NO_TURN = Turn(b"", HALF)


class Rope(Transform):
    id = "rope/1"
    needs_profile = True

    def __init__(self, **settings: object):
        self.refuse_unknown(settings)

    def fit(self, calibration: Calibration, fitted: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """`inv_freq` float32 (L, R/2), zeros behind a layer's own `pairs` int32 (L), and `layout` int32 (L).

        Raises InvalidInput without a model, UnsupportedCache when a layer's turn depends on the length or is unknown.
        """
        if calibration.model is None:
            raise InvalidInput(f"stage {self.id!r} asks the model how it turns keys: calibrate with a model")
        turns = turns_of(calibration.model, calibration.geometry, calibration.samples[0].tokens[:TOKENS])
        pairs = np.array([len(turn.frequencies) // 4 for turn in turns], np.int32)
        frequencies = np.zeros((len(turns), max(1, pairs.max())), np.float32)
        for row, turn in zip(frequencies, turns, strict=True):
            row[: len(turn.frequencies) // 4] = np.frombuffer(turn.frequencies, np.float32)
        return {"inv_freq": frequencies, "pairs": pairs, "layout": np.array([t.layout for t in turns], np.int32)}

    def bind(self, geometry: Geometry, profile: Profile | None) -> None:
        if profile is None:
            raise ProfileMissing(f"stage {self.id!r} needs a profile")
        frequencies, pairs, layouts = (_tensor(profile, name) for name in ("inv_freq", "pairs", "layout"))
        layers, widest = len(geometry), frequencies.shape[1] if frequencies.ndim == 2 else -1
        if not (
            [array.dtype.name for array in (frequencies, pairs, layouts)] == ["float32", "int32", "int32"]
            and frequencies.shape == (layers, widest)
            and pairs.shape == layouts.shape == (layers,)
            and np.isfinite(frequencies).all()
            and ((pairs >= 0) & (pairs <= widest)).all()
            and all(2 * n <= layer.key.width for n, layer in zip(pairs, geometry.layers, strict=True))
            and np.isin(layouts, (HALF, INTERLEAVED)).all()
        ):
            raise ProfileMismatch(f"the profile's rotary frequencies do not fit {layers} layers of this cache")
        rows = zip(frequencies, pairs, layouts, strict=True)
        self.turns = [Turn(row[:count].tobytes(), int(layout)) for row, count, layout in rows]

    def forward(
        self,
        residual: list[Tensor],
        layers: range,
        positions: Int[Tensor, " tokens"],
        x: list[Tensor] | None = None,
        grade: Grade = Grade.FINE,
    ) -> Float32[Tensor, "tokens coefficients"]:
        """All sides of the group, keys turned back, one row per token."""
        flat = torch.empty(len(positions), sum(t.shape[0] * t.shape[2] for t in residual))
        self._turn(residual, _columns(flat, residual), layers, positions, back=True)
        return flat

    def inverse(
        self,
        coefficients: Float32[Tensor, "tokens coefficients"],
        like: list[Tensor],
        layers: range,
        positions: Int[Tensor, " tokens"],
    ) -> list[Tensor]:
        sides = [torch.empty(t.shape) for t in like]
        self._turn(_columns(coefficients, like), sides, layers, positions, back=False)
        return sides

    def inverse_into(
        self,
        coefficients: Float32[Tensor, "tokens coefficients"],
        out: list[Tensor],
        layers: range,
        positions: Int[Tensor, " tokens"],
    ) -> bool:
        return place(coefficients, out, self.turned_by(layers, positions))

    def turned_by(self, layers: range, positions: Int[Tensor, " tokens"]) -> list[Angles | None]:
        where = positions.numpy().tobytes()
        found: list[Angles | None] = []
        for layer in layers:
            cos, sin = _angles(self.turns[layer].frequencies, where)
            found += [Angles(cos.numpy(), sin.numpy(), self.turns[layer].layout), None]
        return found

    def _turn(self, sides: list[Tensor], out: list[Tensor], layers: range, positions: Tensor, *, back: bool) -> None:
        where = positions.numpy().tobytes()
        for i, (side, goal) in enumerate(zip(sides, out, strict=True)):
            if i % 2 == 0:
                turned(side, self.turns[layers[i // 2]], where, goal, back=back)
            else:
                goal.copy_(side)


def _columns(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views (H, T, D) of (T, C), shaped like `like`."""
    columns = torch.split(flat, [t.shape[0] * t.shape[2] for t in like], dim=1)
    shapes = [(len(flat), t.shape[0], t.shape[2]) for t in like]
    return [c.view(shape).transpose(0, 1) for c, shape in zip(columns, shapes, strict=True)]


def turned(
    keys: Float32[Tensor, "heads tokens width"],
    turn: Turn,
    positions: bytes,
    out: Float32[Tensor, "heads tokens width"],
    *,
    back: bool,
) -> None:
    """Fill `out` with `keys` turned, or turned back, by their `positions` (int64 bytes)."""
    cos, sin = _angles(turn.frequencies, positions)
    sin = -sin if back else sin
    rotary = 2 * cos.shape[1]
    out[..., rotary:] = keys[..., rotary:]
    if turn.layout == HALF:
        half = rotary // 2
        (a, b), (to_a, to_b) = ((x[..., :half], x[..., half:rotary]) for x in (keys, out))
    else:
        (a, b), (to_a, to_b) = ((x[..., :rotary:2], x[..., 1:rotary:2]) for x in (keys, out))
    torch.mul(a, cos, out=to_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=to_b).addcmul_(a, sin)


@lru_cache(8)  # all layers of a block ask for the same
def _angles(frequencies: bytes, positions: bytes) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (T, R/2)."""
    at = torch.from_numpy(np.frombuffer(positions, np.int64).copy()).float()
    angles = torch.outer(at, torch.from_numpy(np.frombuffer(frequencies, np.float32).copy()))
    return angles.cos(), angles.sin()


def turns_of(model: Any, geometry: Geometry, tokens: np.ndarray) -> list[Turn]:
    """How each layer of a transformers `model` turns its keys, asked with `tokens` (N,), each standing alone.

    Raises UnsupportedCache.
    """
    kinds = set(_rope_types(model.config.get_text_config(decoder=True)))
    if by_length := kinds & set(BY_LENGTH):
        raise UnsupportedCache(f"rope type {sorted(by_length)[0]!r} turns keys by the text's length: keep keys turned")
    rows = {p: _alone(model, tokens, p, len(geometry)) for p in (0, *ASKED)}
    candidates = [NO_TURN] + [Turn(f, layout) for f in _frequencies(model) for layout in (HALF, INTERLEAVED)]
    if len(candidates) == 1 and not _small(rows[1].values[0] - rows[0].values[0], rows[0].values[0]):
        return [NO_TURN] * len(geometry)  # positions are learned: what goes into the layers differs, nothing turns
    found = []
    for i, layer in enumerate(geometry.layers):
        keys = {p: at.keys[i] for p, at in rows.items()}
        fitting = [turn for turn in candidates if len(turn.frequencies) // 2 <= layer.key.width]
        turn = min(fitting, key=lambda turn: _misses(turn, keys).square().sum()) if layer.key.width else NO_TURN
        if layer.key.width and not _small(_misses(turn, keys), keys[0]):
            raise UnsupportedCache(f"layer {i} turns its keys in a way that is not known here: keep keys turned")
        found.append(turn)
    return found


class Alone(NamedTuple):
    """Keys and values per layer (rows, 1, D) of tokens that each stand alone; a row is a head of a token."""

    keys: list[Tensor]
    values: list[Tensor]


def _misses(turn: Turn, keys: Mapping[int, Tensor]) -> Tensor:
    """Keys by position, less those at position 0 turned by `turn`, (rows, asked, D)."""
    rows = []
    for position, there in keys.items():
        out = torch.empty(there.shape)
        turned(keys[0].float(), turn, np.array([position]).tobytes(), out, back=False)
        rows.append(there.float() - out)
    return torch.cat(rows, dim=1)


def _small(error: Tensor, x: Tensor) -> bool:
    """Whether `error` is what rounding in the dtype of `x` makes of its largest number."""
    return bool((error.abs() <= 8 * torch.finfo(x.dtype).eps * (1 + x.abs().max())).all())


def _alone(model: Any, tokens: np.ndarray, position: int, layers: int) -> Alone:
    ids = torch.from_numpy(np.asarray(tokens, np.int64))[:, None].to(model.device)
    with torch.inference_mode():
        out = model(input_ids=ids, position_ids=torch.full_like(ids, position), use_cache=True)
    made = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in out.cache.layers]
    made += [(None, None)] * (layers - len(made))
    sides = [[torch.empty(0, 1, 0) if x is None else x.cpu().flatten(0, 1) for x in pair] for pair in made]
    return Alone([k for k, _ in sides], [v for _, v in sides])


def _frequencies(model: Any) -> list[bytes]:
    """What the model's rotary modules hold, without repeats."""
    found = {
        value.detach().float().cpu().numpy().tobytes(): None
        for name, value in model.named_buffers()
        if name.rpartition(".")[2].endswith("inv_freq") and value.ndim == 1
    }
    return list(found)


def _rope_types(config: Any) -> Iterator[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    for each in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if kind := each.get("rope_type"):
            yield kind


def _tensor(profile: Profile, name: str) -> np.ndarray:
    if f"transform.{name}" not in profile.tensors:
        raise ProfileMismatch(f"the profile has no transform.{name}: it was made for another recipe")
    return np.asarray(profile.tensors[f"transform.{name}"])
