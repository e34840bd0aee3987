"""Intervals over articles: limits against a plain reimplementation, coverage, degenerate cases, equal-KL rates."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from kvcellar.errors import InvalidInput
from kvcellar.evaluate.bootstrap import (
    Difference,
    Measure,
    article_sums,
    bca,
    bytes_at_kl,
    draws,
    non_inferior,
    paired,
    ratio_at_equal_kl,
)

# Efron & Tibshirani, An Introduction to the Bootstrap, 1993, table 3.1: 15 law schools, correlation 0.776.
LSAT = [576, 635, 558, 578, 666, 580, 555, 661, 651, 605, 653, 575, 545, 572, 594]
GPA = [3.39, 3.30, 2.81, 3.03, 3.44, 3.07, 3.00, 3.43, 3.36, 3.13, 3.12, 2.74, 2.76, 2.88, 2.96]


def mean(sums: np.ndarray) -> np.ndarray:
    return sums[..., 0] / sums[..., 1]


def correlation(sums: np.ndarray) -> np.ndarray:
    n, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
    return (n * xy - x * y) / np.sqrt((n * xx - x * x) * (n * yy - y * y))


def names(n: int) -> list[str]:
    return [f"article {i:03d}" for i in range(n)]


def with_counts(x: np.ndarray) -> np.ndarray:
    return np.stack([x, np.ones(len(x))], axis=1)


def measure(x: list[float], *, name: str = "kl", articles: list[str] | None = None, lower: bool = True) -> Measure:
    articles = articles or names(len(x))
    return Measure(
        name,
        tuple(f"w{i}" for i in range(len(x))),
        tuple(articles),
        with_counts(np.array(x)),
        mean,
        lower,
        np.ones(len(x)),
    )


def plain_bca(rows: np.ndarray, statistic, resamples: int, seed: int) -> tuple[float, float]:
    """The formulas once more, by loops over repeated rows."""
    normal, n = NormalDist(), len(rows)
    value = lambda part: float(statistic(part.sum(axis=0)[None])[0])  # noqa: E731
    estimate = value(rows)
    drawn = np.array([value(np.repeat(rows, counts, axis=0)) for counts in draws(n, resamples, seed)])
    z0 = normal.inv_cdf(float((drawn < estimate).mean() + (drawn == estimate).mean() / 2))
    left_out = [value(np.delete(rows, i, axis=0)) for i in range(n)]
    d = np.mean(left_out) - np.array(left_out)
    a = (d**3).sum() / (6 * (d**2).sum() ** 1.5)
    limits = []
    for tail in (0.025, 0.975):
        z = z0 + normal.inv_cdf(tail)
        limits.append(float(np.quantile(drawn, normal.cdf(z0 + z / (1 - a * z)))))
    return limits[0], limits[1]


def test_law_school_correlation_agrees_with_a_plain_computation() -> None:
    x, y = np.array(LSAT) - 600.0, np.array(GPA) - 3.0
    rows = np.stack([np.ones(15), x, y, x * x, y * y, x * y], axis=1)
    assert correlation(rows.sum(axis=0)) == pytest.approx(0.776, abs=5e-4)
    found = bca(names(15), rows, correlation, resamples=2000, seed=3)
    assert found == pytest.approx(plain_bca(rows, correlation, 2000, 3), abs=1e-9)
    drawn = correlation(draws(15, 2000, 3) @ rows)
    percentile = np.quantile(drawn, [0.025, 0.975])
    assert found is not None
    assert found[0] < percentile[0] - 0.05  # the correction is what it is for: this statistic is biased and skewed
    assert found[1] < percentile[1]


def test_ties_with_the_estimate_count_half() -> None:
    rows = with_counts(np.array([0.0] * 9 + [1.0] * 3))
    assert bca(names(12), rows, mean, resamples=2000) == pytest.approx(plain_bca(rows, mean, 2000, 0), abs=1e-12)


def test_the_mean_of_symmetric_data_has_the_normal_interval() -> None:
    x = np.concatenate([np.linspace(-1, 1, 101)] * 2)
    lo, hi = bca(names(202), with_counts(x), mean, resamples=20_000) or (0, 0)
    half = 1.96 * x.std() / math.sqrt(202)
    assert (lo, hi) == pytest.approx((-half, half), rel=0.04)


def test_coverage_of_a_skewed_mean_with_clusters() -> None:
    """200 sets of 30 articles of 1–3 windows; the windows of an article share most of what they are."""
    rng, covered, naive = np.random.default_rng(11), 0, 0
    for seed in range(200):
        sizes = rng.integers(1, 4, 30)
        level = np.repeat(rng.exponential(size=30), sizes)
        windows = with_counts(level + 0.1 * rng.normal(size=len(level)))
        articles = np.repeat(names(30), sizes).tolist()
        lo, hi = bca(articles, windows, mean, resamples=600, seed=seed) or (0, 0)
        covered += lo <= 1.0 <= hi
        lo, hi = bca(names(len(level)), windows, mean, resamples=600, seed=seed) or (0, 0)
        naive += lo <= 1.0 <= hi
    assert 0.87 <= covered / 200 <= 0.985
    assert naive < covered - 10  # windows taken as independent promise too much


def test_all_windows_of_an_article_come_along() -> None:
    articles = ["b", "a", "b", "c"]
    rows = with_counts(np.array([1.0, 10.0, 2.0, 5.0]))
    assert article_sums(articles, rows).tolist() == [[10, 1], [3, 2], [5, 1]]
    merged = bca(["a", "b", "c"], article_sums(articles, rows), mean, resamples=500)
    assert bca(articles, rows, mean, resamples=500) == merged


def test_the_seed_decides_and_the_order_of_windows_does_not() -> None:
    x = np.random.default_rng(0).exponential(size=25)
    one = bca(names(25), with_counts(x), mean, resamples=500, seed=1)
    assert one == bca(names(25), with_counts(x), mean, resamples=500, seed=1)
    assert one == bca(names(25)[::-1], with_counts(x[::-1]), mean, resamples=500, seed=1)
    assert one != bca(names(25), with_counts(x), mean, resamples=500, seed=2)
    assert draws(25, 100, 0).sum(axis=1).tolist() == [25] * 100


def test_degenerate_cases() -> None:
    assert bca(["a", "a"], with_counts(np.array([1.0, 2.0])), mean) is None
    assert bca(names(5), with_counts(np.full(5, 0.1)), mean) == pytest.approx((0.1, 0.1), abs=1e-15)
    assert bca(names(5), with_counts(np.zeros(5)), mean) == (0.0, 0.0)
    undefined = lambda sums: np.full(len(sums), np.nan)  # noqa: E731
    assert bca(names(5), with_counts(np.arange(5.0)), undefined) is None
    with pytest.raises(InvalidInput, match=r"level 1\.5"):
        bca(names(5), with_counts(np.arange(5.0)), mean, level=1.5)


def test_none_when_some_resample_has_no_ratio() -> None:
    rows = np.array([[1.0, 1.0], [1.0, -0.9], [1.0, 0.5]])

    def ratio(sums: np.ndarray) -> np.ndarray:
        return np.where(sums[:, 1] > 0, sums[:, 0] / np.where(sums[:, 1] > 0, sums[:, 1], 1), np.nan)

    assert bca(names(3), rows, ratio) is None


def test_a_wider_level_is_wider() -> None:
    x = np.random.default_rng(5).normal(size=40)
    (a, b), (c, d) = (bca(names(40), with_counts(x), mean, level=level) or (0, 0) for level in (0.8, 0.99))
    assert c < a < b < d


def test_paired_is_tighter_than_apart_and_exact_for_equals() -> None:
    rng = np.random.default_rng(2)
    base = rng.exponential(size=40)
    a, b = measure((base + 0.01).tolist()), measure(base.tolist())
    found = paired(a, b)
    assert found.value == pytest.approx(0.01)
    assert found.ci == pytest.approx((0.01, 0.01), abs=1e-9)
    assert paired(a, a) == Difference(0.0, (0.0, 0.0))
    noisy = measure((base + 0.1 * rng.normal(size=40)).tolist())
    (lo, hi), (alone_lo, alone_hi) = paired(noisy, b).ci or (0, 0), b.interval() or (0, 0)
    assert hi - lo < (alone_hi - alone_lo) / 3


def test_paired_refuses_other_windows_measures_and_models() -> None:
    a = measure([1.0, 2.0, 3.0])
    with pytest.raises(InvalidInput, match="3 and 2 windows"):
        paired(a, measure([1.0, 2.0]))
    with pytest.raises(InvalidInput, match="at window 2"):
        paired(a, measure([1.0, 2.0, 3.0], articles=["article 000", "article 001", "x"]))
    with pytest.raises(InvalidInput, match="kl and rcb"):
        paired(a, measure([1.0, 2.0, 3.0], name="rcb"))
    other = Measure(a.name, a.windows, a.articles, a.sums, mean, True, np.array([1.0, 1.0, 1.01]))
    with pytest.raises(InvalidInput, match="another model"):
        paired(a, other)


def test_a_measure_needs_one_article_and_sum_per_window() -> None:
    with pytest.raises(InvalidInput, match="1 articles"):
        Measure("kl", ("w0", "w1"), ("a",), np.ones((2, 2)), mean)
    with pytest.raises(InvalidInput, match="at least one"):
        Measure("kl", (), (), np.ones((0, 2)), mean)


def test_non_inferiority_goes_by_the_bound() -> None:
    base = np.random.default_rng(3).exponential(size=60)
    noise = np.random.default_rng(4).normal(size=60) * 0.05
    a, b = measure((base + noise).tolist()), measure(base.tolist())
    _, hi = paired(a, b).ci or (0, 0)
    assert paired(a, b).value < hi
    assert non_inferior(a, b, hi + 1e-6)
    assert not non_inferior(a, b, max(0.0, paired(a, b).value + 1e-6))
    assert non_inferior(a, a, 0.0)
    with pytest.raises(InvalidInput, match="margin"):
        non_inferior(a, b, -0.1)
    one = measure([1.0, 1.0], articles=["a", "a"])
    assert not non_inferior(one, one, 5.0)  # no interval, no claim


def test_non_inferiority_where_more_is_better() -> None:
    worse, better = (measure([x] * 9, lower=False) for x in (0.90, 0.95))
    assert non_inferior(better, worse, 0.0)
    assert not non_inferior(worse, better, 0.04)
    assert non_inferior(worse, better, 0.06)


POINTS = [(kl, 500.0 * kl**-0.6) for kl in (0.003, 0.2, 0.01, 0.05)]


@pytest.mark.parametrize("kl", [0.0031, 0.007, 0.02, 0.1999])
def test_a_power_law_is_interpolated_exactly(kl: float) -> None:
    assert bytes_at_kl(POINTS, kl) == pytest.approx(500 * kl**-0.6, rel=1e-12)


def test_outside_the_measured_range_nothing_is_claimed() -> None:
    assert bytes_at_kl(POINTS, 0.0029) is None
    assert bytes_at_kl(POINTS, 0.21) is None
    assert bytes_at_kl([], 0.1) is None
    assert bytes_at_kl([(0.0, 9000.0), (0.1, 10.0)], 0.05) is None


def test_measured_points_are_returned_as_they_are() -> None:
    assert [bytes_at_kl(POINTS, kl) for kl, _ in POINTS] == [nbytes for _, nbytes in POINTS]
    assert bytes_at_kl([(0.0, 9000.0), (0.1, 10.0)], 0.0) == 9000.0
    assert bytes_at_kl([(0.1, 12.0), (0.1, 10.0)], 0.1) == 10.0


@pytest.mark.parametrize("point", [(-0.1, 5.0), (0.1, 0.0), (math.nan, 5.0), (0.1, math.inf)])
def test_points_that_cannot_be_are_refused(point: tuple[float, float]) -> None:
    with pytest.raises(InvalidInput, match="expected points"):
        bytes_at_kl([(0.1, 5.0), point], 0.1)
    with pytest.raises(InvalidInput, match="expected a KL"):
        bytes_at_kl([(0.1, 5.0)], math.nan)


def test_ratio_at_equal_kl() -> None:
    ours = [(kl, nbytes / 8) for kl, nbytes in POINTS[:2]]
    assert ratio_at_equal_kl(POINTS, ours, 0.05) == pytest.approx(8.0)
    assert ratio_at_equal_kl(POINTS, [(0.5, 1.0), (0.6, 1.0)], 0.05) is None
