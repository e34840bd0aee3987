"""`kvcellar save`: text in, archive out."""

from __future__ import annotations

import time
from pathlib import Path

import click

from ...recipe import EXACT
from .common import emit, json_option, namespace_option, progress
from .info import summary
from .recipes import chosen_recipe, recipe_of_model, recipe_option, require_one, target_kl_option
from .tokens import is_tokens, log_recipe


@click.command("save")
@click.argument("out", type=click.Path(dir_okay=False))
@click.option(
    "--model", "model_dir", required=True, type=click.Path(exists=True, file_okay=False), help="Model folder."
)
@click.option("--text", required=True, type=click.Path(allow_dash=True), help="UTF-8 text file, or - for stdin.")
@recipe_option
@target_kl_option
@click.option("--max-tokens", type=click.IntRange(1), help="Use only the first N tokens of the text.")
@click.option(
    "--dtype",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "float32", "float16", "bfloat16"]),
    help="Run the model in this dtype; the cache has it too.",
)
@click.option(
    "--no-probabilities",
    is_flag=True,
    help="Do not keep what the model thought of each token for `find --nearest`; the prefill is a little faster.",
)
@click.option(
    "--model-coded",
    is_flag=True,
    help="With --recipe tokens: code the ids under the model. Two runs of it, token by token.",
)
@click.option("--keep-ids", is_flag=True, help="With --model-coded: keep the ids in a form that needs no model, too.")
@namespace_option
@json_option
def command(
    out: str,
    model_dir: str,
    text: str,
    recipe: str | None,
    target_kl: float | None,
    max_tokens: int | None,
    dtype: str,
    no_probabilities: bool,
    model_coded: bool,
    keep_ids: bool,
    namespace: str,
    as_json: bool,
) -> None:
    """Run a model over a text and keep its cache in the archive OUT.

    Without --recipe it is `cellar`, which is lossy, for a model that has a profile (`kvcellar calibrate` makes it), and
    the bit-exact `exact` for any other.

    An archive that is already at OUT is replaced at once when the new one is complete; any other file is left alone.
    """
    from .models import read_text

    require_one(recipe, target_kl)
    named = log_recipe(chosen_recipe(recipe), model_coded=model_coded, keep_ids=keep_ids)
    content = read_text(text)

    from ..library import require_replaceable, save

    require_replaceable(out)
    from .models import LocalModel, empty_cache

    if not as_json:
        click.echo(f"loading {Path(model_dir).name} …", err=True)
    local = LocalModel(model_dir, dtype)
    ids = local.encode(content)[:max_tokens]
    local.require_room(len(ids))
    chosen, profile, why = recipe_of_model(local, named, target_kl)
    if not as_json:
        click.echo(f"recipe {chosen.name}{why}: {len(ids):,} tokens of {text} through {Path(model_dir).name}", err=True)
    cache = empty_cache()
    started = time.perf_counter()
    told = local.prefill(ids, cache, quiet=as_json, probabilities=not no_probabilities)
    prefilled = time.perf_counter()
    quiet = as_json or (chosen.reduce is None and not model_coded)
    with progress(
        *(("coding", 2 * len(ids)) if model_coded else ("reducing", len(cache.layers))), quiet=quiet
    ) as advance:
        info = save(
            out,
            cache,
            tokens=ids,
            identity=local.identity,
            recipe=chosen,
            profile=profile,
            namespace=namespace,
            reduce_with=local.model,
            log2_probs=told,
            replay_with=local.model,
            progress=lambda done, total: advance(1),
        )
    saved = time.perf_counter()
    timing = {"prefill_s": prefilled - started, "save_s": saved - prefilled}
    lines = [*summary(info), f"took       prefill {timing['prefill_s']:.2f} s, save {timing['save_s']:.2f} s"]
    if named is not None and is_tokens(named):
        lines.append("hint       the file holds token ids alone: whoever restores it runs the model over them again")
    if chosen == EXACT:
        lines.append("hint       --recipe turbo-4 needs no profile and takes less than half of this, at little loss")
    emit({**info.to_json(), **timing}, lines, as_json=as_json)
