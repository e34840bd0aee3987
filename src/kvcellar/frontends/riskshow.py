"""A risk profile as a table, one line a layer, and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import MissingExtra
from .risk import predicted_error

_MARKERS = "osv^D*"


def show(result: Mapping[str, Any]) -> None:
    """Print what each layer's heads can lose at the recommended fraction; a layer's heads stand side by side."""
    from rich.console import Console
    from rich.table import Table

    advice = result["recommendation"]
    keep, method = f"{advice['keep']:g}", advice["method"]
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    columns = ("layer", "tr Σ ÷ mean ‖o‖²", "effective rank", "random, first order", f"{method}, expected")
    for name in (*columns, f"{method}, measured", "slots"):
        table.add_column(name, justify="right", no_wrap=True)
    layers: dict[int, list[Mapping[str, Any]]] = {}
    for row in result["heads"]:
        layers.setdefault(row["layer"], []).append(row)
    for layer, rows in layers.items():
        at = [row["keep"][keep] for row in rows]
        reads = [row["read"] for row in rows]
        table.add_row(
            str(layer),
            _side_by_side([row["trace"] / row["read"] for row in rows]),
            _side_by_side([row["effective_rank"] for row in rows]),
            _side_by_side([each["sampling"] / read for each, read in zip(at, reads, strict=True)]),
            _side_by_side([each["expected"][method] / read for each, read in zip(at, reads, strict=True)]),
            _side_by_side([each["measured"][method] / read for each, read in zip(at, reads, strict=True)]),
            " ".join(f"{count:>4}" for count in result["budget"]["slots"][layer]),
        )
    Console(width=max(Console().width, 150)).print(table)


def _side_by_side(values: Sequence[float]) -> str:
    return " ".join(f"{value:>7.2g}" for value in values)


def draw(result: Mapping[str, Any], path: str) -> None:
    """Write the plot to `path`, PNG or SVG by its ending. Raises MissingExtra without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
        from matplotlib.colors import LogNorm
    except ImportError as error:
        raise MissingExtra("plots need the extra: pip install 'kvcellar[bench]'") from error
    rows, advice = result["heads"], result["recommendation"]
    keep, method = f"{advice['keep']:g}", advice["method"]
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8.5), layout="constrained")
    risk = _grid(rows, lambda row: row["keep"][keep]["sampling"] / row["read"])
    positive = risk[np.isfinite(risk) & (risk > 0)]
    norm = LogNorm(positive.min(), positive.max()) if positive.size and positive.min() < positive.max() else None
    shown = axes[0, 0].imshow(risk.T, aspect="auto", norm=norm, cmap="viridis")
    axes[0, 0].set(title=f"predicted relative error of a random {advice['keep']:.0%}", xlabel="layer", ylabel="KV head")
    figure.colorbar(shown, ax=axes[0, 0])
    for number, name in enumerate(dict.fromkeys(("random", method))):
        for color, fraction in enumerate(rows[0]["keep"]):
            if name not in rows[0]["keep"][fraction]["measured"]:
                continue
            said = [predicted_error(row, fraction, name, "expected") for row in rows]
            was = [row["keep"][fraction]["measured"][name] for row in rows]
            style: dict[str, Any] = {"s": 14, "marker": _MARKERS[number], "color": f"C{color}", "alpha": 0.7}
            axes[0, 1].scatter(said, was, label=f"{name}, {float(fraction):.0%}", **style)
    axes[0, 1].axline((1, 1), slope=1, color="0.5", linewidth=0.8)
    axes[0, 1].set(xscale="log", yscale="log", xlabel="expected from ν", ylabel="measured on the next tokens")
    axes[0, 1].set(title="mean ‖ô − o‖², one point a head")
    axes[0, 1].legend(fontsize="small")
    for row in rows:
        axes[1, 0].plot(1 + np.arange(len(row["spectrum"])), np.array(row["spectrum"]) / row["read"], "C0", alpha=0.3)
    axes[1, 0].set(xscale="log", yscale="log", xlabel="direction", ylabel="eigenvalue of Σ ÷ mean ‖o‖²")
    axes[1, 0].set(title="spectra, one line a head")
    slots = _grid(rows, lambda row: 0.0)
    for layer, counts in enumerate(result["budget"]["slots"]):
        slots[layer, : len(counts)] = counts
    shown = axes[1, 1].imshow(slots.T, aspect="auto", cmap="magma")
    axes[1, 1].set(title=f"slots a head, {result['budget']['kept']:.1%} of all", xlabel="layer", ylabel="KV head")
    figure.colorbar(shown, ax=axes[1, 1])
    for panel in (axes[0, 0], axes[1, 1]):
        panel.set_yticks(range(slots.shape[1]))
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _grid(rows: Sequence[Mapping[str, Any]], value: Any) -> np.ndarray:
    """`value(row)` at (layer, head), NaN where there is no such head."""
    out = np.full((1 + max(r["layer"] for r in rows), 1 + max(r["head"] for r in rows)), np.nan)
    for row in rows:
        out[row["layer"], row["head"]] = value(row)
    return out
