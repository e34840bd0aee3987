"""`kvcellar calibrate`: a model and text in, a profile out."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import click

from ...errors import InvalidInput
from .common import emit, facts, human_bytes, json_option


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
@click.option("--recipe", "names", multiple=True, help="Make a profile for this recipe (default: all that need one).")
@click.option("--tokens", default=60_000, show_default=True, type=click.IntRange(1), help="How much text, in tokens.")
@click.option(
    "--window", default=1024, show_default=True, type=click.IntRange(16), help="Tokens the model reads at once."
)
@json_option
def command(
    model_dir: str | None,
    texts: tuple[str, ...],
    only_text: bool,
    names: tuple[str, ...],
    tokens: int,
    window: int,
    as_json: bool,
) -> None:
    """Make the profiles that recipes need, once per model.

    The model reads calibration text: documentation and code that come with Python, and your own --text. Its caches
    are kept under $KVCELLAR_HOME, so an interrupted run goes on, and more text costs only what is new. Profiles are
    found by themselves when you save with the recipe.

    \b
    Example:
      kvcellar calibrate --model DIR --text notes.txt --text manual.md
    """
    from ...calibrate import fit_profile, fitted_stages
    from ...recipe import PRESETS, find_recipe

    if only_text and not texts:
        raise InvalidInput("--only-text needs --text: there would be nothing to calibrate on")
    chosen = [find_recipe(name) for name in names] or [r for r in PRESETS.values() if fitted_stages(r)]
    for recipe in chosen:
        if not fitted_stages(recipe):
            raise InvalidInput(f"recipe {recipe.name!r} needs no profile")

    from ..calibration import calibration_documents, collect, cut
    from .common import progress
    from .demo_model import demo_model
    from .models import MeasuredModel

    local = MeasuredModel(model_dir or demo_model(quiet=as_json))
    local.require_room(window)
    started = time.perf_counter()
    documents = calibration_documents([Path(text) for text in texts], standard=not only_text)
    cuts = cut(documents, partial(local.encode, continues=True), tokens, window)
    calibration = collect(local, cuts, partial(progress, quiet=as_json))
    kinds = {kind: sum(len(c.ids) for c in cuts if c.kind == kind) for kind in dict.fromkeys(c.kind for c in cuts)}
    profiles = []
    for recipe in chosen:
        profile = fit_profile(recipe, calibration)
        path = profile.save()
        profiles.append({"recipe": recipe.name, "id": profile.id, "bytes": profile.nbytes, "path": str(path)})
    result = {
        "model": local.identity.to_json(),
        "tokens": calibration.tokens,
        "tokens_by_kind": kinds,
        "documents": len(calibration.texts),
        "profiles": profiles,
        "took_s": time.perf_counter() - started,
    }
    rows = {
        "text": ", ".join(f"{count:,} tokens of {kind}" for kind, count in kinds.items()),
        "documents": f"{len(calibration.texts)}",
        **{f"{p['recipe']}": f"profile {str(p['id'])[:16]}…, {human_bytes(int(str(p['bytes'])))}" for p in profiles},
    }
    if not profiles:
        rows["profiles"] = "none: no preset here needs one"
    emit(result, facts(rows), as_json=as_json)
