"""`kvcellar bench rate`: recipe `cellar`'s curve beside its peers, and what each of its parts is worth."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from ...errors import InvalidInput
from .bench_setup import LONG, QUICK_CALIBRATION, TEXTS, data_option, quick_profiles, write
from .common import json_option, out_option, plot_option, progress

PARTS = ("curve", "ablation", "bits", "surprisal", "length")
TOKENS, PREFIX, CONTINUATION, WINDOWS = 24_576, 800, 192, 6
QUICK_WINDOWS, QUICK_LENGTH = 2, 1024


@click.command("rate")
@click.option("--model", "model_dir", type=click.Path(exists=True, file_okay=False), help="Default: the demo model.")
@click.option(
    "--from",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    help="Results that `kvcellar bench --out` wrote. Default: those in benchmarks/results.",
)
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only this; several times for more.")
@click.option(
    "--text", "texts", multiple=True, type=click.Path(exists=True, dir_okay=False), help="Your own text for tuning."
)
@click.option(
    "--tokens", default=TOKENS, show_default=True, type=click.IntRange(1), help="How much text variants are fitted on."
)
@click.option("--windows", "count", default=WINDOWS, show_default=True, type=click.IntRange(1), help="Held-out ones.")
@click.option("--prefix", default=PREFIX, show_default=True, type=click.IntRange(64), help="Tokens of context.")
@click.option(
    "--continuation", default=CONTINUATION, show_default=True, type=click.IntRange(2), help="Tokens to score."
)
@click.option("--recipe", "name", default="cellar", show_default=True, help="Whose bits are looked at.")
@click.option(
    "--documents", default=2, show_default=True, type=click.IntRange(1), help="How many long texts, for the lengths."
)
@click.option("--quick", is_flag=True, help="Two windows, little text, short texts: a look at whether it works.")
@data_option
@out_option
@plot_option
@json_option
def command(
    model_dir: str | None,
    files: tuple[str, ...],
    parts: tuple[str, ...],
    texts: tuple[str, ...],
    tokens: int,
    count: int,
    prefix: int,
    continuation: int,
    name: str,
    documents: int,
    quick: bool,
    data: str,
    out: str | None,
    plot: str | None,
    as_json: bool,
) -> None:
    """Study the rate of recipe cellar.

    \b
    curve      bytes of every peer and recipe in result files ÷ those of cellar's curve at the same divergence
    ablation   the codec without prediction, metric, KLT, token weights or contexts, and with a dead zone
    bits       where the bytes go: layer groups, layers, keys and values, parts of the file
    surprisal  whether a token's residual and bits follow how surprised the model was
    length     bytes per token from 256 to 7,680 tokens of context

    All but the curve reads tuning text, held out from the profiles it measures. Variants are fitted here and kept;
    the other parts take the newest profile for the recipe. An interrupted study goes on where it stopped.
    """
    from ...recipe import find_recipe
    from ..bench.ratepeers import compare, known_runs, points_of, read_run

    chosen = parts or PARTS
    result: dict[str, Any] = {"benchmark": "rate"}
    points: list[dict[str, Any]] = []
    if "curve" in chosen:
        runs = [read_run(Path(file)) for file in files] or known_runs()
        if not runs and parts:
            raise InvalidInput("no results of kvcellar bench to draw a curve from: name them with --from")
        result["curve"], points = compare(runs), points_of(runs)
    local, read = None, list[Path]()
    if set(chosen) - {"curve"}:
        from ..bench.rate import Study, at_hand
        from .demo_model import demo_model
        from .models import MeasuredModel, cache_geometry

        if quick:
            count, tokens, documents = min(count, QUICK_WINDOWS), min(tokens, QUICK_CALIBRATION), 1
        local = MeasuredModel(model_dir or demo_model(quiet=as_json))
        local.require_room(prefix + continuation)
        recipe, (tuning, read) = find_recipe(name), _documents(texts, Path(data), quiet=as_json)
        profile = at_hand(recipe, local)
        if profile is None and quick and set(chosen) - {"curve", "ablation"}:
            geometry = cache_geometry(local)
            profile = quick_profiles(lambda: local, [recipe], geometry, quiet=as_json)[recipe.name]
        study = Study(local, tuning, recipe, profile, prefix, continuation, count, quiet=as_json)
        if "ablation" in chosen:
            result["ablation"] = study.ablation(_calibration(local, tuning, tokens, quiet=as_json))
        if "bits" in chosen:
            result["bits"] = study.bits()
        if "surprisal" in chosen:
            result["surprisal"] = study.surprisal()
        if "length" in chosen:
            longest = min(QUICK_LENGTH if quick else LONG, local.max_tokens or LONG)
            result["length"] = study.length(documents, longest)
    if out:
        _write(Path(out), local, read, {**result, "points": points})
    if plot:
        from ..bench.rateshow import draw

        draw(result, points, plot)
    if as_json:
        click.echo(json.dumps(result))
    else:
        from ..bench.rateshow import show

        show(result)


def _documents(texts: tuple[str, ...], data: Path, *, quiet: bool) -> tuple[list[Any], list[Path]]:
    """Documents for tuning, and the files they come from: the user's, else those that texts.toml declares, else the
    standard library's, which has no file."""
    from ...evaluate.texts import load_sources, standard_library, texts_from_files

    if texts:
        files = [Path(text) for text in texts]
        return texts_from_files(files, role="tune"), files
    if not TEXTS.is_file():
        return standard_library("tune"), []
    sources = load_sources(TEXTS, data)
    if sources.missing and not quiet:
        click.echo(f"not in {data}, left out: {', '.join(sources.missing)}", err=True)
    tuned = {source.file for source in sources.sources if source.role == "tune"}
    return sources.documents("tune"), [file for file in sources.files if file.name in tuned]


def _calibration(local: Any, documents: list[Any], tokens: int, *, quiet: bool) -> Any:
    from ..calibration import WINDOW, collect, cut

    cuts = cut(documents, partial(local.encode, continues=True), tokens, WINDOW)
    return collect(local, cuts, partial(progress, quiet=quiet))


def _write(out: Path, local: Any, files: list[Path], result: dict[str, Any]) -> None:
    """What was studied, and what made it; each part names its own windows."""
    if local is not None:
        write(out, local, {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}, [], result)
        return
    from ...evaluate.machine import machine

    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
