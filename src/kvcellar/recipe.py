"""A recipe: which stages a cache passes on its way into the file, as frozen data that survives JSON.

`{version, name, reduce, predict, transform, quantize, symbols, block, window}`; each stage is null or
`{"id": …, settings…}`. A stage id names the bytes it writes for ever: new bytes, new id. `quantize: null` means
bit-exact: the symbols are the numbers' own bits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import InvalidInput, InvalidRecipe

RECIPE_VERSION = 1
STAGES = ("reduce", "predict", "transform", "quantize", "symbols")
MAX_BLOCK = 65536
MAX_JSON = 1 << 20
MAX_DEPTH = 32


def canonical_json(value: Any) -> bytes:
    """The one byte form of a JSON value: sorted keys, no spaces, UTF-8. Raises InvalidInput for what has none."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidInput(f"cannot be written as JSON: {error}") from error


def strict_json(data: bytes | str) -> Any:
    """Parse JSON; ValueError on duplicate keys, NaN, or nesting too deep to read."""

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) != len(keys):
            raise ValueError(f"duplicate key among {sorted(keys)[:8]}")
        return dict(pairs)

    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    if len(data) > MAX_JSON:
        raise ValueError(f"{len(data)} bytes of JSON; at most {MAX_JSON}")
    try:
        value = json.loads(data, object_pairs_hook=no_duplicates, parse_constant=no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
        held = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [inner for items in held for inner in items]
    return value


@dataclass(frozen=True)
class Window:
    """Tokens that stay fine under a lossy recipe: the first `sinks` and the last `recent`."""

    sinks: int = 4
    recent: int = 32

    def __post_init__(self) -> None:
        if not all(type(n) is int and 0 <= n <= MAX_BLOCK for n in (self.sinks, self.recent)):
            raise InvalidRecipe(f"recipe window {self.sinks!r} + {self.recent!r}; expected token counts to {MAX_BLOCK}")


@dataclass(frozen=True)
class Recipe:
    """See the module's docstring. `block` is the number of tokens of a sealed block.

    Raises InvalidRecipe when a field has the wrong type or range; whether a stage id exists is checked when the
    pipeline is built.
    """

    name: str
    symbols: Mapping[str, Any]
    reduce: Mapping[str, Any] | None = None
    predict: Mapping[str, Any] | None = None
    transform: Mapping[str, Any] | None = None
    quantize: Mapping[str, Any] | None = None
    block: int = 256
    window: Window | None = None
    version: int = field(default=RECIPE_VERSION)

    def __post_init__(self) -> None:
        if type(self.version) is not int or self.version != RECIPE_VERSION:
            raise InvalidRecipe(f"recipe version {self.version}; this kvcellar reads version {RECIPE_VERSION}")
        if not isinstance(self.name, str) or not 0 < len(self.name) <= 200:
            raise InvalidRecipe(f"recipe name {self.name!r}; expected 1 to 200 characters")
        if self.window is not None and not isinstance(self.window, Window):
            raise InvalidRecipe(f"recipe window {self.window!r}; expected null or sinks and recent token counts")
        if type(self.block) is not int or not 1 <= self.block <= MAX_BLOCK:
            raise InvalidRecipe(f"recipe block {self.block!r}; expected 1 to {MAX_BLOCK} tokens")
        if self.tail > MAX_BLOCK:
            raise InvalidRecipe(f"recipe window of {self.tail - self.block} recent tokens: too large beside its blocks")
        for stage in STAGES:
            settings = getattr(self, stage)
            if settings is None and stage != "symbols":
                continue
            if not isinstance(settings, Mapping) or not isinstance(settings.get("id"), str):
                raise InvalidRecipe(f"recipe stage {stage} is {settings!r}; expected null or an object with an id")
        try:
            canonical_json(self.to_json())
        except InvalidInput as error:
            raise InvalidRecipe(f"recipe {self.name[:40]!r} {error}") from error

    def to_json(self) -> dict[str, Any]:
        stages = {stage: (dict(s) if (s := getattr(self, stage)) is not None else None) for stage in STAGES}
        window = None if self.window is None else {"sinks": self.window.sinks, "recent": self.window.recent}
        return {"version": self.version, "name": self.name, **stages, "block": self.block, "window": window}

    @classmethod
    def from_json(cls, value: Any) -> Recipe:
        """The recipe in a decoded JSON object; unknown or missing keys are refused by name."""
        if not isinstance(value, Mapping):
            raise InvalidRecipe(f"recipe is {type(value).__name__}; expected an object")
        expected = {"version", "name", *STAGES, "block", "window"}
        if set(value) != expected:
            raise InvalidRecipe(
                f"recipe keys: missing {sorted(expected - set(value))}, unknown {sorted(set(value) - expected)}"
            )
        window = value["window"]
        if window is not None:
            if not isinstance(window, Mapping) or set(window) != {"sinks", "recent"}:
                raise InvalidRecipe(f"recipe window {window!r}; expected null or sinks and recent token counts")
            window = Window(window["sinks"], window["recent"])
        return cls(**{**value, "window": window})

    @property
    def tail(self) -> int:
        """What the tokens of unsealed blocks stay below: a block is sealed once all that become coarse are."""
        return self.block + (self.window.recent if self.window else 0)

    @property
    def digest(self) -> bytes:
        """SHA-256 (32 bytes) of the canonical JSON; a block names its recipe by it."""
        return hashlib.sha256(canonical_json(self.to_json())).digest()


# 512 tokens a block: restoring costs a fifth less time than with 256, since there are half as many parts.
EXACT = Recipe(name="exact", symbols={"id": "byteplanes-zstd/1"}, block=512)
# Needs no profile: what there is for a model that was never calibrated.
TURBO = tuple(
    Recipe(
        name=f"turbo-{bits}", quantize={"id": "turbo/1", "bits": bits}, symbols={"id": "map/1"}, window=Window(4, 32)
    )
    for bits in (4, 3, 2)
)
# As many codes as with four stages for keys and two for values, where later tokens notice errors (docs/quantizers.md).
FRACTAL = Recipe(
    name="fractal",
    transform={"id": "rope/1"},
    quantize={"id": "rvq/1", "stages": 6},
    symbols={"id": "map/1"},
    window=Window(4, 32),
)
# What the decoder can foresee is subtracted, and the rest coded where later tokens would notice (docs/pipeline.md).
CELLAR = tuple(
    Recipe(
        name=name,
        predict={"id": "linear/1", "layers_per_group": 10, "rank": 512, "embedding": 112, "reach": 1},
        transform={"id": "klt/1", "layers_per_group": 10, "coefficients": 1216},
        quantize={"id": "deadzone/1", "step": step, "fine_step": 0.0018, "nested": True, "keep": 0.0005},
        symbols={"id": "adaptive/1"},
        window=Window(4, 32),
    )
    for name, step in (("cellar", 0.0113), ("cellar-fine", 0.0039), ("cellar-small", 0.0298))
)
# Bit-exact too, and far smaller, where there is a profile and time: every number is foreseen (docs/exact-small.md).
EXACT_SMALL = Recipe(name="exact-small", symbols={"id": "causal/1"}, block=512)
# The stack of arXiv 2604.15356: prediction, bits by surprisal, TurboQuant on what is left (docs/sequential.md).
SEQUENTIAL = Recipe(
    name="sequential",
    predict=CELLAR[0].predict,
    transform=CELLAR[0].transform,
    quantize={"id": "turbo-residual/1", "step": 0.003, "allocation": "both"},
    symbols={"id": "adaptive/1"},
    window=Window(4, 32),
)


def tokens_recipe(*, model_coded: bool = False, keep_ids: bool | None = None, chunk: int | None = None) -> Recipe:
    """The recipe that keeps token ids alone; the model computes the cache anew (docs/language-tokens.md).

    Args:
        model_coded: code the ids under the model, in its entropy; only the same model and runtime reads them.
        keep_ids: keep the ids in the model-free code too. Default: unless they are coded under the model.
        chunk: in steps of how many tokens the cache was computed, if that is known; a replay takes the same.
    """
    keep = not model_coded if keep_ids is None else keep_ids
    return Recipe("tokens", {"id": TOKEN_LOG, "model_coded": model_coded, "keep_ids": keep, "chunk": chunk})


TOKEN_LOG = "tokens/1"
TOKENS = tokens_recipe()


def replaying(layers: int, step: float | None = None) -> Recipe:
    """`cellar` behind the model's first `layers` decoder layers, which a restore runs again (docs/replay.md); none of
    them is `cellar` itself. By the name ``replay-LAYERS``."""
    name, base = f"replay-{layers}", CELLAR[0]
    quantize = {**(base.quantize or {})} | ({} if step is None else {"step": step})
    if layers == 0:
        return replace(base, name=name, quantize=quantize)
    predict = {"id": "replay/1", "layers": layers, "layers_per_group": 10}
    transform = {"id": "klt/1", "layers_per_group": 10, "first_layer": layers + 1}
    return replace(base, name=name, predict=predict, transform=transform, quantize=quantize)


PRESETS = {recipe.name: recipe for recipe in (EXACT, *TURBO, FRACTAL, *CELLAR, SEQUENTIAL, EXACT_SMALL)}


def find_recipe(recipe: str | Recipe | Mapping[str, Any]) -> Recipe:
    """A preset by name (``replay-5`` is made of its number), a Recipe as it is, or a recipe's JSON object."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str):
        if (behind := recipe.removeprefix("replay-")) != recipe and behind.isdecimal() and len(behind) < 5:
            return replaying(int(behind))
        if recipe not in PRESETS and recipe != TOKENS.name:
            raise InvalidRecipe(
                f"unknown recipe {recipe!r}; known: {', '.join([*PRESETS, TOKENS.name, 'replay-LAYERS'])}"
            )
        return PRESETS.get(recipe, TOKENS)
    return Recipe.from_json(recipe)
