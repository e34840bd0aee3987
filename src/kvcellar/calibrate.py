"""Profiles from samples: what stages fit on, and the order they fit in.

A calibration is a model's caches over calibration text (`Sample`s, loaded one at a time), the model itself for stages
that need its weights or gradients, and a folder where statistics are kept, so that an interrupted run goes on. The
stages of a recipe fit in the order of the pipeline, each told what those before it fitted; what comes out is one
`Profile`, named by its content. Collecting samples with a model: `frontends/calibration.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from .cache import KVCache
from .errors import InvalidInput, ProfileMismatch
from .geometry import Geometry
from .identity import Identity
from .pipeline import Pipeline
from .profile import Profile, all_profiles, load_profile
from .recipe import PRESETS, Recipe, canonical_json
from .replayed import Replay, Replayed
from .stages import Grade, Predictor, Stage, build
from .tokens import Tokens

ARITHMETIC = "float32/1"
FITTING_STAGES = ("predict", "transform", "quantize", "symbols")
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class Sample:
    """One window of calibration text: `tokens` int64 (T,) from position 0, and its cache when `load` is called."""

    tokens: np.ndarray
    kind: str
    load: Callable[[], KVCache] = field(repr=False)


def _silent(label: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    return nullcontext(lambda _: None)


@dataclass(frozen=True)
class Calibration:
    """Samples of one model. `texts` are the SHA-256 of the documents they were cut from.

    `model` is the transformers model, None when only caches are there; `replayer` runs so many layers of it again;
    `folder` keeps what `kept` computes. Stages that fit are told the `recipe` and what was `fitted` before them.
    """

    identity: Identity
    geometry: Geometry
    samples: Sequence[Sample]
    texts: Sequence[str] = ()
    model: Any = None
    folder: Path | None = None
    progress: Progress = _silent
    recipe: Recipe | None = None
    fitted: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)
    replayer: Callable[[int], Replay] | None = None

    def __post_init__(self) -> None:
        if not self.samples:
            raise InvalidInput("calibration without samples: give text of at least one window")

    @property
    def tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)

    def caches(self, label: str) -> Iterator[tuple[np.ndarray, KVCache]]:
        """Tokens int64 (T,) and cache of every sample, one at a time, under a progress bar called `label`."""
        with self.progress(label, len(self.samples)) as advance:
            for sample in self.samples:
                cache = sample.load()
                if cache.geometry != self.geometry or len(cache) != len(sample.tokens):
                    raise InvalidInput(f"a sample of {len(sample.tokens)} tokens holds another cache than it says")
                yield sample.tokens, cache
                advance(1)

    @cached_property
    def before(self) -> dict[str, Stage]:
        """The recipe's stages that come before the one that is fitted, by kind, ready to be used."""
        found: dict[str, Stage] = {}
        known = {name.partition(".")[0] for name in self.fitted}
        for kind in FITTING_STAGES if self.recipe is not None else ():
            stage: Stage | None = build(kind, getattr(self.recipe, kind))
            if stage is not None and stage.needs_profile and kind not in known:
                break
            if stage is not None:
                stage.bind(self.geometry, Profile(dict(self.fitted), {}))
                found[kind] = stage
        return found

    def symbols(self, label: str, tokens: int) -> Iterator[tuple[range, int, np.ndarray]]:
        """What the stages before the symbol coder make of about `tokens` tokens, from samples far apart.

        Arrays (T, C) of a sample's tokens but the sinks, with the layers of their group and a number that tells arrays
        of a group apart: those of coarse tokens, of fine ones, and of coarse ones under presets that share the profile.
        """
        assert self.recipe is not None
        profile, recipes = Profile(dict(self.fitted), {}), [self.recipe, *_sharing(self.recipe)]
        pipelines = [Pipeline(replace(each, symbols={"id": "map/1"}), self.geometry, profile) for each in recipes]
        recipe, pipeline = self.recipe, pipelines[0]
        count = max(1, tokens // len(self.samples[0].tokens))
        some = replace(self, samples=self.samples[:: max(1, len(self.samples) // count)][:count])
        for ids, cache in some.caches(label):
            rows = slice(recipe.window.sinks if recipe.window else 0, None)
            all_tokens = Tokens.following(ids, 0)._replace(replayed=self.told(ids, cache)).take(rows)
            layers = [kv.tokens(rows.start, kv.slots) for kv in cache.layers]
            fine, restored = pipeline.quantize(layers, all_tokens, Grade.FINE, restore=True)
            coarse = [each.quantize(restored, all_tokens, Grade.COARSE)[0] for each in pipelines]
            for group, *arrays in zip(pipeline.groups, coarse[0], fine, *coarse[1:], strict=True):
                for which, array in enumerate(array for each in arrays for array in each):
                    yield group, which, array

    def told(self, tokens: np.ndarray, cache: KVCache) -> Replayed | None:
        """What the recipe's predictor is told of a sample's `tokens` and their `cache`; None where it replays nothing.

        The states are kept. Raises InvalidInput where nobody can replay.
        """
        predictor: Predictor | None = build("predict", self.recipe.predict) if self.recipe else None
        if predictor is None or not predictor.replays:
            return None
        if self.replayer is None:
            raise InvalidInput(f"stage {predictor.id!r} runs the model again: calibrate with one that can be replayed")
        replay, ids = self.replayer(predictor.replays), np.ascontiguousarray(tokens, "<i8")
        name = f"replay/1 {predictor.replays} {hashlib.sha256(ids.tobytes()).hexdigest()}"
        hidden = self.kept(name, lambda: {"hidden": replay(tokens).hidden.numpy()})["hidden"]
        return Replayed(torch.from_numpy(hidden), cache.layers[: predictor.first_layer])

    @property
    def digest(self) -> str:
        """16 hex digits that stand for model and samples."""
        digest = hashlib.sha256(self.identity.digest.encode())
        for sample in self.samples:
            digest.update(hashlib.sha256(np.ascontiguousarray(sample.tokens, "<i8").tobytes()).digest())
        return digest.hexdigest()[:16]

    def kept(self, name: str, make: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """`make()`, or what it gave for the same samples and `name` in an earlier run.

        `name` must say all that the result depends on besides the samples; it becomes part of a file's name.
        """
        if self.folder is None:
            return dict(make())
        path = self.folder / f"{self.digest}-{hashlib.sha256(name.encode()).hexdigest()[:16]}.safetensors"
        if path.is_file():
            return dict(load_file(path))
        made = {key: np.asarray(value, order="C") for key, value in make().items()}
        unfinished = path.with_suffix(f".{id(made):x}.part")
        save_file(made, unfinished)
        unfinished.replace(path)
        return made


def fitted_stages(recipe: Recipe) -> dict[str, Stage]:
    """The stages of `recipe` that need calibrated state, by kind. Raises InvalidRecipe."""
    built = {kind: build(kind, getattr(recipe, kind)) for kind in FITTING_STAGES}
    return {kind: stage for kind, stage in built.items() if stage is not None and stage.needs_profile}


def fingerprint_of_fit(recipe: Recipe) -> dict[str, Any]:
    """What a profile for `recipe` is fitted for: of each such stage the id and the settings its fit depends on."""
    return {kind: {"id": stage.id, **stage.fit_settings()} for kind, stage in fitted_stages(recipe).items()}


def fit_profile(recipe: Recipe, calibration: Calibration) -> Profile:
    """Let the stages of `recipe` fit, in the order of the pipeline.

    Raises InvalidInput when `recipe` needs no profile or a stage fits numbers that are not finite.
    """
    stages = fitted_stages(recipe)
    if not stages:
        raise InvalidInput(f"recipe {recipe.name!r} needs no profile: there is nothing to calibrate")
    tensors: dict[str, np.ndarray] = {}
    for kind, stage in stages.items():
        known = replace(calibration, recipe=recipe, fitted=dict(tensors))
        for name, value in stage.fit(known, known.fitted).items():
            tensor = np.asarray(value, order="C")
            if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
                raise InvalidInput(f"stage {stage.id!r} fitted {name!r} with numbers that are not finite")
            tensors[f"{kind}.{name}"] = tensor
    metadata = {
        "model": {"kind": calibration.identity.kind, "digest": calibration.identity.digest},
        "geometry": calibration.geometry.to_json(),
        "fitted": fingerprint_of_fit(recipe),
        "texts": sorted(calibration.texts),
        "tokens": calibration.tokens,
        "arithmetic": ARITHMETIC,
    }
    return Profile(tensors, metadata)


def _sharing(recipe: Recipe) -> list[Recipe]:
    """The presets besides `recipe` that a profile for it serves, too."""
    fitted = canonical_json(fingerprint_of_fit(recipe))
    same = [each for each in PRESETS.values() if each != recipe and fitted_stages(each)]
    return [each for each in same if canonical_json(fingerprint_of_fit(each)) == fitted]


def find_fitted(recipe: Recipe, identity: Identity, geometry: Geometry) -> Profile | None:
    """The newest profile here that was fitted for `recipe` and this model; None when none is there or needed."""
    fingerprint = fingerprint_of_fit(recipe)
    if not fingerprint:
        return None
    wanted = canonical_json(fingerprint)
    for path, metadata in all_profiles():
        model = metadata.get("model")
        if not isinstance(model, dict) or model.get("digest") != identity.digest:
            continue
        if canonical_json(metadata.get("fitted")) == wanted and metadata.get("geometry") == geometry.to_json():
            profile = load_profile(path)
            if profile.id != path.stem:
                raise ProfileMismatch(f"{path} has id {profile.id}; expected {path.stem}")
            return profile
    return None
