"""`kvcellar generate`: from an archive straight to new text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

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
    model_dir: str | None,
    namespace: str,
    as_json: bool,
) -> None:
    """Go on generating from the archive FILE, without a prefill of what it holds.

    The text goes to stdout; what was restored, and how fast, to stderr.
    """
    with opened(file, model_dir, namespace, mode="a" if keep else "r", quiet=as_json) as (archive, local):
        stored = archive.tokens.tolist()
        ids = stored + (local.encode(prompt, continues=True) if prompt else [])
        local.require_room(len(ids) + max_new_tokens)
        started = time.perf_counter()
        restored = archive.restore(prompt=ids)
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


class opened:  # noqa: N801 (used like a function)
    """An archive and its model, as a context: `with opened(…) as (archive, model)`."""

    def __init__(self, file: str, model_dir: str | None, namespace: str, mode: str, *, quiet: bool = True):
        from ...archive.reader import ArchiveReader
        from ...store.local import LocalStore

        store, name = LocalStore.at(file)
        with ArchiveReader(store.open_reader(name), namespace) as reader:  # fails before a model is loaded
            identity = reader.manifest.identity
        from .models import LocalModel, folder_of

        folder = model_dir or folder_of(identity)
        if not quiet:
            click.echo(f"loading {Path(folder).name} …", err=True)
        self.local = LocalModel(folder)
        self.file, self.namespace, self.mode = file, namespace, mode

    def __enter__(self) -> tuple[Any, Any]:
        from ..library import open as open_archive

        self.archive = open_archive(self.file, identity=self.local.identity, namespace=self.namespace, mode=self.mode)
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
