"""`kvcellar bench`: quality against bytes, for recipes, peers and floors, on the same windows."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from ...errors import InvalidInput, KVCellarError, MissingExtra
from .common import json_option, progress

TEXTS = Path("benchmarks") / "texts.toml"
DATA = Path("..") / "shared" / "data"
SHORT, LONG, CONTINUATION = 1024, 7680, 384
CALIBRATION = 60_000


@click.command("bench")
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
@click.option("--quick", is_flag=True, help="8 windows: a look within minutes.")
@click.option("--data", type=click.Path(file_okay=False), default=str(DATA), help="Folder of the files in texts.toml.")
@click.option(
    "--out", type=click.Path(dir_okay=False), help="Also write the rows, with all that made them, to this JSON."
)
@click.option("--plot", type=click.Path(dir_okay=False), help="Also draw bytes per token against KL (PNG or SVG).")
@json_option
def command(
    model_dir: str | None,
    texts: tuple[str, ...],
    recipes: str,
    peers: str,
    count: int,
    prefix: int,
    continuation: int,
    long_context: bool,
    tasks: int,
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
    from ..bench.peers import PEERS
    from ..bench.rows import compare_at_equal_kl
    from ..bench.run import Bench
    from .demo_model import demo_model
    from .models import MeasuredModel

    chosen, others = _chosen_recipes(recipes), _names(peers, sorted(PEERS), "peer")
    if long_context:
        prefix, count = LONG, min(count, 12)
    if quick:
        count = min(count, 8)
    local = MeasuredModel(model_dir or demo_model(quiet=as_json))
    local.require_room(prefix + continuation)
    windows, sources, documents = _windows(local, texts, Path(data), prefix, continuation, count, quiet=as_json)
    bench = Bench(local, windows, quiet=as_json, texts=documents)
    bench.prepare()
    _ensure_profiles(local, chosen, bench.geometry(), quiet=as_json)
    benches: list[Any] = [bench]
    if tasks:
        from ..bench.margins import TaskBench

        benches.append(TaskBench(local, _tasks(local, prefix, tasks), quiet=as_json))
        benches[-1].prepare()
    rows = [row for each in benches for row in each.floor()]
    for recipe, name in _zero_floors(chosen):
        rows += bench.zero_residual(recipe, name)
    for recipe in chosen:
        rows += [row for each in benches for row in each.recipe(recipe)]
    failed = 0
    for name in others:
        try:
            rows += [row for each in benches for row in each.peer(name)]
        except KVCellarError as error:
            failed += not isinstance(error, MissingExtra)
            click.echo(f"peer {name} left out: {error}", err=True)
    compare_at_equal_kl(rows)
    if out:
        _write(Path(out), local, sources, windows, rows)
    if plot:
        from ..bench.plot import draw

        draw(rows, plot)
    if as_json:
        click.echo(json.dumps(rows))
    else:
        from ..bench.table import show

        show(rows)
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
    from ...recipe import PRESETS

    return [PRESETS[name] for name in _names(given, list(PRESETS), "recipe")]


def _windows(
    local: Any, texts: tuple[str, ...], data: Path, prefix: int, continuation: int, count: int, *, quiet: bool
) -> tuple[list[Any], dict[str, str], set[str]]:
    """The windows, the SHA-256 of every text file they may come from, and of every document they do come from."""
    from ...evaluate.texts import load_sources, standard_library, texts_from_files, windows

    if texts:
        documents, files = texts_from_files([Path(text) for text in texts]), [Path(text) for text in texts]
    elif TEXTS.is_file():
        sources = load_sources(TEXTS, data)
        documents, files = sources.documents("test"), list(sources.files)
        if sources.missing and not quiet:
            click.echo(f"not in {data}, left out: {', '.join(sources.missing)}", err=True)
    else:
        documents, files = standard_library("test"), []
    found = windows(documents, lambda text: local.encode(text, continues=True), prefix, continuation, count)
    if not found:
        raise InvalidInput(f"no document reaches {prefix + continuation:,} tokens")
    if len(found) < count and not quiet:
        click.echo(f"only {len(found)} documents reach {prefix + continuation:,} tokens", err=True)
    named = {document.name: document for document in documents}
    used = {hashlib.sha256(named[window.article].text.encode()).hexdigest() for window in found}
    return found, {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}, used


def _ensure_profiles(local: Any, chosen: list[Any], geometry: Any, *, quiet: bool) -> None:
    """Make the profiles that recipes need and this machine lacks, as `kvcellar calibrate` does by default."""
    from ...calibrate import find_fitted, fit_profile, fitted_stages

    lacking = [r for r in chosen if fitted_stages(r) and find_fitted(r, local.identity, geometry) is None]
    if not lacking:
        return
    from ..calibration import WINDOW, calibration_documents, collect, cut

    cuts = cut(calibration_documents([]), partial(local.encode, continues=True), CALIBRATION, WINDOW)
    calibration = collect(local, cuts, partial(progress, quiet=quiet))
    for recipe in lacking:
        fit_profile(recipe, calibration).save()


def _zero_floors(chosen: list[Any]) -> list[tuple[Any, str]]:
    """Recipes that predict, and what their floor with no residual is called."""
    from ..bench.zero import FLOOR_ZERO_RESIDUAL

    predicting = [recipe for recipe in chosen if recipe.predict is not None]
    alone = len(predicting) == 1
    return [(recipe, FLOOR_ZERO_RESIDUAL + ("" if alone else f":{recipe.name}")) for recipe in predicting]


def _tasks(local: Any, budget: int, count: int) -> list[Any]:
    """`count` tasks of every kind with contexts of at most `budget` tokens, in standard-library documentation."""
    from ...evaluate.tasks import KINDS, generate
    from ...evaluate.texts import standard_library

    filler = [document.text for document in standard_library("test") if document.kind == "docs"]

    def encode(text: str) -> list[int]:
        return local.encode(text, continues=True)  # type: ignore[no-any-return]

    return [task for kind in KINDS for task in generate(kind, filler, encode, budget=budget, count=count, seed=2)]


def _write(out: Path, local: Any, sources: dict[str, str], windows: list[Any], rows: list[dict[str, Any]]) -> None:
    from ...evaluate.machine import machine

    made_from = {
        "benchmark": "quality",
        "machine": machine(),
        "model": local.identity.to_json(),
        "texts": sources,
        "windows": [{"id": w.id, "article": w.article, "kind": w.kind, "prefix": w.prefix} for w in windows],
        "rows": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(made_from, indent=1) + "\n")
