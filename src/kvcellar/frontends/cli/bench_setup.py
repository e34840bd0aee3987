"""What the benches share: windows of the test texts, profiles made on first use, results with all that made them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from ...errors import InvalidInput
from .common import progress

TEXTS = Path("benchmarks") / "texts.toml"
DATA = Path("..") / "shared" / "data"
data_option = click.option(
    "--data", type=click.Path(file_okay=False), default=str(DATA), help="Folder of the files in texts.toml."
)
SHORT, LONG, CONTINUATION, QUICK_CONTINUATION = 1024, 7680, 384, 128
CALIBRATION = 60_000
QUICK_CALIBRATION = 3_072
FITTED_QUICKLY = "fitted for bench --quick"


def chosen_windows(
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


def ensure_profiles(load: Callable[[], Any], chosen: list[Any], geometry: Any, *, quiet: bool) -> None:
    """Make the profiles that recipes need and this machine lacks, as `kvcellar calibrate` does by default.

    `load` gives the `MeasuredModel`, which is asked for only if there is something to make.
    """
    from ...calibrate import find_fitted, fit_profile, fitted_stages

    needing = [recipe for recipe in chosen if fitted_stages(recipe)]
    if not needing:
        return
    local = load()
    lacking = [recipe for recipe in needing if find_fitted(recipe, local.identity, geometry) is None]
    if not lacking:
        return
    calibration = _calibration(local, CALIBRATION, quiet=quiet)
    for recipe in lacking:
        if find_fitted(recipe, local.identity, geometry) is None:  # recipes may share one
            fit_profile(recipe, calibration).save()


def quick_profiles(load: Callable[[], Any], chosen: list[Any], geometry: Any, *, quiet: bool) -> dict[str, Any]:
    """The profiles of the recipes that need one, by recipe name, those that are lacking fitted on little text.

    Such a profile says so: it is kept for the next quick bench under `FITTED_QUICKLY`, and not as fitted for the
    recipe, so neither `save` nor any other bench takes it for what `kvcellar calibrate` makes.
    """
    from ...calibrate import find_fitted, fingerprint_of_fit, fit_profile, fitted_stages
    from ...profile import Profile

    needing = [recipe for recipe in chosen if fitted_stages(recipe)]
    if not needing:
        return {}
    local = load()
    found = {recipe.name: find_fitted(recipe, local.identity, geometry) for recipe in needing}
    lacking = [recipe for recipe in needing if found[recipe.name] is None]
    calibration = None
    for recipe in lacking:
        fitted = fingerprint_of_fit(recipe)
        found[recipe.name] = _fitted_quickly(fitted, local.identity, geometry)
        if found[recipe.name] is None:  # recipes may share one
            if calibration is None:
                calibration = _calibration(local, QUICK_CALIBRATION, quiet=quiet)
            made = fit_profile(recipe, calibration)
            quick = Profile(made.tensors, {**made.metadata, "fitted": None, FITTED_QUICKLY: fitted})
            quick.save()
            found[recipe.name] = quick
    if lacking and not quiet:
        names = ", ".join(recipe.name for recipe in lacking)
        click.echo(
            f"{names}: no profile here, so one from {QUICK_CALIBRATION:,} tokens serves this quick look alone; "
            f"`kvcellar calibrate` makes one from {CALIBRATION:,}, which divergence and bytes are better with",
            err=True,
        )
    return found


def _fitted_quickly(fitted: dict[str, Any], identity: Any, geometry: Any) -> Any:
    """What an earlier quick bench left for these stages and this model; None when it left nothing."""
    from ...profile import Profile, all_profiles
    from ...recipe import canonical_json

    wanted = canonical_json([fitted, {"kind": identity.kind, "digest": identity.digest}, geometry.to_json()])
    for path, metadata in all_profiles():
        if canonical_json([metadata.get(key) for key in (FITTED_QUICKLY, "model", "geometry")]) == wanted:
            return Profile.unpack(path.read_bytes())
    return None


def _calibration(local: Any, tokens: int, *, quiet: bool) -> Any:
    from ..calibration import WINDOW, calibration_documents, collect, cut

    cuts = cut(calibration_documents([]), partial(local.encode, continues=True), tokens, WINDOW)
    return collect(local, cuts, partial(progress, quiet=quiet))


def tasks_from_files(local: Any, longbench: str | None, ruler: str | None, *, quiet: bool) -> list[Any]:
    """Tasks of the files given, but those that need more positions than the model has, whose number is told."""
    from ...evaluate import tasks_files

    found = tasks_files.longbench_v2(longbench) if longbench else []
    found += tasks_files.ruler(ruler) if ruler else []
    fitting = [task for task in found if local.max_tokens is None or _longest(local, task) <= local.max_tokens]
    if found and not fitting:
        raise InvalidInput(f"none of the {len(found)} tasks fits the {local.max_tokens:,} positions of the model")
    if len(fitting) < len(found) and not quiet:
        left = len(found) - len(fitting)
        click.echo(f"{left} of {len(found)} tasks need more than {local.max_tokens:,} positions: left out", err=True)
    return fitting


def _longest(local: Any, task: Any) -> int:
    """Tokens of a task with the longest of its candidates."""
    parts = [task.context, task.question, max((task.answer, *task.distractors), key=len)]
    return sum(len(local.encode(part, continues=True)) + 1 for part in parts)


def write(out: Path, local: Any, sources: dict[str, str], windows: list[Any], results: dict[str, Any]) -> None:
    """Results with all that made them, as JSON."""
    from ...evaluate.machine import machine

    made_from = {
        "machine": machine(),
        "model": local.identity.to_json(),
        "texts": sources,
        "windows": [{"id": w.id, "article": w.article, "kind": w.kind, "prefix": w.prefix} for w in windows],
        **results,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(made_from, indent=1) + "\n")
