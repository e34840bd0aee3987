"""Which recipe a command uses: the one that was named, the one a divergence asks for, or what suits the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ...profile import Profile
    from ...recipe import Recipe
    from .models import LocalModel

recipe_option = click.option("--recipe", help="A preset's name, or a JSON file with a recipe.")
target_kl_option = click.option(
    "--target-kl",
    type=click.FloatRange(0, min_open=True),
    metavar="NATS",
    help="In place of --recipe: recipe cellar with the step that costs about this divergence per token (KL), by the "
    "curve that `kvcellar calibrate` measured.",
)


def chosen_recipe(option: str | None) -> Recipe | None:
    """The recipe that --recipe names, None without one. Raises InvalidRecipe."""
    from ...errors import InvalidRecipe
    from ...recipe import Recipe, find_recipe, strict_json

    if option is None or not option.endswith(".json"):
        return None if option is None else find_recipe(option)
    try:
        return Recipe.from_json(strict_json(Path(option).read_bytes()))
    except (OSError, json.JSONDecodeError, ValueError) as error:
        raise InvalidRecipe(f"{option}: {error}") from error


def require_one(recipe: str | None, target_kl: float | None) -> None:
    """Raise InvalidInput when both say which recipe to use."""
    from ...errors import InvalidInput

    if recipe is not None and target_kl is not None:
        raise InvalidInput("give --recipe or --target-kl, not both")


def recipe_of_archive(target_kl: float, file: str, namespace: str) -> tuple[Recipe, Profile]:
    """The recipe that costs about `target_kl`, and its profile, for the model of an archive.

    Raises what `frontends.curve.recipe_for` and `open` raise.
    """
    from ...archive.reader import ArchiveReader
    from ...store.local import LocalStore
    from ..curve import recipe_for

    store, name = LocalStore.at(file)
    with ArchiveReader(store.open_reader(name), namespace) as archive:
        return recipe_for(target_kl, archive.manifest.identity, archive.manifest.geometry)


def recipe_of_model(
    local: LocalModel, named: Recipe | None, target_kl: float | None
) -> tuple[Recipe, Profile | None, str]:
    """The recipe for a model's cache, the profile that was found on the way, and in words why it is this one.

    Without a name or a target: recipe `cellar` if the model has a profile for it, else `exact`, since nobody who asked
    for nothing expects a loss. Raises what `frontends.curve.recipe_for` raises.
    """
    from ...calibrate import find_fitted
    from ...recipe import EXACT, PRESETS
    from ..curve import BASE, recipe_for
    from .models import cache_geometry

    if named is not None:
        return named, None, ""
    geometry = cache_geometry(local)
    if target_kl is not None:
        recipe, profile = recipe_for(target_kl, local.identity, geometry)
        step = (recipe.quantize or {})["step"]
        return recipe, profile, f" (step {step:g}, by the curve that calibrate measured)"
    found = find_fitted(PRESETS[BASE], local.identity, geometry) if BASE in PRESETS else None
    if found is None:
        return EXACT, None, ""
    return PRESETS[BASE], found, " (lossy; chosen because this model has a profile, --recipe exact keeps every bit)"
