"""`kvcellar save`: text in, archive out."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from .common import emit, json_option, namespace_option
from .info import summary


@click.command("save")
@click.argument("out", type=click.Path(dir_okay=False))
@click.option(
    "--model", "model_dir", required=True, type=click.Path(exists=True, file_okay=False), help="Model folder."
)
@click.option("--text", required=True, type=click.Path(allow_dash=True), help="UTF-8 text file, or - for stdin.")
@click.option("--recipe", default="exact", show_default=True, help="A preset's name, or a JSON file with a recipe.")
@click.option("--max-tokens", type=click.IntRange(1), help="Use only the first N tokens of the text.")
@click.option(
    "--dtype",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "float32", "float16", "bfloat16"]),
    help="Run the model in this dtype; the cache has it too.",
)
@namespace_option
@json_option
def command(
    out: str,
    model_dir: str,
    text: str,
    recipe: str,
    max_tokens: int | None,
    dtype: str,
    namespace: str,
    as_json: bool,
) -> None:
    """Run a model over a text and keep its cache in the archive OUT.

    An archive that is already at OUT is replaced at once when the new one is complete; any other file is left alone.
    """
    from ...errors import InvalidRecipe
    from ...recipe import Recipe, find_recipe, strict_json
    from .models import read_text

    chosen: str | Recipe = recipe
    if recipe.endswith(".json"):
        try:
            chosen = Recipe.from_json(strict_json(Path(recipe).read_bytes()))
        except (OSError, json.JSONDecodeError, ValueError) as error:
            raise InvalidRecipe(f"{recipe}: {error}") from error
    chosen = find_recipe(chosen)
    content = read_text(text)

    from ..library import require_replaceable, save

    require_replaceable(out)
    from .models import LocalModel, empty_cache

    if not as_json:
        click.echo(f"loading {Path(model_dir).name} …", err=True)
    local = LocalModel(model_dir, dtype)
    ids = local.encode(content)[:max_tokens]
    local.require_room(len(ids))
    if not as_json:
        click.echo(f"recipe {chosen.name}: {len(ids):,} tokens of {text} through {Path(model_dir).name}", err=True)
    cache = empty_cache()
    started = time.perf_counter()
    local.prefill(ids, cache, quiet=as_json)
    prefilled = time.perf_counter()
    info = save(out, cache, tokens=ids, identity=local.identity, recipe=chosen, namespace=namespace)
    saved = time.perf_counter()
    timing = {"prefill_s": prefilled - started, "save_s": saved - prefilled}
    lines = [*summary(info), f"took       prefill {timing['prefill_s']:.2f} s, save {timing['save_s']:.2f} s"]
    if recipe == "exact":
        lines.append("hint       --recipe turbo-4 needs no profile and takes less than half of this, at little loss")
    emit({**info.to_json(), **timing}, lines, as_json=as_json)
