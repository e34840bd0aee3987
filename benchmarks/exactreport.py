"""What the exact benchmark claims, and its tables: every figure stands beside the ceiling it could reach."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from common import claims_table

RESTORE_AGAINST_BLOSC2 = 0.7
RESTORE_AGAINST_PREFILL = 10
WIDTH = 160


def claims(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Everything the exact recipe must hold: (claim, whether it holds, its figures)."""
    restore, sizes = result["restore"], result["sizes"]
    memory, part = result["memory"], result["range"]
    ours, theirs = restore["exact"], restore[result["blosc2_fastest"]]
    against_blosc2 = theirs["median_s"] / ours["median_s"]
    fresh = result["restore_fresh_memory"]
    fresh_blosc2 = min(row["median_s"] for name, row in fresh.items() if name in result["blosc2_all"])
    in_fresh_memory = fresh_blosc2 / fresh["exact"]["median_s"]
    fastest = result["prefill"]["fastest_s"]
    against_prefill = fastest / ours["median_s"]
    rows = [
        (
            f"restore at least {RESTORE_AGAINST_BLOSC2}× the decode speed of blosc2",
            against_blosc2 >= RESTORE_AGAINST_BLOSC2,
            f"{against_blosc2:.2f}× ({ours['mb_per_s']:,.0f} against {theirs['mb_per_s']:,.0f} MB/s; "
            f"fastest of each {theirs['min_s'] / ours['min_s']:.2f}×, in fresh memory {in_fresh_memory:.2f}×)",
        ),
        (
            "smaller than zstd-3 and blosc2",
            sizes["exact"] < min(sizes["zstd-3"], sizes["blosc2"]),
            f"{sizes['exact']:,} B against {sizes['zstd-3']:,} and {sizes['blosc2']:,}",
        ),
        (
            f"restore at least {RESTORE_AGAINST_PREFILL}× as fast as the fastest prefill",
            against_prefill >= RESTORE_AGAINST_PREFILL,
            f"{against_prefill:.0f}× ({ours['median_s'] * 1e3:.1f} ms against {fastest * 1e3:.0f} ms)",
        ),
        *(
            (
                f"peak extra memory of {what} within two layers or two blocks",
                memory[f"{what}_extra"] <= memory["limit"],
                f"{memory[f'{what}_extra'] / 1e6:.1f} MB, limit {memory['limit'] / 1e6:.1f} MB",
            )
            for what in ("save", "restore")
        ),
        (
            "a range reads only its part",
            part["other_parts_read"] == 0 and part["part_read"] == part["part"],
            f"{part['part_read']:,} B of a part of {part['part']:,}, {part['other_parts_read']} of others",
        ),
    ]
    return [{"claim": claim, "holds": bool(holds), "figures": figures} for claim, holds, figures in rows]


def show(result: dict[str, Any]) -> None:
    """Tables on standard output."""
    console = Console(width=WIDTH)
    where, cache = result["machine"], result["cache"]
    console.print(
        f"{result['prefill']['identity']['model']}; {cache['tokens']:,} tokens, {cache['raw_bytes'] / 1e6:.1f} MB of "
        f"bfloat16\n{where['cpu']}, {where['cores']} cores; torch {where['torch']}, blosc2 {where['blosc2']}; "
        f"commit {where['commit']}, {where['date']}; load {where['load'][0]:.1f} → {where['load'][1]:.1f}; "
        f"{result['noisy_rounds']} noisy rounds of restore"
    )
    for table in (_speed(result), _sizes(result), _other(result), claims_table(result)):
        console.print(table)


def _speed(result: dict[str, Any]) -> Table:
    raw, fresh = result["cache"]["raw_bytes"], result["restore_fresh_memory"]
    ceiling = result["restore"]["clone"]["median_s"]
    columns = ("median ms", "fastest ms", "fresh memory ms", "MB/s", "of clone")
    table = _table("Speed, of raw cache bytes; `clone` (memcpy into memory of its own) is the ceiling", "", *columns)
    rows = {
        "prefill bfloat16": result["prefill"]["bfloat16"],
        "prefill float32": result["prefill"]["float32"],
        "save": result["save"],
        **result["restore"],
    }
    for name, row in rows.items():
        label = f"{name} ← compared" if name == result["blosc2_fastest"] else name
        middle = row["median_s"]
        in_fresh = f"{fresh[name]['median_s'] * 1e3:,.1f}" if name in fresh else ""
        speed = (f"{raw / middle / 1e6:,.0f}", f"{ceiling / middle:.1%}")
        table.add_row(label, f"{middle * 1e3:,.1f}", f"{row['min_s'] * 1e3:,.1f}", in_fresh, *speed)
    first = result["first_restore"]["first_s"]
    speed = (f"{raw / first / 1e6:,.0f}", f"{ceiling / first:.1%}")
    table.add_row("exact, first of a fresh process", f"{first * 1e3:,.1f}", "", "", *speed)
    return table


def _sizes(result: dict[str, Any]) -> Table:
    table = _table("Size", "", "bytes", "bytes/token", "of 16 bit")
    sizes, tokens = result["sizes"], result["cache"]["tokens"]
    for name, size in sizes.items():
        table.add_row(name, f"{size:,}", f"{size / tokens:,.0f}", f"{sizes['raw'] / size:.3f}×")
    return table


def _other(result: dict[str, Any]) -> Table:
    table = _table("Memory, range, identity, imports", "", "figure", "beside it")
    memory, part, who = result["memory"], result["range"], result["prefill"]["identity"]
    sizes = f"layer {memory['layer'] / 1e6:.1f}, block {memory['block'] / 1e6:.1f}"
    limit = f"limit {memory['limit'] / 1e6:.1f} MB ({sizes})"
    table.add_row("peak extra memory, save", f"{memory['save_extra'] / 1e6:.1f} MB", limit)
    table.add_row("peak extra memory, restore", f"{memory['restore_extra'] / 1e6:.1f} MB", limit)
    beside = f"part {part['part']:,} B + head {part['heads']:,} B; file {part['file']:,} B"
    table.add_row(f"read of {part['tokens']} tokens of a layer", f"{part['reading']:,} B", beside)
    table.add_row("open", f"{part['opening']:,} B", "read")
    again = f"{who['again_s'] * 1e3:.0f} ms when the model is known"
    table.add_row("model= instead of identity=, first", f"{who['first_s'] * 1e3:.0f} ms", again)
    first = result["first_restore"]
    beside = f"transformers {first['import_transformers_s'] * 1e3:,.0f} ms"
    table.add_row("first use of save or open: imports", f"{first['import_kvcellar_s'] * 1e3:,.0f} ms", beside)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table
