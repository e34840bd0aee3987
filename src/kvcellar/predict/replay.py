"""Keys and values foreseen from the model itself, stopped early: its first layers run again, the rest by regression.

The decoder has the token ids; `layers` decoder layers of the model run over them again (`frontends/replayer.py`) give
keys and values of layers 0 … `layers` for no bits at all, the last of them because a layer computes its keys and values
before anything else, and h (E), the state that enters layer `layers`. A deeper group's row y = [K before RoPE, V, …] is
foreseen as in `linear.py`, p = ȳ + ((φ − μ)/σ) D U, from other features: φ = [h/√(mean h²), the last two layers before
the group as restored]. h has seen the tokens before through `layers` attentions, which a table of embeddings has not;
with it the table's embeddings of earlier tokens say nothing more (benchmarks/LOG.md), so there is none, and the profile
is smaller by it.

`layers` is the knob between `cellar`, which runs nothing of the model, and the tokens alone, which run all of it: every
layer more takes its share of a prefill's time and its keys and values out of the file.

Source: reduced-rank regression (Izenman 1975), as in `linear.py`; early exit from a decoder as a predictor of its
deeper layers (Elbayad et al. 2020, arXiv 1910.10073), of which we foresee the cache and not the output.
Tried on: CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from ..errors import InvalidInput, InvalidRecipe, ProfileMismatch, ProfileMissing
from ..geometry import Geometry
from ..metric import loss_metric
from ..profile import Profile
from ..replayed import Replayed, known_layers
from ..rope import Rope
from ..rounding import rounded, widths_of
from ..stages import Context, Predictor
from .linear import SEEN_LAYERS, Regression
from .regression import AS_THEY_ARE, Moments, roots_of

if TYPE_CHECKING:
    from ..calibrate import Calibration

MOST_LAYERS = 4095


class ReplayPredictor(Predictor):
    id = "replay/1"
    needs_profile = True

    def __init__(self, *, layers: int, layers_per_group: int = 10, rank: int = 256):
        for name, number, most in (
            ("layers", layers, MOST_LAYERS),
            ("layers_per_group", layers_per_group, 4096),
            ("rank", rank, 65536),
        ):
            if type(number) is not int or not 1 <= number <= most:
                raise InvalidRecipe(f"{name} {number!r}; expected a whole number from 1 to {most}")
        self.replays, self.first_layer = layers, layers + 1
        self.layers_per_group, self.rank = layers_per_group, rank

    def fit_settings(self) -> Mapping[str, object]:
        return {"layers": self.replays, "layers_per_group": self.layers_per_group, "rank": self.rank}

    def fit(self, calibration: Calibration, fitted: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Rotary state as of rope/1; and per group `mean`, `centre`, `spread` float32, and `down` (R, F) and `up`
        (R, P) int8 with scales `down_scale` and `up_scale`.

        Raises InvalidInput without a model or for one that has too few layers, UnsupportedCache where keys cannot be
        turned back or the model cannot be replayed.
        """
        if calibration.model is None:
            raise InvalidInput(f"stage {self.id!r} runs the model again and reads its gradients: calibrate with one")
        rope = Rope()
        state = dict(rope.fit(calibration, {}))
        rope.bind(calibration.geometry, Profile({f"transform.{n}": v for n, v in state.items()}, {}))
        metric = loss_metric(calibration, rope)
        groups = self._groups(len(calibration.geometry))
        if not groups:
            raise InvalidInput(f"{self.replays} layers of {len(calibration.geometry)} leave none to foresee")
        moments = [Moments() for _ in groups]
        width = 0
        for tokens, cache in calibration.caches("prediction"):
            told, positions = calibration.told(tokens, cache), torch.arange(len(tokens))
            state_of = _state(told)
            width = state_of.shape[1]
            for layers, moment in zip(groups, moments, strict=True):
                seen = range(layers.start - SEEN_LAYERS, layers.start)
                x, before = (
                    [side.float() for i in of for side in (cache.layers[i].keys, cache.layers[i].values)]
                    for of in (layers, seen)
                )
                features = torch.cat([state_of, rope.forward(before, seen, positions)], dim=1)
                moment.add(features, rope.forward(x, layers, positions))
        for g, (layers, moment) in enumerate(zip(groups, moments, strict=True)):
            down, up = moment.solve(roots_of(metric.layers, layers, moment), self.rank, width if g else 0, AS_THEY_ARE)
            widths = [width, *self._seen_widths(calibration.geometry, layers)]
            state[f"down.{g}"], state[f"down_scale.{g}"] = rounded(down.T, widths)
            state[f"up.{g}"], state[f"up_scale.{g}"] = rounded(up, widths_of(calibration.geometry, layers))
            state |= {f"mean.{g}": moment.mean.numpy(), f"centre.{g}": moment.centre.numpy()}
            state[f"spread.{g}"] = moment.spread.numpy()
        return state

    def bind(self, geometry: Geometry, profile: Profile | None) -> None:
        if profile is None:
            raise ProfileMissing(f"stage {self.id!r} needs a profile")
        state = {n.removeprefix("predict."): t for n, t in profile.tensors.items() if n.startswith("predict.")}
        self.rope = Rope()
        try:
            turns = {f"transform.{name}": state[name] for name in ("inv_freq", "pairs", "layout")}
            self.rope.bind(geometry, Profile(turns, {}))
            self.groups = []
            for g, layers in enumerate(self._groups(len(geometry))):
                seen = self._seen_widths(geometry, layers)
                self.width = state[f"centre.{g}"].size - sum(seen)
                if self.width < 1:
                    raise ValueError(f"group {g} has {state[f'centre.{g}'].size} features")
                self.groups.append(Regression.read(state, g, [self.width, *seen], widths_of(geometry, layers)))
        except KeyError as error:
            raise ProfileMismatch(
                f"the profile has no predict.{error.args[0]}: it was made for another recipe"
            ) from None
        except ValueError as error:
            raise ProfileMismatch(f"the profile's prediction does not fit this cache: {error}") from None

    def predict(self, context: Context, like: list[Tensor]) -> list[Tensor]:
        """Raises ModelMissing when the context holds no replay, ProfileMismatch for one of another width."""
        number = len(context.restored)
        start = self.first_layer + number * self.layers_per_group
        layers, seen = range(start, start + len(like) // 2), range(start - SEEN_LAYERS, start)
        known = known_layers(range(self.first_layer), context.replayed)
        state = _state(context.replayed)
        if state.shape[1] != self.width:
            raise ProfileMismatch(f"the profile foresees from a state of {self.width} numbers, not {state.shape[1]}")
        positions = torch.from_numpy(np.ascontiguousarray(context.positions, np.int64))
        held = [side for kv in known.values() for side in (kv.keys, kv.values)]
        held += [side for group in context.restored for side in group]
        before = [side.float() for side in held[-2 * SEEN_LAYERS :]]
        features = torch.cat([state, self.rope.forward(before, seen, positions)], dim=1)
        return self.rope.inverse(self.groups[number].predict(features), like, layers, positions)

    def _groups(self, layers: int) -> list[range]:
        step = self.layers_per_group
        return [range(i, min(i + step, layers)) for i in range(self.first_layer, layers, step)]

    def _seen_widths(self, geometry: Geometry, layers: range) -> list[int]:
        return widths_of(geometry, range(layers.start - SEEN_LAYERS, layers.start))


def _state(replayed: Replayed | None) -> Float32[Tensor, "tokens width"]:
    """h over its root mean square, as the model's next layer will take it; sinks are a thousand times as long."""
    if replayed is None:
        return torch.empty(0, 0)
    h = replayed.hidden
    return h * torch.rsqrt(h.square().mean(dim=1, keepdim=True) + 1e-6)
