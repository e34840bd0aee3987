"""Peers beside figures from elsewhere: what is compared with what, and that scores are kept."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import peers_validation as validation
from benchtools import small_windows
from clitools import write_model
from kvcellar.errors import MissingExtra
from kvcellar.frontends.bench.peers import PEERS, THROUGH
from kvcellar.frontends.bench.reference import References
from kvcellar.frontends.cli.models import MeasuredModel


def row(kl: float) -> dict[str, object]:
    return {"kl": kl, "kl_ci": None, "top1": 0.9, "by_window": {"a": {"kl": kl / 2}, "b": {"kl": 1.5 * kl}}}


def test_every_figure_is_of_a_peer_and_quantized_caches_are_read_through() -> None:
    assert set(validation.ELSEWHERE) <= set(PEERS)
    assert {name for name in validation.ELSEWHERE if name.startswith("hf-")} == set(THROUGH)
    assert {validation.prefix_alone(name) for name in THROUGH} <= set(PEERS)
    assert validation.prefix_alone("turboquant-4") is None


@pytest.mark.parametrize(
    ("kl", "within"), [(0.017, True), (0.025, True), (0.026, False), (0.012, True), (0.011, False)]
)
def test_a_factor_of_one_and_a_half_either_way_is_within(kl: float, within: bool) -> None:
    (line,) = validation.compared({"hf-fp8-through": row(kl), "hf-fp8": row(0.001)})
    assert line["within"] is within
    assert line["ratio"] == pytest.approx(kl / 0.017)
    assert line["kl_of_prefix_alone"] == 0.001
    assert line["kl_by_window"] == [kl / 2, 1.5 * kl]


def test_scores_are_kept_per_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    local = MeasuredModel(write_model(tmp_path))
    chosen = small_windows(local.encode)[:2]
    references = References(local)
    references.ensure(chosen, quiet=True)
    found = {name: validation.peer_row(references, name, chosen) for name in ("zstd-3", "hf-fp8", "hf-fp8-through")}
    assert found["zstd-3"]["kl"] == 0
    assert 0 < found["hf-fp8"]["kl"] < found["hf-fp8-through"]["kl"]
    monkeypatch.setattr(validation, "_logits", None)  # not to be called again
    assert validation.peer_row(references, "hf-fp8-through", chosen) == found["hf-fp8-through"]


def test_a_peer_that_is_not_here_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    local = MeasuredModel(write_model(tmp_path))
    chosen = small_windows(local.encode)[:1]
    references = References(local)
    references.ensure(chosen, quiet=True)
    with pytest.raises(MissingExtra, match="make peers"):
        validation.peer_row(references, "turboquant-4", chosen)
