"""Pipelines that are ready, kept with the profile they were made from."""

from __future__ import annotations

import threading

from .geometry import Geometry
from .pipeline import Pipeline
from .profile import Profile
from .recipe import Recipe, canonical_json

KEPT = 4  # of one profile, the last ones made
_making = threading.Lock()


def ready(recipe: Recipe, geometry: Geometry, profile: Profile | None) -> Pipeline:
    """A pipeline, the same one again for the same profile object: what stages make of theirs can take a second."""
    if profile is None:
        return Pipeline(recipe, geometry)
    key = recipe.digest, canonical_json(geometry.to_json())
    with _making:
        if key not in profile.ready:
            pipeline = Pipeline(recipe, geometry, profile)
            if len(profile.ready) >= KEPT:
                profile.ready.pop(next(iter(profile.ready)))
            profile.ready[key] = pipeline
        found: Pipeline = profile.ready[key]
    return found
