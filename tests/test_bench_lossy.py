"""Lossy recipes in the bench: coarse tokens' bytes, errors by layer, and that divergence decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchtools import small_windows
from clitools import write_model
from kvcellar.frontends.bench.run import Bench
from kvcellar.frontends.cli.models import MeasuredModel
from kvcellar.recipe import Recipe, Window

LAYERS = 3
CHOICES = {"few bits for keys": {"key_bits": 2, "value_bits": 4}, "few for values": {"value_bits": 2}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def bench(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    local = MeasuredModel(model)
    made = Bench(local, small_windows(local.encode), quiet=True)
    made.prepare()
    return made


def _recipe(name: str, **settings: Any) -> Recipe:
    return Recipe(name, {"id": "map/1"}, quantize={"id": "turbo/1", **settings}, window=Window(4, 32))


def test_field_g44_divergence_decides_where_mean_errors_say_otherwise(bench: Bench) -> None:
    """Keys say where to look and values what is seen: which of them loses more is not which is missed more."""
    rows = {name: bench.recipe(_recipe(name, bits=8, **few))[0] for name, few in CHOICES.items()}
    lost = {name: sum(e["keys"] + e["values"] for e in row["layer_errors"]) for name, row in rows.items()}
    assert [len(row["layer_errors"]) for row in rows.values()] == [LAYERS, LAYERS]
    assert sorted(rows, key=lost.__getitem__) != sorted(rows, key=lambda name: rows[name]["kl"])
    row = rows["few for values"]
    assert all(each["keys"] < 1e-3 < 0.05 < each["values"] for each in row["layer_errors"])
    layer = bench.geometry().layers[0]
    scales = 2 * 2 * layer.key.heads * LAYERS  # two bytes for a head's keys, and for its values
    numbers = LAYERS * layer.key.numbers_per_token
    assert row["payload_bytes_per_token"] == pytest.approx(numbers * (8 + 2) / 8 + scales, rel=0.05)
    assert row["payload_bytes_per_token"] < row["file_bytes_per_token"]
    assert abs(row["dppl_second_half"]) < 1
