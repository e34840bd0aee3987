"""A bench of reducers as a table and as a plot: kept fraction against divergence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import MissingExtra

_PEERS = "s^vD<>PX"


def show(result: Mapping[str, Any]) -> None:
    """Print the rows, then how methods compare."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(Console().width, 170))
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    columns = (
        "method",
        "text",
        "kept\n%",
        "slots",
        "freed\n%",
        "KL nats\n[95 %]",
        "draws",
        "Δppl %\n[95 %]",
        "RCB",
        "top-1\n%",
    )
    for name in (*columns, "reduce\ns", "reduce\n÷ prefill"):
        table.add_column(name, justify="left" if name in ("method", "text") else "right", no_wrap=True)
    for row in result["rows"]:
        draws = row.get("kl_by_seed") or []
        table.add_row(
            str(row.get("method") or row["recipe"]),
            row["text"],
            _number(row["kept"], ".1f", 100),
            _number(row.get("slots"), ","),
            _number(row.get("freed"), ".1f", 100),
            _interval(row["kl"], row["kl_ci"], ".3g"),
            f"{min(draws):.3g}…{max(draws):.3g}" if len(draws) > 1 else "",
            _interval(row["dppl"], row["dppl_ci"], ".1f", 100),
            _number(row["rcb"], ".2f"),
            _number(row["top1"], ".1f", 100),
            _number(row.get("reduce_s"), ".1f"),
            _number(row.get("reduce_to_prefill"), ".2f"),
        )
    console.print(table)
    for each in result["comparisons"]:
        ratio = each["ratio"]
        text = _interval(ratio["value"], ratio["ci"], ".2f").replace("\n", " ")
        console.print(f"KL of {each['method']} ÷ {each['than']} at {each['keep']:.0%}: {text}")
    for row in result.get("tasks") or []:
        console.print(
            f"{row['recipe']}, {row['text']}: margin kept {_number(row['margin'], '.2f')} over {row['margin_tasks']} "
            f"of {row['windows']} tasks, exact {row['exact_match']:.2f} (uncompressed {row['exact_match_full']:.2f})"
        )


def _number(value: float | None, form: str, scale: float = 1) -> str:
    return "–" if value is None else f"{scale * value:{form}}"


def _interval(value: float | None, interval: Sequence[float] | None, form: str, scale: float = 1) -> str:
    if value is None or interval is None:
        return _number(value, form, scale)
    return f"{scale * value:{form}}\n[{scale * interval[0]:{form}}, {scale * interval[1]:{form}}]"


def draw(result: Mapping[str, Any], path: str) -> None:
    """Write the plot to `path`, PNG or SVG by its ending. Raises MissingExtra without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtra("plots need the extra: pip install 'kvcellar[bench]'") from error
    rows = _whole(result["rows"])
    figure, axes = pyplot.subplots(figsize=(8.5, 5.5), layout="constrained")
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["kept"] and row["kl"]:
            lines.setdefault(row.get("method") or row["recipe"].rpartition("-")[0] or row["recipe"], []).append(row)
    for number, (name, group) in enumerate(lines.items()):
        group = sorted(group, key=lambda row: row["kept"])
        if name.startswith("floor"):
            axes.axhline(group[0]["kl"], color="0.6", linestyle=":", label=f"∅: KL {group[0]['kl']:.2g}")
            continue
        kl = [row["kl"] for row in group]
        ends = [row["kl_ci"] or (row["kl"], row["kl"]) for row in group]
        spread = [
            [max(0.0, k - low) for k, (low, _) in zip(kl, ends, strict=True)],
            [max(0.0, high - k) for k, (_, high) in zip(kl, ends, strict=True)],
        ]
        peer = name.startswith("peer:")
        style: dict[str, Any] = {"marker": _PEERS[number % len(_PEERS)] if peer else "o", "capsize": 3}
        style["linestyle"] = "--" if peer else "-"
        axes.errorbar([row["kept"] for row in group], kl, yerr=spread, label=name, color=f"C{number % 10}", **style)
    axes.set(yscale="log", xlabel="share of slots kept", ylabel="KL, nats per token")
    axes.set_title("fewer tokens, all texts; lower left is better")
    axes.grid(alpha=0.3, which="both")
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def _whole(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One row of each name: that over all texts, or the only one."""
    names = [row["recipe"] for row in rows]
    return [row for row in rows if row["text"] == "all" or names.count(row["recipe"]) == 1]
