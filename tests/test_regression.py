"""The regression behind `linear/1`: what it leaves, and what a restore is taken to make of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kvcellar.predict.regression import LOST, Moments, Restoring


def _drawn(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Correlated numbers of unequal variance."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(rows, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    return mixed * torch.logspace(0, -1, columns)


def _root(size: int, seed: int) -> Tensor:
    half = _drawn(size, size, seed)
    return half @ half.T + torch.eye(size)


def test_what_is_left_is_the_covariance_of_what_the_regression_misses() -> None:
    features, noise = _drawn(4000, 12), 0.3 * _drawn(4000, 20, seed=1)
    y = features @ _drawn(12, 20, seed=2) + noise + 5
    moment = Moments(8)
    for rows in torch.split(torch.arange(4000), 1000):
        moment.add(features[rows], y[rows])
    roots = [_root(10, 3), _root(10, 4)]
    down, up = moment.solve(roots, 6, 12)
    missed = y - moment.mean - (features - moment.centre) / moment.spread @ down @ up
    torch.testing.assert_close(moment.left(down, up), missed[:, -8:].T.cov(correction=0), rtol=1e-3, atol=1e-3)


def test_a_restore_loses_its_share_and_nothing_of_what_is_dear() -> None:
    residual, roots = _drawn(20000, 12), [_root(6, 5), _root(6, 6)]
    covariance = residual.T.cov(correction=0)
    restoring = Restoring(covariance, roots)
    root = torch.block_diag(*roots)  # type: ignore[no-untyped-call]
    missed = (residual - restoring(residual, torch.Generator().manual_seed(1))) @ root
    whole = (residual @ root).square().sum()
    assert float(missed.square().sum() / whole) == pytest.approx(LOST, rel=0.05)
    variance, directions = torch.linalg.eigh(root @ covariance @ root)
    lost = (missed @ directions).square().mean(dim=0)
    np.testing.assert_allclose(lost, variance.clamp(max=float(restoring.level)), rtol=0.1)


def test_at_a_given_level_a_cheap_residual_is_lost_whole_and_a_dear_one_stays() -> None:
    residual, roots = _drawn(2000, 6), [torch.eye(6)]
    covariance = residual.T.cov(correction=0)
    gone = Restoring(covariance, roots, torch.tensor(1e9, dtype=torch.float64))
    assert not gone(residual, torch.Generator()).any()
    kept = Restoring(covariance, roots, torch.tensor(1e-12, dtype=torch.float64))
    torch.testing.assert_close(kept(residual, torch.Generator()), residual, rtol=1e-3, atol=1e-3)
