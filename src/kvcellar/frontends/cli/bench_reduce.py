"""`kvcellar bench reduce`: quality with fewer tokens, for reducers, kvpress and floors, on the same windows."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from ...errors import InvalidInput, KVCellarError
from .bench_setup import CONTINUATION, SHORT, chosen_windows, data_option, write
from .common import json_option, out_option, plot_option
from .measure import KEEP, names, numbers

METHODS = "matching,balanced,random,streaming,snapkv,scissorhands"
TEXTS = 8
"""Other texts whose queries serve as samples."""
TASK_KINDS = ("needle_single", "needle_multi", "key_value")


@click.command("reduce")
@click.option("--model", "model_dir", type=click.Path(exists=True, file_okay=False), help="Default: the demo model.")
@click.option("--keep", default=KEEP, show_default=True, help="Fractions kept, comma-separated; they count all tokens.")
@click.option("--methods", default=METHODS, show_default=True, help="Comma-separated, or all.")
@click.option("--windows", "count", default=8, show_default=True, type=click.IntRange(1), help="How many windows.")
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(1), help="Draws of methods that draw.")
@click.option("--prefix", default=SHORT, show_default=True, type=click.IntRange(64), help="Tokens to keep, per window.")
@click.option(
    "--continuation", default=CONTINUATION, show_default=True, type=click.IntRange(2), help="Tokens to score."
)
@click.option("--queries", default=1024, show_default=True, type=click.IntRange(2), help="Sample queries a query head.")
@click.option(
    "--foreign",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    help="Text for tuning whose queries serve as samples. Default: text that comes with Python.",
)
@click.option("--peers", default="none", show_default=True, help="Presses of kvpress: names, or all, or none.")
@click.option("--tasks", default=0, show_default=True, type=click.IntRange(0), help="Generated tasks per kind, too.")
@click.option(
    "--task-tokens", default=4096, show_default=True, type=click.IntRange(256), help="Their contexts' length."
)
@click.option(
    "--text", "texts", multiple=True, type=click.Path(exists=True, dir_okay=False), help="Your own test text."
)
@data_option
@out_option
@plot_option
@json_option
def command(
    model_dir: str | None,
    keep: str,
    methods: str,
    count: int,
    seeds: int,
    prefix: int,
    continuation: int,
    queries: int,
    foreign: tuple[str, ...],
    peers: str,
    tasks: int,
    task_tokens: int,
    texts: tuple[str, ...],
    data: str,
    out: str | None,
    plot: str | None,
    as_json: bool,
) -> None:
    """Measure what fewer tokens lose.

    Each window's cache is reduced to a fraction of its tokens by every method, and the continuation scored behind it:
    KL, change of perplexity and context kept, the memory that is really freed, seconds of the reduction. Ratios against
    streaming and random are on the same windows. An interrupted run goes on where it stopped.
    """
    from ..bench.reducerows import comparisons, rows_of_reducers
    from ..bench.reducers import METHODS as KNOWN
    from ..bench.reducers import ReduceBench, cases
    from ..risk import slots_for
    from .demo_model import demo_model
    from .models import MeasuredModel

    fractions = numbers(keep, "--keep")
    slots_for(fractions, prefix)
    todo = cases(list(KNOWN) if methods == "all" else names(methods, "--methods"), fractions, seeds)
    presses = _presses(peers, fractions)
    local = MeasuredModel(model_dir or demo_model(quiet=as_json))
    local.require_room(prefix + continuation)
    windows, sources, documents = chosen_windows(local, texts, Path(data), prefix, continuation, count, quiet=as_json)
    others = _foreign(local, foreign, prefix, continuation)
    bench = ReduceBench(local, windows, others, queries=queries, quiet=as_json, texts=documents)
    bench.prepare()
    found = bench.measured(todo)
    rows, beside, failed = [*bench.floor(), *rows_of_reducers(found, prefix)], {}, 0
    for name, fraction in presses:
        try:
            rows += bench.peer(name)
            beside[name, fraction] = bench.peer_results(name)
        except KVCellarError as error:
            failed += 1
            click.echo(f"peer {name} left out: {error}", err=True)
    result: dict[str, Any] = {
        "benchmark": "reduce",
        "queries": {"count": queries, "texts": sorted({each.text for each in others})},
        "rows": rows,
        "comparisons": comparisons(found, beside),
        "tasks": _tasks(local, bench.sampler, todo, tasks, task_tokens, quiet=as_json),
    }
    if out:
        write(Path(out), local, sources, windows, result)
    if plot:
        from ..bench.reducershow import draw

        draw(result, plot)
    if as_json:
        click.echo(json.dumps(result))
    else:
        from ..bench.reducershow import show

        show(result)
    if failed and failed == len(presses):
        raise KVCellarError(f"all {failed} peers failed; their rows are missing")


def _presses(given: str, fractions: list[float]) -> list[tuple[str, float]]:
    """kvpress peers at the fractions asked for, by their names with or without the fraction. Raises InvalidInput."""
    if given == "none":
        return []
    from ..bench.peers import PEERS

    known = {
        (name, fraction)
        for name in PEERS
        for fraction in fractions
        if name.startswith("kvpress-") and name.endswith(f"-{fraction:g}")
    }
    if given == "all":
        return sorted(known)
    wanted = [name.removeprefix("peer:").removeprefix("kvpress-") for name in names(given, "--peers")]
    found = [each for each in sorted(known) if _press(each[0]) in wanted or each[0].removeprefix("kvpress-") in wanted]
    reached = {_press(name) for name, _ in found} | {name.removeprefix("kvpress-") for name, _ in found}
    if unknown := [name for name in wanted if name not in reached]:
        presses = ", ".join(sorted({_press(name) for name, _ in known})) or "none"
        raise InvalidInput(f"no press {', '.join(unknown)} at these fractions; known: {presses}")
    return found


def _press(name: str) -> str:
    return name.removeprefix("kvpress-").rpartition("-")[0]


def _foreign(local: Any, files: tuple[str, ...], prefix: int, continuation: int) -> list[Any]:
    """Windows of texts for tuning, one a document, the kinds taking turns. Raises InvalidInput when there is none."""
    from ..calibration import calibration_documents, cut

    documents = calibration_documents([Path(file) for file in files], standard=not files)
    length = prefix + continuation
    return cut(documents, partial(local.encode, continues=True), TEXTS * length, length, per_document=1)


def _tasks(local: Any, sampler: Any, todo: list[Any], count: int, budget: int, *, quiet: bool) -> list[dict[str, Any]]:
    """Rows of the first draw of each case and of ∅ on `count` tasks of each kind, in standard-library documentation."""
    if not count:
        return []
    from ...evaluate.tasks import generate
    from ...evaluate.texts import standard_library
    from ..bench.reducertasks import ReduceTasks

    filler = [document.text for document in standard_library("test") if document.kind == "docs"]
    encode = partial(local.encode, continues=True)
    put = [task for kind in TASK_KINDS for task in generate(kind, filler, encode, budget=budget, count=count, seed=2)]
    bench = ReduceTasks(local, put, sampler, quiet=quiet)
    bench.prepare()
    return bench.floor() + [row for case in todo if case.seed == 0 for row in bench.reduced(case)]
