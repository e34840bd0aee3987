"""Scores of a restored cache on windows of text, and their summary with intervals.

For the token t at each position of a continuation, p the distribution of the uncompressed cache and q that of the
restored one: KL = Σ p (log p − log q) and NLL = −log q(t), in nats. Over all tokens of all windows:

    Δppl = exp(mean NLL − mean NLL_full) − 1
    RCB  = Σ (NLL_empty − NLL) / Σ (NLL_empty − NLL_full)       retained context benefit, a ratio of sums

where *full* is the uncompressed cache and *empty* the cache of sinks and recent window alone at their true positions.
RCB is 1 for an exact restore and 0 for one no better than the empty cache; a ratio of sums, unlike a mean of ratios,
needs no window dropped where the context was of no use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from ..errors import InvalidInput
from .bootstrap import Interval, Measure

_CHUNK = 64  # positions at a time: 64 × 49,152 logits are 25 MB in float64


@dataclass(frozen=True)
class WindowScore:
    """One window's scores at each of its n continuation tokens, in nats.

    `article` is the cluster that intervals resample and `kind` the kind of text. `agree` tells where the most likely
    token is that of the uncompressed cache. `nll_empty` is NaN throughout where it was not measured. `id` says which
    window this is (`texts.Window.id`), so that two recipes can be compared on the same ones.
    """

    article: str
    kind: str
    kl: Float64[np.ndarray, " tokens"] = field(repr=False)
    nll: Float64[np.ndarray, " tokens"] = field(repr=False)
    nll_full: Float64[np.ndarray, " tokens"] = field(repr=False)
    nll_empty: Float64[np.ndarray, " tokens"] = field(repr=False)
    agree: Bool[np.ndarray, " tokens"] = field(repr=False)
    id: str = ""

    def __post_init__(self) -> None:
        parts = {name: getattr(self, name) for name in ("kl", "nll", "nll_full", "nll_empty", "agree")}
        shapes = {name: part.shape for name, part in parts.items()}
        if self.kl.ndim != 1 or not self.kl.size or len(set(shapes.values())) != 1:
            raise InvalidInput(f"window of {self.article}: expected equal lengths of at least 1, got {shapes}")
        for name in ("kl", "nll", "nll_full"):
            if not np.isfinite(parts[name]).all():
                raise InvalidInput(f"window of {self.article}: {name}: expected finite numbers, got NaN or infinity")
        if self.has_empty and not np.isfinite(self.nll_empty).all():
            raise InvalidInput(f"window of {self.article}: nll_empty: expected all finite or all NaN, got a mixture")

    @property
    def tokens(self) -> int:
        return len(self.kl)

    @property
    def has_empty(self) -> bool:
        return not bool(np.isnan(self.nll_empty).all())


def score_logits(
    reference: Float[Tensor, "positions vocabulary"],
    restored: Float[Tensor, "positions vocabulary"],
    targets: Int[Tensor, " positions"],
) -> tuple[
    Float64[np.ndarray, " positions"],
    Float64[np.ndarray, " positions"],
    Float64[np.ndarray, " positions"],
    Bool[np.ndarray, " positions"],
]:
    """(KL, NLL, NLL of the reference, whether the most likely tokens agree) at each position, in nats.

    Logits of any float dtype, each row predicting its target; computed in float64, 64 positions at a time. KL is
    exactly 0 where the logits are the same bits. A logit of −inf is a probability of 0. Raises InvalidInput for
    shapes that do not fit, targets outside the vocabulary, NaN or +inf logits, and a divergence that is infinite.
    Tried on: CPU.
    """
    if reference.ndim != 2 or reference.shape != restored.shape or targets.shape != reference.shape[:1]:
        raise InvalidInput(
            f"expected logits (n, V) twice and targets (n,), got {tuple(reference.shape)}, {tuple(restored.shape)} "
            f"and {tuple(targets.shape)}"
        )
    positions, vocabulary = reference.shape
    if positions and not 0 <= int(targets.min()) <= int(targets.max()) < vocabulary:
        raise InvalidInput(
            f"expected targets from 0 to {vocabulary - 1}, got {int(targets.min())} to {int(targets.max())}"
        )
    kl, nll, nll_full = (np.empty(positions) for _ in range(3))
    agree = np.empty(positions, dtype=np.bool_)
    for start in range(0, positions, _CHUNK):
        part = slice(start, start + _CHUNK)
        p, q = _log_p(reference[part], "reference", start), _log_p(restored[part], "restored", start)
        chosen = targets[part].long().to(p.device)[:, None]
        nll_full[part] = -p.gather(1, chosen)[:, 0].cpu().numpy()
        nll[part] = -q.gather(1, chosen)[:, 0].cpu().numpy()
        agree[part] = (p.argmax(dim=1) == q.argmax(dim=1)).cpu().numpy()
        kl[part] = torch.where(p.isneginf(), 0.0, p.exp() * (p - q)).sum(dim=1).cpu().numpy()
    for name, figures in (("KL", kl), ("NLL of restored", nll), ("NLL of reference", nll_full)):
        if not np.isfinite(figures).all():
            at = int(np.flatnonzero(~np.isfinite(figures))[0])
            raise InvalidInput(f"{name} at position {at}: expected a finite number, got {figures[at]}")
    return kl, nll, nll_full, agree


def _log_p(
    logits: Float[Tensor, "positions vocabulary"], name: str, start: int
) -> Float64[Tensor, "positions vocabulary"]:
    log_p = torch.log_softmax(logits.double(), dim=1)
    bad = log_p.isnan().any(dim=1)
    if bad.any():
        at = start + int(bad.nonzero()[0, 0])
        raise InvalidInput(f"{name} logits at position {at}: expected numbers below infinity, got NaN or infinity")
    return log_p


def _ratio(sums: np.ndarray) -> np.ndarray:
    """First column ÷ second, NaN where the second is not positive."""
    bottom = sums[..., 1]
    ratio: np.ndarray = np.where(bottom > 0, sums[..., 0], np.nan) / np.where(bottom > 0, bottom, 1.0)
    return ratio


def _ratio_less_one(sums: np.ndarray) -> np.ndarray:
    less_one: np.ndarray = np.expm1(_ratio(sums))
    return less_one


Name = Literal["kl", "dppl", "rcb", "top1_flips"]


def measure(windows: Sequence[WindowScore], name: Name) -> Measure:
    """One figure of the summary as sums over windows, ready for `bootstrap.paired` and `bootstrap.non_inferior`.

    "kl", "dppl" and "top1_flips" are better when lower, "rcb" when higher. Raises InvalidInput for "rcb" when no
    window has `nll_empty`, or only some have.
    """
    _check(windows)
    if name == "rcb" and not windows[0].has_empty:
        raise InvalidInput("rcb: expected nll_empty to be measured, got NaN in every window")
    columns = np.array([_columns(w, name) for w in windows], dtype=np.float64)
    return Measure(
        name,
        windows=tuple(f"{w.kind} {w.id} of {w.tokens} tokens" for w in windows),
        articles=tuple(w.article for w in windows),
        sums=columns,
        statistic=_ratio_less_one if name == "dppl" else _ratio,
        lower_is_better=name != "rcb",
        baselines=np.array([w.nll_full.mean() for w in windows]),
    )


def _columns(window: WindowScore, name: Name) -> tuple[float, float]:
    """What a window adds to the numerator and to the denominator."""
    if name == "rcb":
        empty = window.nll_empty
        return float((empty - window.nll).sum()), float((empty - window.nll_full).sum())
    figures = {"kl": window.kl, "dppl": window.nll - window.nll_full, "top1_flips": ~window.agree}
    return float(figures[name].sum()), float(window.tokens)


def _check(windows: Sequence[WindowScore]) -> None:
    if not windows:
        raise InvalidInput("expected at least one window, got none")
    measured = sum(w.has_empty for w in windows)
    if measured not in (0, len(windows)):
        raise InvalidInput(f"expected nll_empty for all windows or none, got it for {measured} of {len(windows)}")


@dataclass(frozen=True)
class Summary:
    """Figures over all windows. Intervals are 95 % BCa over articles, None where there is none (`bootstrap.bca`).

    `kl` is the mean in nats per token and `kl_p99` the 99th percentile over tokens. `dppl` is a fraction: 0.01 is 1 %
    more perplexity. `rcb` is None when the empty cache was not measured or was no worse than the full one.
    `top1_flips` is the fraction of tokens where the most likely token is *not* that of the uncompressed cache: 0 is
    best.
    """

    kl: float
    kl_ci: Interval | None
    kl_p99: float
    dppl: float
    dppl_ci: Interval | None
    rcb: float | None
    rcb_ci: Interval | None
    top1_flips: float
    windows: int
    articles: int
    tokens: int


def summarize(windows: Sequence[WindowScore], seed: int = 0) -> Summary:
    """The summary of one recipe's windows; the same seed draws the same articles for every recipe.

    Raises InvalidInput without windows, or when only some have `nll_empty`.
    """
    kl, dppl = measure(windows, "kl"), measure(windows, "dppl")
    rcb = measure(windows, "rcb") if windows[0].has_empty else None
    defined = rcb is not None and bool(np.isfinite(rcb.value))
    return Summary(
        kl=kl.value,
        kl_ci=kl.interval(seed=seed),
        kl_p99=float(np.quantile(np.concatenate([w.kl for w in windows]), 0.99)),
        dppl=dppl.value,
        dppl_ci=dppl.interval(seed=seed),
        rcb=rcb.value if rcb is not None and defined else None,
        rcb_ci=rcb.interval(seed=seed) if rcb is not None else None,
        top1_flips=measure(windows, "top1_flips").value,
        windows=len(windows),
        articles=len({w.article for w in windows}),
        tokens=sum(w.tokens for w in windows),
    )
