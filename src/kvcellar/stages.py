"""What a stage is: one small base class per kind, and which stages a recipe may name.

A recipe may name the stages of the closed list below, those `register` added in this process, and those of installed
packages (`plugins.py`; docs/adding-a-stage.md says how to write one). What a stage may look at is in `context.py`.

The closed loop of a block walks its layer groups from shallow to deep (`pipeline.py`); for each it asks
`Predictor` → `Transform` → `Quantizer` → `SymbolCoder`. The types forbid another order: predictors and transforms
speak float tensors, quantizers turn floats into integers, symbol coders integers into bytes.
`residual.py` is the middle of the loop, x against its prediction.

A group's values are a list of tensors (H, T, D): keys and values of its layers in order, K before V.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from . import plugins
from .context import LOOKBACK as LOOKBACK
from .context import Context as Context
from .context import Grade as Grade
from .errors import InvalidInput, InvalidRecipe, KVCellarError

if TYPE_CHECKING:
    from torch import Tensor

    from .calibrate import Calibration
    from .geometry import Geometry
    from .placing import Angles
    from .profile import Profile


class Stage:
    """A stage built from a recipe's settings; `id` names its bytes for ever."""

    id: ClassVar[str]

    @classmethod
    def refuse_unknown(cls, settings: Mapping[str, object]) -> None:
        if settings:
            raise InvalidRecipe(f"stage {cls.id!r} has no setting {', '.join(sorted(settings))}")

    def bind(self, geometry: Geometry, profile: Profile | None) -> None:
        """Told once, before any block, what the cache looks like and which calibrated state there is."""

    needs_profile: ClassVar[bool] = False
    """Whether `bind` asks for calibrated state, which `fit` makes."""

    def fit_settings(self) -> Mapping[str, object]:
        """The settings that `fit` depends on, as JSON: recipes that differ in others share a profile."""
        return {}

    def fit(self, calibration: Calibration, fitted: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Calibrated state by name, from samples; `fitted` is that of the stages before, as ``kind.name``.

        In the profile the names get the stage's kind in front: ``basis`` of a transform is ``transform.basis``.
        """
        return {}


class Predictor(Stage, ABC):
    """Foresees a layer group from the context: each token by itself, or also from the `reach` coarse tokens before it,
    where they are of its sealed block, in shallower groups alone.

    One that `replays` decoder layers of the model before (`replayed.py`) knows the layers before `first_layer`.
    """

    layers_per_group: int = 1
    reach: int = 0
    first_layer: int = 0
    replays: int = 0

    @abstractmethod
    def predict(self, context: Context, like: list[Tensor]) -> list[Tensor]:
        """Predicted tensors with the shapes (H, T, D) of `like`, float32; `like`'s numbers must not be read."""


class Transform(Stage, ABC):
    """A linear map of a group's residual into coefficients, and back.

    `layers` are the group's, `positions` int64 (T,) those of its tokens. What the encoder alone may look at, the group
    itself, is `x`, for what goes with the coefficients; it is the residual where nothing is predicted.
    """

    layers_per_group: int = 1
    first_layer: int = 0

    @abstractmethod
    def forward(
        self,
        residual: list[Tensor],
        layers: range,
        positions: Tensor,
        x: list[Tensor] | None = None,
        grade: Grade = Grade.FINE,
    ) -> Tensor:
        """Coefficients (T, C), float32; of coarse tokens perhaps fewer, the last ones being left out."""

    @abstractmethod
    def inverse(self, coefficients: Tensor, like: list[Tensor], layers: range, positions: Tensor) -> list[Tensor]:
        """Residual tensors shaped like `like`, float32."""

    def inverse_into(self, coefficients: Tensor, out: list[Tensor], layers: range, positions: Tensor) -> bool:
        """Optional, for speed: `inverse` straight into tensors of a cache, bounded and rounded to their dtype.

        False, with nothing written, where the stage has no such way, or not for these tensors.
        """
        return False

    def turned_by(self, layers: range, positions: Tensor) -> Sequence[Angles | None] | None:
        """Optional, for speed: the angles by which `inverse` turns each of a group's tensors, where that is all it does
        to coefficients that are the tensors side by side."""
        return None


class Quantizer(Stage, ABC):
    """Coefficients of a group of `layers` to integers and back, each token by itself.

    Without a transform they are the group's tensors K, V, … (H, T, D), each flattened to (T, H·D), side by side.
    """

    @abstractmethod
    def layout(self, layers: range, grade: Grade) -> Sequence[tuple[int, type[np.generic]]]:
        """Columns and dtype of each array of symbols."""

    @abstractmethod
    def quantize(self, coefficients: Tensor, layers: range, grade: Grade) -> list[np.ndarray]:
        """Arrays (T, columns) as `layout` says, from finite float32 (T, C)."""

    def dequantize_into(
        self,
        symbols: Sequence[np.ndarray],
        layers: range,
        grade: Grade,
        out: list[Tensor],
        turns: Sequence[Angles | None],
    ) -> bool:
        """Optional, for speed: `dequantize` straight into tensors of a cache, each turned, bounded and rounded.

        False, with nothing written, where the stage has no such way, or not for these tensors.
        """
        return False

    def quantize_told(
        self, coefficients: Tensor, layers: range, grade: Grade, surprisal: np.ndarray | None
    ) -> list[np.ndarray]:
        """`quantize`, told the tokens' surprisals in bits, float64 (T,), NaN for unknown ones, where anything is known.

        Whatever depends on them has to be in the symbols (exactness rule D1).
        """
        return self.quantize(coefficients, layers, grade)

    @abstractmethod
    def dequantize(self, symbols: Sequence[np.ndarray], layers: range, grade: Grade) -> Tensor:
        """float32 (T, C) from such arrays, finite. Raises DamagedArchive for symbols that are never written."""

    def surprisal(self, symbols: Sequence[np.ndarray]) -> np.ndarray | None:
        """What a group's symbols say of surprisal, float64 (T,): told so, the same tokens get the same symbols."""
        return None

    def column(self, layers: range, layer: int, side: str, head: int, stage: int) -> tuple[int, int]:
        """Array and column of the coarse symbols of a head's `side`, ``"key"`` or ``"value"``, to search through."""
        raise InvalidInput(f"stage {self.id!r} has no symbol that stands for a head's whole vector: nothing to search")


class SymbolCoder(Stage, ABC):
    """Integers to bytes without loss. Reads integers only, from the part and the profile (exactness rule D1).

    Called from several threads at once; what takes time should leave the interpreter lock alone.
    """

    max_expansion: ClassVar[int]
    """No part decodes to more than this many times its bytes; checked before anything is allocated."""

    @abstractmethod
    def encode(self, arrays: Sequence[np.ndarray], layers: range) -> bytes:
        """One part from the arrays of one group of layers."""

    @abstractmethod
    def decode(
        self, parts: Sequence[bytes | memoryview], out: Sequence[Sequence[np.ndarray]], groups: Sequence[range]
    ) -> None:
        """Fill the arrays of each part, one for each of `groups` of layers.

        Raises DamagedArchive before reading or allocating out of bounds.
        """


class CausalCoder(SymbolCoder):
    """A symbol coder that codes a number by what the decoder has by then, so it is handed blocks whole.

    In a bit-exact recipe without a predictor: the arrays are the numbers' own bits, keys then values of each layer.
    """

    @abstractmethod
    def encode_block(self, groups: Sequence[Sequence[np.ndarray]], context: Context) -> list[bytes]:
        """One part for each layer, from arrays (H, T, D)."""

    @abstractmethod
    def decode_block(
        self, parts: Sequence[bytes | memoryview], out: Sequence[Sequence[np.ndarray]], context: Context
    ) -> None:
        """Fill the arrays of the first layers, from layer 0 on. Raises DamagedArchive as `decode` does."""

    def encode(self, arrays: Sequence[np.ndarray], layers: range) -> bytes:
        raise InvalidRecipe(f"stage {self.id!r} codes blocks of a whole cache, in a bit-exact recipe without predictor")

    def decode(
        self, parts: Sequence[bytes | memoryview], out: Sequence[Sequence[np.ndarray]], groups: Sequence[range]
    ) -> None:
        raise InvalidRecipe(f"stage {self.id!r} codes blocks of a whole cache, in a bit-exact recipe without predictor")


KINDS: dict[str, type[Stage]] = {
    "predict": Predictor,
    "transform": Transform,
    "quantize": Quantizer,
    "symbols": SymbolCoder,
}
Factory = Callable[..., Any]
_STAGES: dict[tuple[str, str], str | Factory] = {
    ("predict", "linear/1"): "kvcellar.predict.linear:LinearPredictor",
    ("predict", "replay/1"): "kvcellar.predict.replay:ReplayPredictor",
    ("transform", "klt/1"): "kvcellar.transform.klt:WeightedKLT",
    ("transform", "rope/1"): "kvcellar.rope:Rope",
    ("quantize", "deadzone/1"): "kvcellar.quantize.deadzone:DeadZone",
    ("quantize", "turbo/1"): "kvcellar.quantize.turbo:TurboQuant",
    ("quantize", "turbo-residual/1"): "kvcellar.quantize.turboresidual:TurboResidual",
    ("quantize", "rvq/1"): "kvcellar.quantize.rvq:ResidualVQ",
    ("symbols", "adaptive/1"): "kvcellar.symbols.adaptive:AdaptiveCoder",
    ("symbols", "causal/1"): "kvcellar.symbols.causal:Causal",
    ("symbols", "byteplanes-zstd/1"): "kvcellar.symbols.byteplanes:BytePlanes",
    ("symbols", "map/1"): "kvcellar.symbols.mapcoder:MapCoder",
}

_loaded: dict[tuple[str, str], type[Stage]] = {}  # installed stages this process has found: looking takes a while


def register(kind: str, stage: type[Stage]) -> None:
    """Add a stage class under its id for this process. Raises InvalidRecipe when the id is taken."""
    if _STAGES.setdefault((kind, stage.id), stage) is not stage:
        raise InvalidRecipe(f"{kind} stage {stage.id!r} exists already")


def build(kind: str, settings: Mapping[str, Any] | None) -> Any:
    """The stage a recipe names, or None.

    Raises InvalidRecipe for an id that is neither listed, registered nor installed, for an installed stage that
    cannot be used, and for settings the stage does not take.
    """
    if settings is None:
        return None
    stage_id = settings["id"]
    factory = _STAGES.get((kind, stage_id)) or _loaded.get((kind, stage_id))
    if factory is None:
        shipped = [its_id for its_kind, its_id in _STAGES if its_kind == kind]
        factory = _loaded[kind, stage_id] = plugins.load(kind, stage_id, KINDS.get(kind), shipped)
    if isinstance(factory, str):
        module, name = factory.split(":")
        factory = getattr(importlib.import_module(module), name)
    try:
        return factory(**{key: value for key, value in settings.items() if key != "id"})
    except KVCellarError:
        raise
    except Exception as error:
        raise InvalidRecipe(f"{kind} stage {stage_id!r} refuses its settings: {plugins.said(error)}") from error
