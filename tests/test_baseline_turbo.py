"""TurboQuant as published: its distortion is that of the paper, whatever the vector's direction and length."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from baselines.validate_turbo import _last_digit, quantized


@pytest.mark.parametrize(("bits", "distortion"), [(2, 0.117), (3, 0.034), (4, 0.0095)])
def test_the_error_is_that_of_the_best_levels(bits: int, distortion: float) -> None:
    """Lloyd–Max distortion of a Gaussian (Max 1960, table 1), which coordinates of random directions are near to."""
    plain = torch.randn(1, 2, 500, 64, generator=torch.Generator().manual_seed(1)) * 30
    spiked = torch.zeros(1, 2, 64, 64) + torch.eye(64) * 1000
    for x in (plain, spiked):
        error = (quantized(x, bits) - x).square().sum() / x.square().sum()
        assert float(error) == pytest.approx(distortion, rel=0.1)


def test_a_rounded_figure_may_be_half_its_last_digit_off() -> None:
    assert _last_digit(0.007) == pytest.approx(0.001)
    assert _last_digit(0.12) == pytest.approx(0.01)
