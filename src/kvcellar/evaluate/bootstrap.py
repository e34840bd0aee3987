"""Confidence intervals over articles: the cluster bootstrap with BCa limits, differences of recipes, rates at equal KL.

Windows of one article resemble each other, so articles are drawn, with replacement, and every window of a drawn
article comes along (resampling of whole clusters: Davison & Hinkley, Bootstrap Methods and their Application, 1997,
section 3.8). Every statistic here is a function of sums over windows, so an article counts by its sums alone and a
resample by how often each article was drawn: counts (R × A) times sums (A × C).

Limits are bias-corrected and accelerated (Efron, Better Bootstrap Confidence Intervals, JASA 82, 1987, p. 171–185):
the limit for α is the quantile of the resamples at Φ(z₀ + (z₀ + z_α) / (1 − a (z₀ + z_α))), with z₀ = Φ⁻¹ of the
share of resamples below the estimate, and a = Σ d³ / (6 (Σ d²)^1.5) where d is the mean of the jackknife values less
each of them. We differ in that ties with the estimate count half towards z₀ (Efron's share is of a continuous
distribution), and in that the jackknife leaves out an article, not a window. With few articles, say under ten, these
intervals are too narrow, as every bootstrap is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
from jaxtyping import Float64, Int64

from ..errors import InvalidInput

Interval = tuple[float, float]
Statistic = Callable[[np.ndarray], np.ndarray]
LEVEL = 0.95
RESAMPLES = 10_000
_SAME = 1e-12
_SAME_BASELINE = 1e-3
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Measure:
    """A statistic of sums over windows, with what each window adds to the sums.

    `statistic` maps sums (…, C) to values (…). `windows` tell which windows these are and `baselines` (W,) are scores
    of the uncompressed cache: both must agree between two recipes that are compared.
    """

    name: str
    windows: tuple[str, ...]
    articles: tuple[str, ...]
    sums: Float64[np.ndarray, "windows columns"]
    statistic: Statistic = field(repr=False)
    lower_is_better: bool = True
    baselines: Float64[np.ndarray, " windows"] | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.windows), len(self.articles), len(self.sums)}
        if len(lengths) != 1 or not self.windows:
            raise InvalidInput(
                f"{self.name}: expected as many articles and sums as windows, and at least one; got "
                f"{len(self.articles)} articles, {len(self.sums)} sums, {len(self.windows)} windows"
            )

    @property
    def value(self) -> float:
        """The statistic over all windows; NaN where it is not defined."""
        return float(self.statistic(self.sums.sum(axis=0)[None])[0])

    def interval(self, *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0) -> Interval | None:
        return bca(self.articles, self.sums, self.statistic, level=level, resamples=resamples, seed=seed)


@dataclass(frozen=True)
class Difference:
    """A statistic of one recipe less that of another on the same windows; `ci` is None where `bca` gives none."""

    value: float
    ci: Interval | None


def article_sums(
    articles: Sequence[str], sums: Float64[np.ndarray, "windows columns"]
) -> Float64[np.ndarray, "articles columns"]:
    """Sums over the windows of each article, articles in order of name: the order of windows has no weight."""
    names, which = np.unique(np.asarray(articles, dtype=np.str_), return_inverse=True)
    total = np.zeros((len(names), sums.shape[1]))
    np.add.at(total, which, sums)
    return total


def draws(articles: int, resamples: int, seed: int) -> Int64[np.ndarray, "resamples articles"]:
    """How often each article is drawn in each resample; every row adds up to the number of articles."""
    return np.random.default_rng(seed).multinomial(articles, np.full(articles, 1 / articles), size=resamples)


def bca(
    articles: Sequence[str],
    sums: Float64[np.ndarray, "windows columns"],
    statistic: Statistic,
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval | None:
    """BCa limits of `statistic` by resampling articles; the same seed gives the same limits.

    None when there is one article, or when the statistic is not defined (NaN or infinite) on all articles, on a
    resample or without one of the articles. Where nothing varies, both limits are the estimate itself.
    """
    if not 0 < level < 1 or resamples < 1:
        raise InvalidInput(f"expected 0 < level < 1 and at least one resample, got level {level}, {resamples}")
    per_article = article_sums(articles, sums)
    count, total = len(per_article), per_article.sum(axis=0)
    if count < 2:
        return None
    estimate = float(statistic(total[None])[0])
    drawn = statistic(draws(count, resamples, seed) @ per_article)
    left_out = statistic(total - per_article)
    if not (math.isfinite(estimate) and np.isfinite(drawn).all() and np.isfinite(left_out).all()):
        return None
    if max(np.abs(drawn - estimate).max(), np.abs(left_out - estimate).max()) <= _SAME * abs(estimate):
        return estimate, estimate
    below = ((drawn < estimate).sum() + 0.5 * (drawn == estimate).sum()) / resamples
    bias = _NORMAL.inv_cdf(float(np.clip(below, 0.5 / resamples, 1 - 0.5 / resamples)))
    acceleration = _acceleration(left_out)
    levels = [_adjusted(tail, bias, acceleration) for tail in ((1 - level) / 2, (1 + level) / 2)]
    lo, hi = np.quantile(drawn, levels)
    return float(lo), float(hi)


def _acceleration(left_out: Float64[np.ndarray, " articles"]) -> float:
    d = left_out.mean() - left_out
    squares = float((d**2).sum())
    return float((d**3).sum()) / (6 * squares**1.5) if squares > 0 else 0.0


def _adjusted(tail: float, bias: float, acceleration: float) -> float:
    """The quantile that stands for `tail`, 0 or 1 where the acceleration carries it past all resamples."""
    shifted = bias + _NORMAL.inv_cdf(tail)
    room = 1 - acceleration * shifted
    return _NORMAL.cdf(bias + shifted / room) if room > 0 else float(shifted > 0)


def paired(a: Measure, b: Measure, *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0) -> Difference:
    """`a` less `b`, each resample drawing the same articles for both.

    Raises InvalidInput when the two were not measured alike on the same windows.
    """
    if a.name != b.name:
        raise InvalidInput(f"expected one measure of two recipes, got {a.name} and {b.name}")
    if a.windows != b.windows or a.articles != b.articles:
        raise InvalidInput(f"{a.name}: expected the same windows in the same order, got {_first_difference(a, b)}")
    if a.baselines is not None and b.baselines is not None:
        apart = float(np.abs(a.baselines - b.baselines).max())
        if not apart <= _SAME_BASELINE:
            raise InvalidInput(
                f"{a.name}: expected the same uncompressed scores on both sides, within {_SAME_BASELINE} nats per "
                f"token, got {apart:.3g}: other windows or another model"
            )
    width = a.sums.shape[1]

    def difference(sums: np.ndarray) -> np.ndarray:
        return a.statistic(sums[..., :width]) - b.statistic(sums[..., width:])

    both = np.concatenate([a.sums, b.sums], axis=1)
    return Difference(a.value - b.value, bca(a.articles, both, difference, level=level, resamples=resamples, seed=seed))


def _first_difference(a: Measure, b: Measure) -> str:
    if len(a.windows) != len(b.windows):
        return f"{len(a.windows)} and {len(b.windows)} windows"
    pairs = zip(zip(a.articles, a.windows, strict=True), zip(b.articles, b.windows, strict=True), strict=True)
    return next(f"{x} and {y} at window {i}" for i, (x, y) in enumerate(pairs) if x != y)


def non_inferior(
    a: Measure, b: Measure, margin: float, *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> bool:
    """Whether `a` is at most `margin` (in the measure's own unit) worse than `b`, at the bound of the interval.

    The bound is that of the two-sided interval, so at 95 % the test is one-sided at 2.5 %. Without an interval the
    answer is no.
    """
    if not (math.isfinite(margin) and margin >= 0):
        raise InvalidInput(f"expected a margin of 0 or more, got {margin}")
    ci = paired(a, b, level=level, resamples=resamples, seed=seed).ci
    if ci is None:
        return False
    return ci[1] <= margin if a.lower_is_better else ci[0] >= -margin


def bytes_at_kl(points: Sequence[tuple[float, float]], kl: float) -> float | None:
    """Bytes a codec needs at `kl`, from its measured points (KL, bytes): log bytes linear in log KL between neighbours.

    None outside the measured range, and between a point of KL 0 and the next, where log KL has no scale. A measured
    KL gives the measured bytes, the fewest if it was measured twice. Neighbours are taken in order of KL whether or
    not bytes fall with it, so leave out points that another point of the codec beats in both.
    """
    if not (math.isfinite(kl) and kl >= 0):
        raise InvalidInput(f"expected a KL of 0 or more, got {kl}")
    for point in points:
        if not (math.isfinite(point[0]) and point[0] >= 0 and math.isfinite(point[1]) and point[1] > 0):
            raise InvalidInput(f"expected points of KL ≥ 0 and bytes > 0, got {point}")
    fewest: dict[float, float] = {}
    for measured, nbytes in points:
        fewest[measured] = min(nbytes, fewest.get(measured, math.inf))
    if kl in fewest:
        return fewest[kl]
    under, over = [x for x in fewest if 0 < x < kl], [x for x in fewest if x > kl]
    if not under or not over:
        return None
    x0, x1 = max(under), min(over)
    share = (math.log(kl) - math.log(x0)) / (math.log(x1) - math.log(x0))
    return math.exp((1 - share) * math.log(fewest[x0]) + share * math.log(fewest[x1]))


def ratio_at_equal_kl(
    peer: Sequence[tuple[float, float]], ours: Sequence[tuple[float, float]], kl: float
) -> float | None:
    """Bytes of `peer` ÷ bytes of `ours` at the same KL: over 1 when ours is smaller. None where either is unknown."""
    theirs, own = bytes_at_kl(peer, kl), bytes_at_kl(ours, kl)
    return None if theirs is None or own is None else theirs / own
