"""`kvcellar find`: which archive of a folder saves most of a prompt's prefill."""

from __future__ import annotations

import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import click

from ...errors import ArchiveNotFound, InvalidInput
from ...identity import Identity
from .common import emit, facts, json_option, namespace_option


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
@namespace_option
@json_option
def command(
    folder: str,
    words: tuple[str, ...],
    model_dir: str | None,
    identity: str | None,
    text: str | None,
    ids: str | None,
    namespace: str,
    as_json: bool,
) -> None:
    """Find the archive in FOLDER that shares the longest prefix with a prompt.

    The prompt is TEXT, a text file, or token ids. Prints the archive, how many tokens match, and where and why the
    match ends. Exit code 3 when no archive shares even the first token.

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
    from ..library import find

    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        found = find(folder, prompt, identity=who, namespace=namespace)
    seconds = time.perf_counter() - started
    passed_over = [str(remark.message) for remark in remarks]
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
    emit(result, facts(rows), as_json=as_json)
    if found.path is None:
        raise SystemExit(ArchiveNotFound.exit_code)


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
