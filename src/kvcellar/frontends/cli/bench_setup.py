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
SHORT, LONG, CONTINUATION = 1024, 7680, 384
CALIBRATION = 60_000


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
    from ..calibration import WINDOW, calibration_documents, collect, cut

    cuts = cut(calibration_documents([]), partial(local.encode, continues=True), CALIBRATION, WINDOW)
    calibration = collect(local, cuts, partial(progress, quiet=quiet))
    for recipe in lacking:
        if find_fitted(recipe, local.identity, geometry) is None:  # recipes may share one
            fit_profile(recipe, calibration).save()


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
