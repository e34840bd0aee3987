"""Peers against recipes at equal KL, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from kvcellar.frontends.bench.rows import compare_at_equal_kl, compare_speed


def _point(
    recipe: str, kl: float, nbytes: float | None, restore_class: str = "none", text: str = "all"
) -> dict[str, Any]:
    return {
        "recipe": recipe,
        "text": text,
        "kl": kl,
        "file_bytes_per_token": None if nbytes is None else float(nbytes),
        "restore_class": restore_class,
        "ratio_at_equal_kl": None,
    }


def test_peers_are_compared_at_their_own_kl() -> None:
    rows = [
        _point("floor:empty", 0.5, None),
        _point("exact", 0.0, 1000),
        _point("fine", 0.01, 400),
        _point("coarse", 0.04, 100),
        _point("beaten", 0.02, 500),
        _point("of another class", 0.02, 1, "whole"),
        _point("of another text", 0.02, 1, text="docs"),
        _point("peer:exact", 0.0, 1500),
        _point("peer:between", 0.02, 300),
        _point("peer:beyond", 0.05, 50),
        _point("peer:worse than nothing", 0.6, 1),
    ]
    compare_at_equal_kl(rows)
    ratios = {row["recipe"]: row["ratio_at_equal_kl"] for row in rows}
    assert ratios["peer:exact"] == 1.5
    assert ratios["peer:between"] == pytest.approx(300 / 200)  # half-way between 400 and 100 on logarithms
    assert ratios["peer:beyond"] is None
    assert ratios["peer:worse than nothing"] is None
    assert ratios["fine"] is None


def test_a_point_worse_than_the_floor_is_no_peer() -> None:
    rows = [_point("floor:empty", 0.1, None), _point("a", 0.05, 9), _point("b", 0.5, 4), _point("peer:x", 0.2, 9)]
    compare_at_equal_kl(rows)
    assert rows[-1]["ratio_at_equal_kl"] is None
    compare_at_equal_kl(rows[1:])
    assert rows[-1]["ratio_at_equal_kl"] is not None


def test_seconds_stand_beside_those_of_each_peer() -> None:
    """In units of the prefill: results that were kept may come from a run on a busier machine."""
    seconds = {"exact": (2.0, 1.0, 10.0), "peer:slow": (8.0, 2.0, 20.0), "peer:one step": (1.0, None, 10.0)}
    rows = [
        {**_point(name, 0.0, 9), "save_s": save, "restore_s": restore, "prefill_s": prefill}
        for name, (save, restore, prefill) in seconds.items()
    ]
    other_text = {**rows[1], "recipe": "peer:of another text", "text": "docs"}
    task = {**rows[0], "text": "task:needle", "kl": None}
    compare_speed([*rows, other_text, task])
    assert rows[0]["slower_than_peers"] == {
        "peer:slow": {"save": pytest.approx(0.5), "restore": pytest.approx(1.0)},
        "peer:one step": {"save": pytest.approx(2.0), "restore": None},
    }
    assert "slower_than_peers" not in rows[1]
    assert "slower_than_peers" not in task
