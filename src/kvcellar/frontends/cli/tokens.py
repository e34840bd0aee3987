"""What several commands do with token logs: naming the recipe, describing, and replaying with progress."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...errors import InvalidInput
from ...recipe import TOKEN_LOG, Recipe, tokens_recipe
from ..tokeninfo import streams_of
from .common import facts, human_bytes, progress

if TYPE_CHECKING:
    from ...archive.info import ArchiveInfo
    from ...language.tokenlog import TokenLog
    from .models import LocalModel


def is_tokens(recipe: Recipe) -> bool:
    return recipe.symbols.get("id") == TOKEN_LOG


def log_recipe(recipe: Recipe | None, *, model_coded: bool, keep_ids: bool) -> Recipe | None:
    """`recipe`, and for `tokens` the options and the steps in which commands prefill. Raises InvalidInput."""
    from .models import CHUNK

    if recipe is None or not is_tokens(recipe):
        if model_coded or keep_ids:
            raise InvalidInput("--model-coded and --keep-ids go with --recipe tokens")
        return recipe
    if keep_ids and not model_coded:
        raise InvalidInput("--keep-ids goes with --model-coded: otherwise the ids need no model anyway")
    model_coded = model_coded or bool(recipe.symbols.get("model_coded"))
    return tokens_recipe(model_coded=model_coded, keep_ids=keep_ids or not model_coded, chunk=CHUNK)


def log_summary(log: TokenLog, info: ArchiveInfo) -> list[str]:
    """The lines a person reads about a token log."""
    streams = ", ".join(f"{size:,} B {name}" for name, size in streams_of(log).items())
    runs = len(log.segments)
    rows = {
        "archive": info.path,
        "format": info.format,
        "recipe": f"{info.recipe}: the cache is not stored, a restore runs the model over the ids",
        "model": str(log.identity),
        "tokens": f"{info.tokens:,}",
        "ids": streams + (f"; runtime {log.runtime.hex()}" if log.coded is not None else ""),
        "checks": f"{len(log.sums)} of {log.block:,} tokens each; read in {runs} {'run' if runs == 1 else 'runs'}",
        "file": f"{info.file_bytes:,} B = {8 * info.bytes_per_token:.2f} bits/token",
        "raw cache": f"{human_bytes(info.raw_bytes)} = {info.raw_bytes_per_token:,} B/token",
        "ratio": f"{info.ratio_raw:,.0f} x raw, {info.ratio_16bit:,.0f} x 16-bit",
    }
    if info.namespace:
        rows["namespace"] = info.namespace
    return facts(rows)


def restored_with_progress(archive: Any, *, quiet: bool, **request: Any) -> Any:
    """`archive.restore(…)`; of a token log with a bar, and with what the replay is like on stderr."""
    if not is_tokens(archive.manifest.recipe):
        return archive.restore(**request)
    done = 0
    with progress(f"replay {len(archive):,} tokens", len(archive), quiet=quiet) as advance:

        def move(now: int, total: int) -> None:
            nonlocal done
            advance(now - done)
            done = now

        restored = archive.restore(**request, progress=move)
    found = restored.replay
    if not quiet:
        near = (
            "bit by bit the cache that was saved" if found.exact else f"about {found.distance:.1e} from what was saved"
        )
        click.echo(f"replayed: {near}", err=True)
    return restored


def stored_ids(archive: Any, *, quiet: bool) -> list[int]:
    """All token ids; of a log coded under the model alone by replaying it."""
    if is_tokens(archive.manifest.recipe) and not archive.readable:
        restored_with_progress(archive, quiet=quiet)
    ids: list[int] = archive.tokens.tolist()
    return ids


@contextmanager
def replayed_archive(archive: Any, local: LocalModel, folder: Path, *, quiet: bool) -> Iterator[Any]:
    """What a token log stands for as an exact archive in a folder of its own in `folder`, gone afterwards."""
    from ..library import open as open_archive
    from ..library import save

    restored = restored_with_progress(archive, quiet=quiet, model=local.model)
    who, namespace = local.identity, archive.manifest.namespace  # of the log's own identity half is not known
    with tempfile.TemporaryDirectory(dir=folder, prefix=".kvcellar-replay-") as made:
        path = Path(made) / "replay.kvc"
        save(path, restored.cache, tokens=archive.tokens, identity=who, namespace=namespace)
        with open_archive(path, identity=who, namespace=namespace) as exact:
            yield exact
