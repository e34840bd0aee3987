"""docs/sequential.png: does residual energy follow surprisal, and the curve from the tokens to the exact cache."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

KL_AT_LEAST = 1e-4


def draw(result: dict[str, Any], path: Path) -> None:
    """A panel for each part that `result` has: `bits` (its premise), `curve`, `length`."""
    from matplotlib.figure import Figure

    parts = [(name, panel) for name, panel in _PANELS if name in result]
    if not parts:
        return
    figure = Figure(figsize=(5.6 * len(parts), 4.8), layout="constrained")
    for ax, (name, panel) in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        panel(figure, ax, result[name])
        ax.grid(alpha=0.2, which="both")
    windows = len(result["windows"])
    figure.suptitle(f"{windows} windows of {result['prefix']:,} tokens of tuning text", fontsize=9)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _premise(figure: Any, ax: Any, bits: dict[str, Any]) -> None:
    """Energy left by layer over tenths of the tokens by surprisal, both in units of their mean."""
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    premise = bits["premise"]
    mean, layers = premise["mean_surprisal"], premise["energy"]
    for i, energy in enumerate(layers):
        ax.plot([s / mean for s in premise["surprisal"]], energy, color=_of(i, len(layers)), linewidth=0.9)
    straight = [s / mean for s in premise["surprisal"]]
    ax.plot(straight, straight, color="black", linestyle=":", label="energy ∝ surprisal")
    ax.set(xlabel="surprisal ÷ mean", ylabel="energy of the residual ÷ mean", yscale="log")
    low, high = min(premise["rho"]), max(premise["rho"])
    ax.set_title(f"a line a layer; Spearman's ρ {low:.2f} … {high:.2f}", fontsize=9)
    ax.legend(fontsize=7)
    from matplotlib.cm import ScalarMappable

    scale = ScalarMappable(Normalize(0, len(layers) - 1), colormaps["viridis"])
    figure.colorbar(scale, ax=ax, label="layer", shrink=0.7)


def _of(i: int, count: int) -> Any:
    from matplotlib import colormaps

    return colormaps["viridis"](i / max(1, count - 1))


def _curve(figure: Any, ax: Any, curve: dict[str, Any]) -> None:
    """Bytes against seconds of a restore; colour is divergence, a ring stands for none."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    most = max((row["kl"] for row in curve["rows"]), default=1.0)
    norm = LogNorm(KL_AT_LEAST, max(most, 10 * KL_AT_LEAST))
    for row in curve["rows"]:
        x, y = row["restore_to_prefill"], row["file_bytes_per_token"]
        colour = colormaps["plasma"](norm(max(row["kl"], KL_AT_LEAST))) if row["kl"] else "none"
        ax.scatter([x], [y], s=36, color=colour, edgecolor="black", linewidth=0.7, zorder=3)
        ax.annotate(row["recipe"], (x, y), (5, 4), textcoords="offset points", fontsize=7)
    ax.axhline(curve["floor_bytes_per_token"], color="0.5", linestyle=":", label="Σ −log2 P of the text")
    ax.axvline(1, color="0.8", linewidth=0.8)
    ax.set(xscale="log", yscale="log", xlabel="seconds of a restore ÷ of a prefill", ylabel="bytes a token, whole file")
    ax.set_title("KL by colour, nats a token; a ring: bit by bit", fontsize=9)
    ax.margins(0.15)
    ax.legend(fontsize=7)
    figure.colorbar(ScalarMappable(norm, colormaps["plasma"]), ax=ax, shrink=0.7)


def _length(figure: Any, ax: Any, length: dict[str, Any]) -> None:
    """Bytes that code a coarse token, by the length of the text; the floor is the text's."""
    for name, rows in length["recipes"].items():
        known = [(row["tokens"], row["coarse"]) for row in rows if row["coarse"] and math.isfinite(row["coarse"])]
        style = {"color": "0.5", "linestyle": ":"} if name == "floor" else {"marker": "o", "markersize": 3}
        if known:
            ax.plot(*zip(*known, strict=True), label=name, **style)
    ax.set(xscale="log", yscale="log", xlabel="tokens of the text", ylabel="bytes a coarse token")
    ax.set_title(f"does it fall? {length['documents']} texts", fontsize=9)
    ax.legend(fontsize=7)


_PANELS = (("bits", _premise), ("curve", _curve), ("length", _length))
