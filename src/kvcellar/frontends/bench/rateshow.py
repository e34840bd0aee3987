"""The rate study as tables for a person, and as one plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...errors import MissingExtra
from .ratepeers import SIZES
from .ratewhere import AGAINST
from .rows import ALL

WIDTH = 140


def show(result: dict[str, Any]) -> None:
    """Print what was studied; a – stands for what has no figure."""
    for part, print_it in (
        ("curve", _curve),
        ("ablation", _ablation),
        ("bits", _bits),
        ("surprisal", _surprisal),
        ("length", _length),
    ):
        if result.get(part):
            print_it(result[part])


def _curve(rows: list[dict[str, Any]]) -> None:
    texts = {row["text"] for row in rows}
    columns = ("at its own KL", "file", "KL", "B/token", "cellar's", "ratio", "payload ratio", "windows", "note")
    lines = []
    for row in rows:
        if row["text"] == ALL or ALL not in texts:
            shared = "–" if row["shared_windows"] is None else f"{row['shared_windows']} of {row['windows']}"
            figures = [row["kl"], row[SIZES[0]], row["ours"][SIZES[0]], *(row["ratio"][size] for size in SIZES)]
            numbers = [_number(x, form) for x, form in zip(figures, (".3g", ",.0f", ",.0f", ".1f", ".1f"), strict=True)]
            lines.append((row["recipe"], row["file"], *numbers, shared, row["why"] or ""))
    _table("bytes ÷ those of cellar's curve at the same KL; windows: how many of them the curve has", columns, lines)


def _ablation(result: dict[str, Any]) -> None:
    points = list(dict.fromkeys(row["point"] for row in result["compared"]))
    by_name: dict[str, dict[str, Any]] = {}
    for row in result["compared"]:
        by_name.setdefault(f"{row['variant']} ({row['what']})", {})[row["point"]] = row
    lines = []
    for name, at in by_name.items():
        lines.append((name, *(_with_interval(at[point]["ratio"], at[point]["ci"]) for point in points)))
    first = next(iter(by_name.values()))
    columns = [f"{p}: KL {first[p]['kl']:.3g}\n{first[p]['whole_bytes']:,.0f} B/token" for p in points]
    windows, tokens = len(result["windows"]), result["calibration_tokens"]
    title = f"bytes ÷ the whole codec's at equal KL [95 %]; {windows} held-out windows, fitted on {tokens:,} tokens"
    _table(title, ("without", *columns), lines)


def _bits(result: dict[str, Any]) -> None:
    lines = []
    for row in result["groups"]:
        first, last = row["layers"]
        keys, values = (sum(side[name] for side in row["sides"]) for name in ("keys", "values"))
        figures = [row["payload"], row["exponents"], row["coefficients"], keys, values, row["rest"]]
        lines.append((f"{first}–{last}", *(f"{figure:.2f}" for figure in figures)))
    columns = ("layers", "payload", "exponents", "coefficients", "of these keys", "values", "rest of the part")
    _table(f"{result['recipe']}: bytes per coarse token by layer group", columns, lines)
    sides = [(s["layer"], s["keys"], s["values"]) for row in result["groups"] for s in row["sides"]]
    lines = [(str(layer), f"{keys:.2f}", f"{values:.2f}") for layer, keys, values in sides]
    _table("coefficients' bytes by layer, shared out by the basis", ("layer", "keys", "values"), lines)
    parts = [(name, f"{size:.2f}") for name, size in result["file"].items() if size]
    _table(f"bytes per token of a file of {result['windows'][0]['prefix']:,} tokens", ("part", "B/token"), parts)


def _surprisal(result: dict[str, Any]) -> None:
    lines = []
    for row in result["groups"]:
        first, last = row["layers"]
        lines.append((f"{first}–{last}", *(_with_interval(row[n]["rho"], row[n]["windows"]) for n in AGAINST)))
    title = f"surprisal: Spearman's ρ over {result['tokens']:,} tokens [least, most of a window]"
    _table(title, ("layers", "residual energy", "times its weight", "bits spent"), lines)
    lines = [
        (f"{row['surprisal']:.2f}", *(f"{x:.2f}" for name in AGAINST for x in row[name])) for row in result["bins"]
    ]
    groups = ["{}–{}".format(*row["layers"]) for row in result["groups"]]
    columns = ("bits of\nsurprisal", *(f"{name}\n{g}" for name in AGAINST for g in groups))
    _table("tenths of the tokens by surprisal: energy, weighted energy and bits spent ÷ their means", columns, lines)


def _length(result: dict[str, Any]) -> None:
    names = list(result["recipes"])
    by_length = list(zip(*result["recipes"].values(), strict=True))
    lines = []
    for rows in by_length:
        figures = [row[name] for row in rows for name in ("file", "payload", "coarse")]
        lines.append((f"{rows[0]['tokens']:,}", *(_number(figure, ",.1f") for figure in figures)))
    columns = ("tokens", *(f"{name}\n{what}" for name in names for what in ("file", "payload", "coarse")))
    _table(f"bytes per token by length of the context, {len(result['windows'])} texts", columns, lines)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def _with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if interval is None else f"{value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"


def _table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console = Console(width=max(Console().width, WIDTH))
    console.print(title, style="italic", highlight=False, markup=False)
    console.print(table, "")


def draw(result: dict[str, Any], points: Sequence[dict[str, Any]], path: str) -> None:
    """Write one figure with a panel for each part that was studied, PNG or SVG by the ending of `path`.

    `points` are the curve's and peers' rows: `file recipe text kl file_bytes_per_token`.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtra("plots need the extra: pip install 'kvcellar[bench]'") from error
    panels = [(part, how) for part, how in _PANELS.items() if result.get(part) or (part == "curve" and points)]
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(10, 5.2 * len(panels)), layout="constrained", squeeze=False)
    for ax, (part, how) in zip(axes[:, 0], panels, strict=True):
        how(ax, points if part == "curve" else result[part])
        ax.grid(alpha=0.3, which="both")
        ax.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_curve(ax: Any, points: Sequence[dict[str, Any]]) -> None:
    runs = list(dict.fromkeys(row["file"] for row in points))
    for run in runs:
        own = sorted((r for r in points if r["file"] == run and r["curve"]), key=lambda r: float(r["kl"]))
        if own:
            label = f"cellar ({run.removesuffix('.json')})"
            ax.plot([r[SIZES[0]] for r in own], [r["kl"] for r in own], "o-", label=label)
    others = [row for row in points if not row["curve"]]
    for number, row in enumerate(others):
        style = {"marker": "sv^D<>PX*dph"[number // 10 % 12], "color": f"C{number % 10}", "linestyle": "none"}
        ax.plot([row[SIZES[0]]], [row["kl"]], label=row["recipe"].removeprefix("peer:"), **style)
    ax.set(xscale="log", yscale="log", xlabel="bytes per token, whole file", ylabel="KL, nats per token")
    ax.set_title("rate and quality; lower left is better")


def _draw_ablation(ax: Any, result: dict[str, Any]) -> None:
    for row in result["rows"]:
        sizes, costs = ([sum(window) / len(window) for window in row[name]] for name in ("bytes", "kl"))
        ax.plot(sizes, costs, "o-" if row["variant"] == "whole" else ".--", label=row["variant"])
    ax.set(xscale="log", yscale="log", xlabel="bytes per coarse token", ylabel="KL, nats per token")
    ax.set_title("recipe cellar without one of its parts, tuning text")


def _draw_surprisal(ax: Any, result: dict[str, Any]) -> None:
    x = [row["surprisal"] for row in result["bins"]]
    for g, row in enumerate(result["groups"]):
        name = "layers {}–{}".format(*row["layers"])
        for what, style in zip(AGAINST, ("o:", "o-", "s--"), strict=True):
            ax.plot(x, [each[what][g] for each in result["bins"]], style, color=f"C{g}", label=f"{name}, {what}")
    ax.set(xlabel="surprisal of the token, bits (means of tenths)", ylabel="÷ its mean")
    ax.set_title("residual energy and bits spent against surprisal")


def _draw_length(ax: Any, result: dict[str, Any]) -> None:
    for number, (name, rows) in enumerate(result["recipes"].items()):
        x = [row["tokens"] for row in rows]
        ax.plot(x, [row["file"] for row in rows], "o-", color=f"C{number}", label=f"{name}, file")
        ax.plot(x, [row["payload"] for row in rows], "s--", color=f"C{number}", label=f"{name}, payload")
    ax.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="bytes per token")
    ax.set_title("bytes per token against the length of the context")


_PANELS: dict[str, Callable[[Any, Any], None]] = {
    "curve": _draw_curve,
    "ablation": _draw_ablation,
    "surprisal": _draw_surprisal,
    "length": _draw_length,
}
