"""`kvcellar find`: which archive of a folder saves most of a prompt's prefill."""

from __future__ import annotations

import math
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...errors import ArchiveNotFound, InvalidInput
from ...identity import Identity
from .common import emit, facts, json_option, namespace_option

if TYPE_CHECKING:
    from ..sessions import Nearest


@click.command("find")
@click.argument("folder", type=click.Path())
@click.argument("words", metavar="[TEXT]...", nargs=-1)
@click.option(
    "--model",
    "model_dir",
    type=click.Path(exists=True, file_okay=False),
    help="Folder of the transformers model: its tokenizer reads the text, its archives are looked at.",
)
@click.option("--identity", help="Instead of a model: the name under which the archives were saved. Needs --ids.")
@click.option("--text", type=click.Path(allow_dash=True), help="UTF-8 text file with the prompt, or - for stdin.")
@click.option("--ids", help="The prompt as token ids, separated by commas or spaces, or - for stdin.")
@click.option(
    "--nearest",
    is_flag=True,
    help="Also say how near that session is: bits of the cell both share, as distance and as printed in the paper.",
)
@namespace_option
@json_option
def command(
    folder: str,
    words: tuple[str, ...],
    model_dir: str | None,
    identity: str | None,
    text: str | None,
    ids: str | None,
    nearest: bool,
    namespace: str,
    as_json: bool,
) -> None:
    """Find the archive in FOLDER that shares the longest prefix with a prompt.

    The prompt is TEXT, a text file, or token ids. Prints the archive, how many tokens match, and where and why the
    match ends; with --nearest also how deep in the language both stand. Exit code 3 when no archive shares even the
    first token.

    \b
    Examples:
      kvcellar find chats/ --model DIR --text prompt.txt
      kvcellar find chats/ --identity my-model --ids 15496,11,995
    """
    if (model_dir is None) == (identity is None):
        raise InvalidInput("give --model DIR or --identity NAME, one of them: archives of other models do not count")
    if sum((bool(words), text is not None, ids is not None)) != 1:
        raise InvalidInput("give the prompt once: as TEXT, with --text FILE, or with --ids")
    if ids is None and model_dir is None:
        raise InvalidInput("text needs --model DIR for its tokenizer; with --identity give --ids")
    who, prompt = _asked(model_dir, identity, " ".join(words) if words else None, text, ids, quiet=as_json)
    from ..sessions import Sessions

    started = time.perf_counter()
    sessions = Sessions(folder, identity=who, namespace=namespace)
    found, passed_over = sessions.search(prompt)
    near = sessions.nearest(prompt, found) if nearest else None
    seconds = time.perf_counter() - started
    if not as_json:
        for remark in passed_over:
            click.echo(remark, err=True)
    result = {
        "archive": found.path,
        "matched": found.matched,
        "reason": found.reason,
        "prompt_tokens": len(prompt),
        "identity": who.to_json(),
        "passed_over": passed_over,
        "find_s": seconds,
    }
    rows = {
        "archive": found.path or "none",
        "matched": f"{found.matched:,} of {len(prompt):,} tokens",
        "ends at": found.reason,
    }
    if nearest:
        result["nearest"] = None if near is None else _as_json(near)
        rows |= {"nearest": "none"} if near is None else _rows(near)
    emit(result, facts(rows), as_json=as_json)
    if found.path is None:
        raise SystemExit(ArchiveNotFound.exit_code)


def _as_json(near: Nearest) -> dict[str, Any]:
    """What is not known or not finite is null."""
    kin = near.kinship
    figures = {
        "cell_depth_bits": kin.cell.depth,
        "cell_depth_at_least_bits": kin.cell.at_least,
        "d_t_as_printed_bits": kin.printed,
        "ultrametric": kin.ultrametric,
        "log2_ultrametric": kin.log2_ultrametric,
    }
    return {
        "archive": near.path,
        "common_tokens": near.matched,
        "session_tokens": near.tokens,
        "same": kin.same,
        "unknown_tokens": kin.cell.unknown,
        **{name: value if math.isfinite(value) else None for name, value in figures.items()},
    }


def _rows(near: Nearest) -> dict[str, str]:
    kin, cell = near.kinship, near.kinship.cell
    if cell.unknown:
        depth = f"not known: {cell.unknown:,} of {cell.tokens:,} tokens have no probability"
        depth, printed, distance = f"{depth}; at least {cell.at_least:,.1f} bits", "not known", "not known"
    else:
        depth = f"{cell.depth:,.1f} bits"
        printed, distance = f"{depth}; the larger the closer, so no distance", f"2^−{cell.depth:,.1f}, an ultrametric"
    return {
        "nearest": f"{near.path}, {near.matched:,} of its {near.tokens:,} tokens common",
        "cell depth": depth,
        "d_T printed": printed,
        "distance": "0: the same tokens" if kin.same else distance,
    }


def _asked(
    model_dir: str | None, identity: str | None, words: str | None, text: str | None, ids: str | None, *, quiet: bool
) -> tuple[Identity, list[int]]:
    """Whose archives, and the prompt's token ids; at least one. Raises InvalidInput."""
    numbers = None if ids is None else _numbers(sys.stdin.read() if ids == "-" else ids)
    if model_dir is None:
        return Identity.named(identity or ""), numbers or []
    from .models import LocalModel, read_text

    content = read_text(text) if text is not None else words
    if not quiet:
        click.echo(f"loading {Path(model_dir).name} …", err=True)
    local: Any = LocalModel(model_dir)
    return local.identity, numbers or local.encode(content)


def _numbers(ids: str) -> list[int]:
    pieces = re.split(r"[\s,]+", ids.strip(" \t\r\n,[]"))
    if not all(re.fullmatch(r"[0-9]{1,10}", piece) for piece in pieces):
        raise InvalidInput(f"--ids {ids[:80]!r}; expected token ids like 15496,11,995")
    return [int(piece) for piece in pieces]
