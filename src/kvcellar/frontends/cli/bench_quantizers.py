"""`kvcellar bench quantizers`: the study of vector quantizers and map codes."""

from __future__ import annotations

import json
from pathlib import Path

import click

from .bench_setup import CONTINUATION, SHORT, chosen_windows, data_option, ensure_profiles, write
from .common import json_option, out_option


@click.command("quantizers")
@click.option("--model", "model_dir", type=click.Path(exists=True, file_okay=False), help="Default: the demo model.")
@click.option(
    "--text", "texts", multiple=True, type=click.Path(exists=True, dir_okay=False), help="Your own test text."
)
@click.option("--windows", "count", default=8, show_default=True, type=click.IntRange(1), help="How many windows.")
@click.option("--prefix", default=SHORT, show_default=True, type=click.IntRange(64), help="Tokens to keep, per window.")
@click.option(
    "--continuation", default=CONTINUATION, show_default=True, type=click.IntRange(2), help="Tokens to score."
)
@data_option
@out_option
@json_option
def command(
    model_dir: str | None,
    texts: tuple[str, ...],
    count: int,
    prefix: int,
    continuation: int,
    data: str,
    out: str | None,
    as_json: bool,
) -> None:
    """Compare vector quantizers: codebooks pooled over heads or one per head, one stage or several, keys and values,
    stages that are equal for all heads or split between them by what their errors cost.

    For each: bytes a coarse token takes under every map code, KL, perplexity over the continuation and over its second
    half, and the context's benefit kept, beside what was published for GPT-2. Differences have 95 % intervals over
    documents. Codebooks are fitted on first use, as by `kvcellar calibrate`, and kept.
    """
    from ..bench.run import Bench
    from ..bench.study import show, study
    from .demo_model import demo_model
    from .models import MeasuredModel

    local = MeasuredModel(model_dir or demo_model(quiet=as_json))
    local.require_room(prefix + continuation)
    windows, sources, documents = chosen_windows(local, texts, Path(data), prefix, continuation, count, quiet=as_json)
    bench = Bench(local, windows, quiet=as_json, texts=documents)
    bench.prepare()
    result = study(
        bench, lambda recipes: ensure_profiles(lambda: local, list(recipes), bench.geometry(), quiet=as_json)
    )
    if out:
        write(Path(out), local, sources, windows, {"benchmark": "quantizers", **result})
    if as_json:
        click.echo(json.dumps(result))
    else:
        show(result)
