"""`kvcellar generate`: from an archive straight to new text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from ...errors import InvalidInput
from .common import emit, json_option, model_option, namespace_option


@click.command("generate")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--prompt", default="", help="Text that follows the stored one. Default: go on where it ends.")
@click.option("--max-new-tokens", default=64, show_default=True, type=click.IntRange(1), help="How many to generate.")
@click.option(
    "--temperature", default=0.0, show_default=True, type=click.FloatRange(0), help="0 always takes the best."
)
@click.option("--seed", default=0, show_default=True, help="For temperatures above 0.")
@click.option("--append", "keep", is_flag=True, help="Add prompt and answer to the archive afterwards.")
@click.option(
    "--from-search",
    "phrase",
    metavar="PHRASE",
    help="Restore only where PHRASE stands, and the first 4 and last 32 tokens. Needs --prompt.",
)
@click.option(
    "--hits", default=8, show_default=True, type=click.IntRange(1), help="With --from-search: the first so many."
)
@click.option(
    "--context",
    default=64,
    show_default=True,
    type=click.IntRange(0),
    help="With --from-search: tokens around each hit.",
)
@model_option
@namespace_option
@json_option
def command(
    file: str,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    keep: bool,
    phrase: str | None,
    hits: int,
    context: int,
    model_dir: str | None,
    namespace: str,
    as_json: bool,
) -> None:
    """Go on generating from the archive FILE, without a prefill of what it holds.

    The text goes to stdout; what was restored, and how fast, to stderr. With --from-search the model attends to the
    places where a phrase stands, each at its own position, and not to the rest of the archive.

    \b
    Examples:
      kvcellar generate out.kvc --prompt " In short,"
      kvcellar generate out.kvc --from-search "weak reference" --prompt "\\nA weak reference is"
    """
    if phrase is not None and (keep or not prompt):
        raise InvalidInput("--from-search needs --prompt, and leaves no whole cache that --append could keep")
    with opened(file, model_dir, namespace, mode="a" if keep else "r", quiet=as_json) as (archive, local):
        stored = archive.tokens.tolist()
        ids = stored + (local.encode(prompt, continues=True) if prompt else [])
        local.require_room(len(ids) + max_new_tokens)
        started = time.perf_counter()
        if phrase is None:
            restored = archive.restore(prompt=ids)
        else:
            restored = archive.restore(positions=_places(archive, local, phrase, hits, context))
        restore_s = time.perf_counter() - started
        if not as_json:
            click.echo(f"restored {restored.matched:,} of {len(ids):,} tokens in {restore_s:.3f} s", err=True)
        started = time.perf_counter()
        new = generate(local, ids, restored.cache, max_new_tokens, temperature, seed, stream=not as_json)
        generate_s = time.perf_counter() - started
        if keep:
            sequence = ids + new
            archive.append(restored.cache, sequence[: restored.cache.get_seq_length()])
    result = {
        "archive": file,
        "prompt": prompt,
        "text": local.tokenizer.decode(new, skip_special_tokens=True),
        "token_ids": new,
        "stored_tokens": len(stored),
        "restored_tokens": restored.matched,
        "restore_s": restore_s,
        "generate_s": generate_s,
        "appended": keep,
    }
    if as_json:
        emit(result, [], as_json=True)


def _places(archive: Any, local: Any, phrase: str, hits: int, context: int) -> list[int]:
    """Token indexes of the first hits of `phrase` and what goes with them. Raises InvalidInput when there is none."""
    from ..search import search, spans_for

    found = search(archive, phrase, tokenizer=local.tokenizer, limit=hits)
    if not found:
        raise InvalidInput(f"{phrase!r} does not stand in {archive.path}; `kvcellar search --fuzzy` finds near misses")
    return [index for span in spans_for(found, len(archive), context=context) for index in span]


class opened:  # noqa: N801 (used like a function)
    """An archive and its model, as a context: `with opened(…) as (archive, model)`."""

    def __init__(self, file: str, model_dir: str | None, namespace: str, mode: str, *, quiet: bool = True):
        from ...archive.reader import ArchiveReader
        from ...store.local import LocalStore

        store, name = LocalStore.at(file)
        with ArchiveReader(store.open_reader(name), namespace) as reader:  # fails before a model is loaded
            identity, geometry = reader.manifest.identity, reader.manifest.geometry
        from .models import LocalModel, folder_of

        folder = model_dir or folder_of(identity)
        if not quiet:
            click.echo(f"loading {Path(folder).name} …", err=True)
        ran_in = next(layer.key.dtype for layer in geometry.layers if layer.key.width)
        self.local = LocalModel(folder, ran_in)
        self.file, self.namespace, self.mode = file, namespace, mode

    def __enter__(self) -> tuple[Any, Any]:
        from ..library import open as open_archive

        self.archive = open_archive(
            self.file,
            identity=self.local.identity,
            namespace=self.namespace,
            mode=self.mode,
            config=self.local.model.config,
            replay_with=self.local.model,
        )
        return self.archive, self.local

    def __exit__(self, *exc: object) -> None:
        self.archive.close()


def generate(
    local: Any, ids: list[int], cache: Any, count: int, temperature: float, seed: int, *, stream: bool
) -> list[int]:
    """`count` new token ids behind `ids`, of which `cache` holds all but the last few; fewer at an end token."""
    import torch
    from transformers import TextStreamer

    torch.manual_seed(seed)
    streamer = TextStreamer(local.tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    tensor = torch.tensor([ids])
    with torch.inference_mode():
        out = local.model.generate(
            tensor,
            attention_mask=torch.ones_like(tensor),
            cache=cache,
            max_new_tokens=count,
            streamer=streamer,
            pad_token_id=local.tokenizer.pad_token_id or local.tokenizer.eos_token_id,
            **sampling,
        )
    new: list[int] = out[0, len(ids) :].tolist()
    return new
