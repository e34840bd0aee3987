"""`kvcellar calibrate`: a model and text in, a profile out."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import click

from ...errors import InvalidInput
from .common import emit, facts, human_bytes, json_option, progress


@click.command("calibrate")
@click.option("--model", "model_dir", type=click.Path(exists=True, file_okay=False), help="Default: the demo model.")
@click.option(
    "--text",
    "texts",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    help="Text like what you will store; may be given several times.",
)
@click.option("--only-text", is_flag=True, help="Use --text alone, without the standard library's text.")
@click.option("--recipe", "names", multiple=True, help="Default: all that need a profile but exact-small.")
@click.option("--tokens", default=60_000, show_default=True, type=click.IntRange(1), help="How much text, in tokens.")
@click.option(
    "--window", default=1024, show_default=True, type=click.IntRange(16), help="Tokens the model reads at once."
)
@click.option(
    "--dtype",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "float32", "float16", "bfloat16"]),
    help="Dtype of the caches that the profiles are for, as `kvcellar save --dtype` makes them.",
)
@click.option(
    "--curve/--no-curve",
    default=True,
    show_default=True,
    help="Measure what steps of recipe cellar cost on text held out from its profile, for --target-kl.",
)
@click.option("--curve-only", is_flag=True, help="Make no profile; measure the curve of the one there is.")
@json_option
def command(
    model_dir: str | None,
    texts: tuple[str, ...],
    only_text: bool,
    names: tuple[str, ...],
    tokens: int,
    window: int,
    dtype: str,
    curve: bool,
    curve_only: bool,
    as_json: bool,
) -> None:
    """Make the profiles that recipes need, once per model.

    The model reads calibration text: documentation and code that come with Python, and your own --text. Its caches
    are kept under $KVCELLAR_HOME, so an interrupted run goes on, and more text costs only what is new. Profiles are
    found by themselves when you save with the recipe. Recipes that differ in a step alone share one.

    \b
    Example:
      kvcellar calibrate --model DIR --text notes.txt --text manual.md
    """
    from ...calibrate import fitted_stages
    from ...recipe import EXACT_SMALL, PRESETS, find_recipe

    if only_text and not texts:
        raise InvalidInput("--only-text needs --text: there would be nothing to calibrate on")
    usual = [recipe for recipe in PRESETS.values() if recipe is not EXACT_SMALL and fitted_stages(recipe)]
    chosen = [find_recipe(name) for name in names] or usual
    for recipe in chosen:
        if not fitted_stages(recipe):
            raise InvalidInput(f"recipe {recipe.name!r} needs no profile")

    from ..calibration import calibration_documents
    from .demo_model import demo_model
    from .models import MeasuredModel

    local = MeasuredModel(model_dir or demo_model(quiet=as_json), dtype)
    local.require_room(window)
    started = time.perf_counter()
    documents = calibration_documents([Path(text) for text in texts], standard=not only_text)
    result: dict[str, Any] = {"model": local.identity.to_json()}
    rows: dict[str, str] = {}
    if not curve_only:
        made = _profiles(local, documents, chosen, tokens, window, quiet=as_json)
        result |= made
        rows |= {
            "text": ", ".join(f"{count:,} tokens of {kind}" for kind, count in made["tokens_by_kind"].items()),
            "documents": f"{made['documents']}",
            **{
                p["recipe"]: f"profile {p['id'][:16]}…, {human_bytes(p['bytes'])}{_also(p['also'])}"
                for p in made["profiles"]
            },
        }
        if not made["profiles"]:
            rows["profiles"] = "none: no preset here needs one"
    if curve or curve_only:
        result["curve"], said = _curve(local, documents, chosen, required=curve_only, quiet=as_json)
        rows |= {"curve": said} if said else {}
    result["took_s"] = time.perf_counter() - started
    emit(result, facts(rows), as_json=as_json)


def _profiles(
    local: Any, documents: list[Any], chosen: list[Any], tokens: int, window: int, *, quiet: bool
) -> dict[str, Any]:
    """Fit and keep a profile for each of the `chosen` recipes, one for those that share."""
    from ...calibrate import fingerprint_of_fit, fit_profile
    from ...recipe import canonical_json
    from ..calibration import collect, cut

    cuts = cut(documents, partial(local.encode, continues=True), tokens, window)
    calibration = collect(local, cuts, partial(progress, quiet=quiet))
    sharing: dict[bytes, list[Any]] = {}
    for recipe in chosen:
        sharing.setdefault(canonical_json(fingerprint_of_fit(recipe)), []).append(recipe)
    profiles = []
    for recipe, *others in sharing.values():
        profile = fit_profile(recipe, calibration)
        made = {"recipe": recipe.name, "also": [other.name for other in others], "id": profile.id}
        profiles.append({**made, "bytes": profile.nbytes, "path": str(profile.save())})
    return {
        "tokens": calibration.tokens,
        "tokens_by_kind": {kind: sum(len(c.ids) for c in cuts if c.kind == kind) for kind in {c.kind: 0 for c in cuts}},
        "documents": len(calibration.texts),
        "profiles": profiles,
    }


def _also(others: list[str]) -> str:
    return f" (also of {', '.join(others)})" if others else ""


def _curve(
    local: Any, documents: list[Any], chosen: list[Any], *, required: bool, quiet: bool
) -> tuple[dict[str, Any] | None, str]:
    """The curve of recipe cellar if its profile serves one of the `chosen` recipes, and a line about it.

    One that was measured already stays, unless it is `required`: then it is measured, and what hinders that is raised.
    """
    from ...calibrate import find_fitted, fingerprint_of_fit
    from ...errors import KVCellarError, ProfileMissing
    from ...recipe import PRESETS
    from ..curve import BASE, find_curve
    from ..measure import held_out, measure_curve
    from .models import cache_geometry

    base = PRESETS.get(BASE)
    if base is None or all(fingerprint_of_fit(recipe) != fingerprint_of_fit(base) for recipe in chosen):
        if required:
            raise InvalidInput(f"only recipe {BASE} and those that share its profile have a curve")
        return None, ""
    try:
        profile = find_fitted(base, local.identity, cache_geometry(local))
        if profile is None:
            raise ProfileMissing(f"this model has no profile for recipe {BASE}: calibrate without --curve-only")
        curve = find_curve(profile.id)
        if required or curve is None or not curve.covers(base):
            cuts = held_out(documents, profile, partial(local.encode, continues=True))
            local.require_room(len(cuts[0].ids))
            curve = measure_curve(local, profile, base, cuts, partial(progress, quiet=quiet))
            curve.save()
    except KVCellarError as error:
        if required:
            raise
        return None, f"not measured: {error}"
    points = [point._asdict() for point in curve.points]
    line = ", ".join(f"{p.kl:.2g} nats at {p.bytes_per_token:.0f} B" for p in curve.points)
    return {"profile": profile.id, "windows": curve.windows, "points": points}, f"{line} a coarse token"
