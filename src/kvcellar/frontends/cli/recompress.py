"""`kvcellar recompress`: the same tokens under another recipe."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .common import emit, facts, human_bytes, json_option, namespace_option, progress
from .recipes import chosen_recipe, recipe_option, require_one, target_kl_option

if TYPE_CHECKING:
    from ...recipe import Recipe


@click.command("recompress")
@click.argument("file", type=click.Path(dir_okay=False))
@click.argument("out", type=click.Path(dir_okay=False))
@recipe_option
@target_kl_option
@click.option(
    "--model",
    "model_dir",
    type=click.Path(exists=True, file_okay=False),
    help="Folder of the model, where a recipe runs it. Default: where this machine last saw it.",
)
@click.option("--embed-profile", is_flag=True, help="Store the new recipe's profile inside OUT.")
@namespace_option
@json_option
def command(
    file: str,
    out: str,
    recipe: str | None,
    target_kl: float | None,
    model_dir: str | None,
    embed_profile: bool,
    namespace: str,
    as_json: bool,
) -> None:
    """Write the archive FILE to OUT under another recipe. No model is needed, but where a recipe runs it (replay-N).

    From a bit-exact archive OUT becomes what `save` would have made. What a lossy recipe has lost stays lost, so
    another lossy one adds to it, and OUT says through which recipes its values have been. Under the recipe that FILE
    has already, blocks are copied and no value changes. OUT may be FILE; it takes its place at once when it is
    complete.

    \b
    Example:
      kvcellar recompress chat.kvc small.kvc --recipe cellar
    """
    from ...errors import InvalidInput
    from ..recompress import recompress
    from .recipes import recipe_of_archive

    require_one(recipe, target_kl)
    if recipe is None and target_kl is None:
        raise InvalidInput("give --recipe NAME or --target-kl NATS")
    wanted, profile = chosen_recipe(recipe), None
    if target_kl is not None:
        wanted, profile = recipe_of_archive(target_kl, file, namespace)
    assert wanted is not None
    tokens, model = _tokens(file, namespace), _model(file, namespace, wanted, model_dir, quiet=as_json)
    started = time.perf_counter()
    with progress(f"recompress {tokens:,} tokens", tokens, quiet=as_json) as advance:
        made = recompress(
            *(file, out),
            recipe=wanted,
            profile=profile,
            namespace=namespace,
            embed_profile=embed_profile,
            replay_with=model,
            progress=advance,
        )
    seconds = time.perf_counter() - started
    info, before = made.info, made.bytes_before
    size = partial("{}: {:,} bytes = {} = {:,.0f} B/token".format)
    rows = {
        "from": size(made.recipe_before, before, human_bytes(before), before / info.tokens),
        "to": size(info.recipe, info.file_bytes, human_bytes(info.file_bytes), info.bytes_per_token),
        "tokens": f"{info.tokens:,}, {_ratio(before, info.file_bytes)} in {seconds:.2f} s",
    }
    if made.copied:
        rows["values"] = "copied: the archive had this recipe already"
    elif len(made.lost_to) > 1:
        rows["values"] = f"lost to {', then to '.join(made.lost_to)}: the losses add up, and no recipe brings them back"
    elif made.lost_to and made.lost_to[0] != info.recipe:
        rows["values"] = f"those that {made.lost_to[0]} kept, bit by bit"
    facts_for_programs = {
        **info.to_json(),
        "bytes_before": before,
        "bytes_per_token_before": before / info.tokens,
        "recipe_before": made.recipe_before,
        "lost_to": list(made.lost_to),
        "copied": made.copied,
        "recompress_s": seconds,
    }
    emit(facts_for_programs, facts(rows), as_json=as_json)


def _ratio(before: int, after: int) -> str:
    return f"{before / after:.3g} x smaller" if after <= before else f"{after / before:.3g} x larger"


def _model(file: str, namespace: str, wanted: Recipe, model_dir: str | None, *, quiet: bool) -> Any:
    """The archive's model in the dtype of its cache, if a folder is given or the old recipe or the new one runs it."""
    from ...archive.reader import ArchiveReader
    from ...identity import require_same
    from ...store.local import LocalStore
    from .models import LocalModel, folder_of
    from .tokens import is_tokens

    store, name = LocalStore.at(file)
    with ArchiveReader(store.open_reader(name), namespace) as archive:
        manifest = archive.manifest
    runs = any((recipe.predict or {}).get("layers") for recipe in (wanted, manifest.recipe))
    runs |= is_tokens(wanted) and (manifest.recipe.quantize is not None or bool(wanted.symbols.get("model_coded")))
    if model_dir is None and not runs:
        return None
    folder = model_dir or folder_of(manifest.identity)
    if not quiet:
        click.echo(f"loading {Path(folder).name} …", err=True)
    ran_in = next(layer.key.dtype for layer in manifest.geometry.layers if layer.key.width)
    local = LocalModel(folder, ran_in)
    require_same(manifest.identity, local.identity, file)
    return local.model


def _tokens(file: str, namespace: str) -> int:
    from ...archive.reader import ArchiveReader
    from ...store.local import LocalStore

    store, name = LocalStore.at(file)
    with ArchiveReader(store.open_reader(name), namespace) as archive:
        return archive.tokens
