"""What the benchmark of a million tokens claims, and its table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from common import claims_table

OPEN_S, READ_S = 0.05, 0.002
FLAT = 1.5
GROWTH = 32 << 20
WIDTH = 120


def claims(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Everything an archive of a million tokens must hold: (claim, whether it holds, its figures)."""
    build, opening, reading = result["build"], result["open"], result["read_one_token"]
    rows = [
        ("a million tokens", result["size"]["tokens"] >= 1_000_000, f"{result['size']['tokens']:,} tokens"),
        (
            f"open within {OPEN_S * 1e3:.0f} ms, with the longest chain of commits to walk",
            opening["median_s"] <= OPEN_S,
            f"{opening['median_s'] * 1e3:.1f} ms with {opening['commits_walked']} commits; "
            f"{result['open_compact']['median_s'] * 1e3:.1f} ms after compact",
        ),
        (
            f"one token of one layer within {READ_S * 1e3:.0f} ms",
            reading["median_s"] <= READ_S,
            f"median {reading['median_s'] * 1e3:.2f} ms, 95 % within {reading['p95_s'] * 1e3:.2f} ms",
        ),
        *(
            (
                f"appends of {kind}: the last tenth at most {FLAT}× the first",
                row["last_by_first_median_s"] <= FLAT,
                f"{row['last_by_first_median_s']:.2f}× "
                f"({row['median_s'][0] * 1e3:.1f} → {row['median_s'][-1] * 1e3:.1f} ms; "
                f"CPU {row['last_by_first_cpu_s']:.2f}×)",
            )
            for kind, row in build["kinds"].items()
        ),
        (
            f"memory grows by at most {GROWTH >> 20} MiB from the first tenth to the last",
            build["resident_growth"] <= GROWTH,
            f"{build['resident_growth'] / 1e6:.1f} MB, to {build['resident_bytes'][-1] / 1e6:.0f} MB in all",
        ),
        ("every part is sound", result["sound"], f"checked in {result['verify_s']:.1f} s"),
    ]
    return [{"claim": claim, "holds": bool(holds), "figures": figures} for claim, holds, figures in rows]


def show(result: dict[str, Any]) -> None:
    """Tables on standard output."""
    console = Console(width=WIDTH)
    where, size, build = result["machine"], result["size"], result["build"]
    console.print(
        f"{size['tokens']:,} tokens in {size['blocks']:,} blocks, {build['appends']:,} appends in "
        f"{build['seconds']:.0f} s\n{where['cpu']}, {where['cores']} cores; commit {where['commit']}, {where['date']}; "
        f"load {where['load'][0]:.1f} → {where['load'][1]:.1f}"
    )
    table = Table(title="Figures", title_justify="left")
    for name in ("", "figure", "beside it"):
        table.add_column(name, justify="left" if not name else "right")
    raw = size["raw_bytes"]
    match, whole, rewrites = result["match"], result["whole_sequence_append"], build["rewrites"]
    for name, figure, beside in (
        (
            "file as appended",
            f"{size['file_bytes'] / 1e6:.1f} MB",
            f"raw {raw / 1e6:.1f} MB, of raw {size['file_bytes'] / raw:.2f}",
        ),
        (
            "file after compact",
            f"{result['compact']['file_bytes'] / 1e6:.1f} MB",
            f"of raw {result['compact']['file_bytes'] / raw:.2f}",
        ),
        (
            "compact",
            f"{result['compact']['seconds']:.1f} s",
            f"{rewrites['count']} during the build, {rewrites['seconds']:.1f} s in all",
        ),
        (
            "restore of everything",
            f"{result['restore_all_s'] * 1e3:,.0f} ms",
            f"{raw / result['restore_all_s'] / 1e6:,.0f} MB/s",
        ),
        (
            "find, all tokens match",
            f"{match['whole']['seconds'] * 1e3:,.0f} ms",
            f"half match {match['half']['seconds'] * 1e3:,.0f} ms",
        ),
        (
            "append of 1, whole sequence given",
            f"{whole['median_s'] * 1e3:.1f} ms",
            f"the first {whole['first_s'] * 1e3:,.0f} ms",
        ),
    ):
        table.add_row(name, figure, beside)
    console.print(table)
    console.print(claims_table(result))
