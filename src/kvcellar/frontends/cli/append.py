"""`kvcellar append`: more text behind a saved one."""

from __future__ import annotations

import time

import click

from .common import emit, json_option, model_option, namespace_option
from .generate import opened
from .info import summary
from .tokens import restored_with_progress, stored_ids


@click.command("append")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--text", required=True, type=click.Path(allow_dash=True), help="UTF-8 text file, or - for stdin.")
@model_option
@namespace_option
@json_option
def command(file: str, text: str, model_dir: str | None, namespace: str, as_json: bool) -> None:
    """Add the text to the archive FILE: restore its cache, run the model over the new text only, keep the rest.

    The old state stays readable until the new one is complete. One writer at a time.
    """
    from .models import read_text

    content = read_text(text)
    with opened(file, model_dir, namespace, mode="a", quiet=as_json) as (archive, local):
        stored = stored_ids(archive, quiet=as_json)
        new = local.encode(content, continues=True)
        local.require_room(len(stored) + len(new))
        cache = restored_with_progress(archive, quiet=as_json).cache
        started = time.perf_counter()
        local.prefill(new, cache, quiet=as_json)
        prefilled = time.perf_counter()
        info = archive.append(cache, stored + new)
        appended = time.perf_counter()
    timing = {"new_tokens": len(new), "prefill_s": prefilled - started, "append_s": appended - prefilled}
    took = (
        f"took       prefill of {len(new):,} new tokens {timing['prefill_s']:.2f} s, append {timing['append_s']:.2f} s"
    )
    emit({**info.to_json(), **timing}, [*summary(info), took], as_json=as_json)
