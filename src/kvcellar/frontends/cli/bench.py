"""`kvcellar bench`: quality against bytes, for recipes, peers and floors, on the same windows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ...errors import InvalidInput, KVCellarError, MissingExtra
from .bench_quantizers import command as quantizers
from .bench_rate import command as rate
from .bench_reduce import command as reduce
from .bench_setup import (
    CONTINUATION,
    LONG,
    QUICK_CONTINUATION,
    SHORT,
    chosen_windows,
    data_option,
    ensure_profiles,
    quick_profiles,
    tasks_from_files,
    write,
)
from .common import json_option


@click.group("bench", invoke_without_command=True)
@click.option("--model", "model_dir", type=click.Path(exists=True, file_okay=False), help="Default: the demo model.")
@click.option(
    "--text", "texts", multiple=True, type=click.Path(exists=True, dir_okay=False), help="Your own test text."
)
@click.option("--recipes", default="all", show_default=True, help="Names, comma-separated, or all, or none.")
@click.option("--peers", default="none", show_default=True, help="Names, comma-separated, or all, or none.")
@click.option("--windows", "count", default=48, show_default=True, type=click.IntRange(1), help="How many windows.")
@click.option("--prefix", default=SHORT, show_default=True, type=click.IntRange(64), help="Tokens to keep, per window.")
@click.option(
    "--continuation", default=CONTINUATION, show_default=True, type=click.IntRange(2), help="Tokens to score."
)
@click.option("--long", "long_context", is_flag=True, help=f"12 windows of {LONG:,} tokens instead.")
@click.option("--tasks", default=0, show_default=True, type=click.IntRange(0), help="Generated tasks per kind, too.")
@click.option(
    "--longbench", type=click.Path(exists=True, dir_okay=False), help="Tasks of this LongBench v2 file (JSON), too."
)
@click.option("--ruler", type=click.Path(exists=True, dir_okay=False), help="Tasks of this RULER file (JSONL), too.")
@click.option("--layers", is_flag=True, help="Also show what each layer's keys and values lose.")
@click.option(
    "--quick",
    is_flag=True,
    help="8 windows, less to score, profiles from little text: a look.",
)
@data_option
@click.option(
    "--out", type=click.Path(dir_okay=False), help="Also write the rows, with all that made them, to this JSON."
)
@click.option("--plot", type=click.Path(dir_okay=False), help="Also draw bytes per token against KL (PNG or SVG).")
@json_option
@click.pass_context
def command(
    context: click.Context,
    model_dir: str | None,
    texts: tuple[str, ...],
    recipes: str,
    peers: str,
    count: int,
    prefix: int,
    continuation: int,
    long_context: bool,
    tasks: int,
    longbench: str | None,
    ruler: str | None,
    layers: bool,
    quick: bool,
    data: str,
    out: str | None,
    plot: str | None,
    as_json: bool,
) -> None:
    """Measure what recipes cost and what they keep.

    Each window is one document: its first tokens are the cache, the next ones are scored. The uncompressed side is
    computed once and kept; an interrupted run goes on where it stopped. Archives are decoded in a process that sees
    only their paths. Divergences are nats per token, with 95 % intervals over documents.
    """
    if context.invoked_subcommand is not None:
        return
    from ..bench.peers import PEERS
    from ..bench.rows import compare_at_equal_kl, compare_speed
    from ..bench.run import Bench
    from .demo_model import demo_model
    from .models import MeasuredModel

    chosen, others = _chosen_recipes(recipes), _names(peers, sorted(PEERS), "peer")
    if long_context:
        prefix, count = LONG, min(count, 12)
    if quick:
        count, continuation = min(count, 8), min(continuation, QUICK_CONTINUATION)
    local = MeasuredModel(model_dir or demo_model(quiet=as_json))
    local.require_room(prefix + continuation)
    windows, sources, documents = chosen_windows(local, texts, Path(data), prefix, continuation, count, quiet=as_json)
    bench = Bench(local, windows, quiet=as_json, texts=documents, quick=quick and not layers)
    bench.prepare()
    profiles: dict[str, Any] = {}
    if quick:
        profiles = quick_profiles(lambda: local, chosen, bench.geometry(), quiet=as_json)
    else:
        ensure_profiles(lambda: local, chosen, bench.geometry(), quiet=as_json)
    benches: list[Any] = [bench]
    if put := [*_tasks(local, prefix, tasks), *tasks_from_files(local, longbench, ruler, quiet=as_json)]:
        from ..bench.margins import TaskBench

        benches.append(TaskBench(local, put, quiet=as_json))
        benches[-1].prepare()
    rows = [row for each in benches for row in each.floor()]
    for recipe, name in _zero_floors(chosen):
        rows += bench.zero_residual(recipe, name, profiles.get(recipe.name))
    for recipe in chosen:
        rows += [row for each in benches for row in each.recipe(recipe, profiles.get(recipe.name))]
    failed = 0
    for name in others:
        try:
            rows += [row for each in benches for row in each.peer(name)]
        except KVCellarError as error:
            failed += not isinstance(error, MissingExtra)
            click.echo(f"peer {name} left out: {error}", err=True)
    compare_at_equal_kl(rows)
    compare_speed(rows)
    numbers = sum(layer.numbers_per_token for layer in bench.geometry().layers)
    named = {"benchmark": "quality", "numbers_per_token": numbers}
    if out:
        write(Path(out), local, sources, windows, {**named, "rows": rows})
    if plot:
        from ..bench.plot import draw

        draw(rows, plot)
    if as_json:
        click.echo(json.dumps(rows))
    else:
        from ..bench.table import show

        show(rows)
        if layers:
            from ..bench.layers import show as show_layers

            show_layers(rows)
    if failed:
        raise KVCellarError(f"{failed} of {len(others)} peers failed; their rows are missing")


def _names(given: str, known: list[str], what: str) -> list[str]:
    if given in ("all", "none"):
        return known if given == "all" else []
    names = [name.strip().removeprefix("peer:") for name in given.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise InvalidInput(f"unknown {what} {', '.join(unknown)}; known: {', '.join(known)}")
    return names


def _chosen_recipes(given: str) -> list[Any]:
    """Those named; all are the presets but `exact-small`, which has a profile of its own and loses nothing anyway."""
    from ...recipe import EXACT_SMALL, PRESETS, find_recipe

    if given == "all":
        return [recipe for recipe in PRESETS.values() if recipe is not EXACT_SMALL]
    replaying = [name for name in given.split(",") if name.startswith("replay-")]
    return [find_recipe(name) for name in _names(given, [*PRESETS, *replaying], "recipe")]


def _zero_floors(chosen: list[Any]) -> list[tuple[Any, str]]:
    """Recipes that predict, one of those that predict alike, and what their floor with no residual is called."""
    from ..bench.zero import FLOOR_ZERO_RESIDUAL, zero_residual

    floors = {zero_residual(recipe).digest: recipe for recipe in reversed(chosen) if recipe.predict is not None}
    predicting = [recipe for recipe in chosen if recipe in floors.values()]
    alone = len(predicting) == 1
    return [(recipe, FLOOR_ZERO_RESIDUAL + ("" if alone else f":{recipe.name}")) for recipe in predicting]


def _tasks(local: Any, budget: int, count: int) -> list[Any]:
    """`count` tasks of every kind with contexts of at most `budget` tokens, in standard-library documentation."""
    from ...evaluate.tasks import KINDS, generate
    from ...evaluate.texts import standard_library

    if not count:
        return []
    filler = [document.text for document in standard_library("test") if document.kind == "docs"]

    def encode(text: str) -> list[int]:
        return local.encode(text, continues=True)  # type: ignore[no-any-return]

    return [task for kind in KINDS for task in generate(kind, filler, encode, budget=budget, count=count, seed=2)]


command.add_command(quantizers)
command.add_command(rate)
command.add_command(reduce)
