"""`kvcellar measure`: what each head of a model can lose on a text, and what to keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ...errors import InvalidInput
from .common import json_option, out_option, plot_option

TOKENS, CONTINUATION, BUDGET = 1024, 384, 0.25
KEEP = "0.1,0.25,0.5"
METHODS = "random,streaming,matching"


@click.command("measure")
@click.option("--model", "model_dir", type=click.Path(exists=True, file_okay=False), help="Default: the demo model.")
@click.option(
    "--text",
    "text_file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    help="Default: text that comes with Python.",
)
@click.option("--tokens", default=TOKENS, show_default=True, type=click.IntRange(64), help="Tokens of the cache.")
@click.option(
    "--continuation", default=CONTINUATION, show_default=True, type=click.IntRange(1), help="Held-out tokens behind."
)
@click.option("--keep", default=KEEP, show_default=True, help="Fractions kept, comma-separated; they count all tokens.")
@click.option("--methods", default=METHODS, show_default=True, help="Reducers that are measured, comma-separated.")
@click.option("--budget", type=float, help=f"Fraction of all slots to hand out to heads.  [default: {BUDGET}]")
@click.option("--target-error", type=float, help="Instead: the fewest slots that meet this relative error.")
@click.option("--queries", default=256, show_default=True, type=click.IntRange(1), help="Sample queries a query head.")
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(1), help="Draws averaged for random.")
@out_option
@plot_option
@json_option
def command(
    model_dir: str | None,
    text_file: str | None,
    tokens: int,
    continuation: int,
    keep: str,
    methods: str,
    budget: float | None,
    target_error: float | None,
    queries: int,
    seeds: int,
    out: str | None,
    plot: str | None,
    as_json: bool,
) -> None:
    """Measure what each head can lose on a text.

    The first tokens are the cache. What heads lose with fewer tokens is predicted from them alone, and then measured on
    the text's next tokens. Names the heads that cannot be reduced, divides a budget (or meets a target error) and
    recommends a method. Errors are relative: mean square of the error ÷ mean square of what a head reads.
    """
    if budget is not None and target_error is not None:
        raise InvalidInput("--budget and --target-error: expected one of both")
    fractions = numbers(keep, "--keep")
    budget = BUDGET if budget is None and target_error is None else budget
    if budget is not None and budget not in fractions:
        fractions = sorted({*fractions, budget})
    from ..methods import find_reducer
    from ..risk import Text, risks, slots_for
    from ..riskreport import lines, report
    from .demo_model import demo_model
    from .models import MeasuredModel

    reducers = {name: find_reducer(name) for name in names(methods, "--methods")}
    slots_for(fractions, tokens)  # before the model is loaded
    local = MeasuredModel(model_dir or demo_model(quiet=as_json))
    local.require_room(tokens + continuation)
    ids, name = _text(local, text_file, tokens, continuation)
    text = Text(local, ids, tokens, queries=queries)
    rows = risks(text, fractions, reducers, seeds=seeds, quiet=as_json)
    result: dict[str, Any] = {
        "model": local.identity.to_json(),
        "text": {"name": name, "tokens": tokens, "continuation": len(ids) - tokens},
        "queries": f"{queries} a query head, the text's own, " + ("turned later" if text.later else "as asked last"),
        "seeds": seeds,
        **report(rows, reducers, tokens, budget=budget, target=target_error),
        "heads": rows,
    }
    if out:
        from ...evaluate.machine import machine

        made = {"benchmark": "risk", "machine": machine(), **result}
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(json.dumps(made, indent=1) + "\n")
    if plot:
        from ..riskshow import draw

        draw(result, plot)
    if as_json:
        click.echo(json.dumps(result))
    else:
        from ..riskshow import show

        show(result)
        click.echo("\n".join(lines(result)))


def numbers(given: str, option: str) -> list[float]:
    """Different fractions, comma-separated, the smallest first. Raises InvalidInput."""
    try:
        found = sorted({float(part) for part in given.split(",") if part.strip()})
    except ValueError:
        found = []
    if not found or not all(0 < each < 1 for each in found):
        raise InvalidInput(f"{option} {given!r}; expected fractions over 0 and under 1, comma-separated")
    return found


def names(given: str, option: str) -> list[str]:
    """Different names, comma-separated, in the order given. Raises InvalidInput for none."""
    found = list(dict.fromkeys(part.strip() for part in given.split(",") if part.strip()))
    if not found:
        raise InvalidInput(f"{option} {given!r}; expected at least one name")
    return found


def _text(local: Any, file: str | None, tokens: int, continuation: int) -> tuple[list[int], str]:
    """Ids of the tokens needed, and what the text is called. Raises InvalidInput for a text that is too short."""
    from ...evaluate.texts import standard_library, windows

    wanted = tokens + continuation
    if file is None:
        found = windows(
            standard_library("tune"), lambda text: local.encode(text, continues=True), tokens, continuation, 1
        )
        if not found:
            raise InvalidInput(f"no text that comes with Python reaches {wanted:,} tokens: name one with --text")
        return list(found[0].ids), found[0].article
    from .models import read_text

    ids = local.encode(read_text(file))
    if len(ids) < wanted:
        raise InvalidInput(f"{file}: {len(ids):,} tokens; expected {tokens:,} and {continuation:,} more behind them")
    return ids[:wanted], Path(file).name
