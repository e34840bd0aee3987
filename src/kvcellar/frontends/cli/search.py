"""`kvcellar search`: where a phrase stands in an archive, from the token ids in its blocks' heads alone."""

from __future__ import annotations

import time
from typing import Any

import click

from ...archive.reader import ArchiveReader
from ...errors import ArchiveNotFound, InvalidInput, MissingExtra
from ...language.tokenlog import TokenLog
from ...store.local import LocalStore
from ..tokeninfo import is_log
from .common import emit, json_option, model_option, namespace_option
from .find import _numbers


@click.command("search")
@click.argument("file", type=click.Path(dir_okay=False))
@click.argument("phrase", required=False)
@click.option("--tokens", "--ids", "given", help="Instead of PHRASE: token ids, separated by commas or spaces.")
@click.option("--fuzzy", "at_least", metavar="M", type=click.IntRange(1), help="At least M tokens agree. Default: all.")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1), help="Print at most so many hits.")
@click.option("--context", default=8, show_default=True, type=click.IntRange(0), help="Tokens shown on both sides.")
@model_option
@namespace_option
@json_option
def command(
    file: str,
    phrase: str | None,
    given: str | None,
    at_least: int | None,
    limit: int,
    context: int,
    model_dir: str | None,
    namespace: str,
    as_json: bool,
) -> None:
    """Find PHRASE in the archive FILE, without unpacking the cache or running the model.

    Prints for each hit its first and last token, its score (1 is a perfect match, larger is better), and the text
    around it. Exit code 3 when there is none.

    A phrase has other tokens at the beginning of a text than after a space or a line break; all three readings are
    looked for and the hits merged. Only whole tokens are found: "cell" not in "cellar" where that is one token.
    With --fuzzy, hits are sorted by score, and of those that overlap only the best is shown; M is at most the number
    of tokens of the phrase, which the first line prints. With --tokens no tokenizer is needed; with --model the ids
    are still shown as text.

    \b
    Examples:
      kvcellar search out.kvc "garbage collection"
      kvcellar search out.kvc "the garbage collector runs" --fuzzy 3
      kvcellar search out.kvc --tokens 15496,11,995 --json
    """
    if (phrase is None) == (given is None):
        raise InvalidInput("give PHRASE or --tokens, one of them")
    store, name = LocalStore.at(file)
    with store.open_reader(name) as handle:
        log = TokenLog.read(handle, namespace) if is_log(handle) else None
        reader = ArchiveReader(handle, namespace) if log is None else None
        identity = log.identity if reader is None else reader.manifest.identity  # type: ignore[union-attr]
        stored = log.token_ids() if reader is None else reader.token_ids()  # type: ignore[union-attr]
        tokenizer: Any = _tokenizer(model_dir, identity) if phrase is not None or model_dir else None
        from ..search import readings, search

        asked = (phrase or "") if given is None else _numbers(given)
        lengths = {len(asked)} if given is not None else {len(ids) for ids in readings(phrase or "", tokenizer)}
        started = time.perf_counter()
        mode: Any = "fuzzy" if at_least else "exact"
        hits = search(
            file if reader is None else reader,
            asked,
            namespace=namespace,
            tokenizer=tokenizer,
            mode=mode,
            at_least=at_least,
        )
        seconds = time.perf_counter() - started
    shown = [_shown(hit, stored, context, tokenizer) for hit in hits[:limit]]
    result = {
        "archive": file,
        "phrase": phrase,
        "phrase_tokens": sorted(lengths),
        "tokens": len(stored),
        "found": len(hits),
        "hits": shown,
        "search_s": seconds,
    }
    emit(result, _lines(result), as_json=as_json)
    if not hits:
        raise SystemExit(ArchiveNotFound.exit_code)


def _tokenizer(model_dir: str | None, identity: Any) -> Any:
    """The tokenizer in the model's folder, without the model. Raises InvalidInput, MissingExtra."""
    from .models import folder_of

    folder = model_dir or folder_of(identity)
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtra("reading text needs the extra: pip install 'kvcellar[hf]'; or give --tokens") from error
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{folder} has no tokenizer: {str(error).splitlines()[0]}") from error


def _shown(hit: Any, stored: Any, context: int, tokenizer: Any) -> dict[str, Any]:
    """A hit as JSON: where, how well, its ids, and the ids and texts of and around it."""
    sides = {
        "before": stored[max(0, hit.start - context) : hit.start].tolist(),
        "match": list(hit.tokens),
        "after": stored[hit.stop : hit.stop + context].tolist(),
    }
    texts = None if tokenizer is None else {name: tokenizer.decode(ids) for name, ids in sides.items()}
    return {"start": hit.start, "stop": hit.stop, "score": hit.score, "token_ids": sides, "text": texts}


def _lines(result: dict[str, Any]) -> list[str]:
    lengths = " or ".join(map(str, result["phrase_tokens"]))
    found, ms = result["found"], 1000 * result["search_s"]
    hits, tokens = "hit" + "s" * (found != 1), "token" + "s" * (lengths != "1")
    head = f"{found:,} {hits} of {lengths} {tokens} in {result['tokens']:,} ({ms:.2f} ms)"
    more = found - len(result["hits"])
    return [head, *(_line(hit) for hit in result["hits"]), *([f"… and {more:,} more; --limit shows them"] * (more > 0))]


def _line(hit: dict[str, Any]) -> str:
    sides = hit["text"] or {name: " ".join(map(str, ids)) for name, ids in hit["token_ids"].items()}
    before, match, after = (_printable(sides[name]) for name in ("before", "match", "after"))
    gap = "" if hit["text"] else " "
    where = f"{hit['start']}–{hit['stop'] - 1}" if hit["stop"] - hit["start"] > 1 else str(hit["start"])
    return f"{where:>15}  {hit['score']:.2f}  {before}{gap}«{match}»{gap}{after}"


def _printable(text: str) -> str:
    """`text` on one line, and nothing in it that a terminal would obey."""
    return "".join(c if c.isprintable() else {"\n": "↵", "\t": " "}.get(c, "�") for c in text)
