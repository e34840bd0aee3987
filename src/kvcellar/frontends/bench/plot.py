"""Bytes per token against divergence, one point a recipe or peer, over all texts of a run."""

from __future__ import annotations

from typing import Any

from ...errors import MissingExtra

EXACT_AT = 1e-5
_PEERS = "s^vD<>PX*dph"  # one marker a family: names that differ in what follows their last hyphen


def draw(rows: list[dict[str, Any]], path: str) -> None:
    """Write the plot to `path`, PNG or SVG by its ending. Divergences of 0 are drawn at the lower edge, and say so."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtra("plots need the extra: pip install 'kvcellar[bench]'") from error
    rows = [row for row in rows if row["kl"] is not None]
    whole = {row["recipe"]: row for row in rows if row["text"] == "all" or _alone(rows, row)}
    figure, axes = pyplot.subplots(figsize=(9, max(5.0, 0.19 * len(whole))), layout="constrained")
    families: dict[str, int] = {}
    for number, (name, row) in enumerate(whole.items()):
        if row["file_bytes_per_token"] is None:
            axes.axhline(row["kl"], color="0.6", linestyle=":", label=f"{name}: KL {row['kl']:.2g}")
            continue
        height = max(row["kl"], EXACT_AT)
        low, high = row["kl_ci"] or (row["kl"], row["kl"])
        spread = [[max(0.0, height - max(low, EXACT_AT))], [max(0.0, max(high, EXACT_AT) - height)]]
        label = f"{name}{' (KL 0)' if row['kl'] == 0 else ''}"
        family = families.setdefault(name.rsplit("-", 1)[0], len(families))
        marker = _PEERS[family % len(_PEERS)] if name.startswith("peer:") else "o"
        style: dict[str, Any] = {"fmt": marker, "color": f"C{number % 10}", "capsize": 3, "label": label}
        axes.errorbar([row["file_bytes_per_token"]], [height], yerr=spread, **style)
    axes.set(xscale="log", yscale="log", xlabel="bytes per token, whole file", ylabel="KL, nats per token")
    axes.set_title("rate and quality, all texts; lower left is better")
    axes.grid(alpha=0.3, which="both")
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _alone(rows: list[dict[str, Any]], row: dict[str, Any]) -> bool:
    return [other["recipe"] for other in rows].count(row["recipe"]) == 1
