"""KL against its formula, retained context benefit by hand, what a summary says and refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvcellar.errors import InvalidInput
from kvcellar.evaluate.bootstrap import non_inferior, paired
from kvcellar.evaluate.divergence import kl_divergence
from kvcellar.evaluate.scores import WindowScore, measure, score_logits, summarize


def logits(n: int = 150, vocabulary: int = 37, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    reference = torch.from_numpy(rng.normal(size=(n, vocabulary)) * 3)
    restored = reference + torch.from_numpy(rng.normal(size=(n, vocabulary)) * 0.3)
    return reference, restored, torch.from_numpy(rng.integers(0, vocabulary, n))


def window(article: str = "a", n: int = 4, **given: Any) -> WindowScore:
    numbers = {"kl": 0.1, "nll": 2.5, "nll_full": 2.0, "nll_empty": 3.0, **given}
    arrays = {
        k: np.broadcast_to(np.float64(v), n).copy() for k, v in numbers.items() if k not in ("agree", "kind", "id")
    }
    agree = np.broadcast_to(np.bool_(given.get("agree", True)), n).copy()
    return WindowScore(article=article, kind=given.get("kind", "docs"), agree=agree, id=given.get("id", ""), **arrays)


def test_scores_agree_with_the_formulas() -> None:
    reference, restored, targets = logits()
    kl, nll, nll_full, agree = score_logits(reference, restored, targets)
    for i in range(len(targets)):
        p, q = (np.exp(x[i].numpy()) / np.exp(x[i].numpy()).sum() for x in (reference, restored))
        assert kl[i] == pytest.approx((p * np.log(p / q)).sum(), rel=1e-9, abs=1e-14)
        assert nll[i] == pytest.approx(-np.log(q[targets[i]]), rel=1e-12)
        assert nll_full[i] == pytest.approx(-np.log(p[targets[i]]), rel=1e-12)
        assert agree[i] == (p.argmax() == q.argmax())
    assert 0 < agree.mean() < 1
    np.testing.assert_allclose(kl, kl_divergence(reference, restored).numpy(), rtol=0, atol=1e-15)
    assert [a.dtype for a in (kl, nll, nll_full, agree)] == [np.float64] * 3 + [np.bool_]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_equal_bits_have_no_divergence(dtype: torch.dtype) -> None:
    reference, _, targets = logits()
    reference = (reference * 5).to(dtype)
    kl, nll, nll_full, agree = score_logits(reference, reference.clone(), targets)
    assert (kl == 0).all()
    assert (nll == nll_full).all()
    assert agree.all()


def test_small_differences_survive() -> None:
    """A shift of 1e-6 in one logit: KL = p (1 − p) ε² / 2 is far below float32's resolution of the logits."""
    reference = torch.zeros(1, 2, dtype=torch.float64)
    restored = torch.tensor([[1e-6, 0.0]], dtype=torch.float64)
    kl, *_ = score_logits(reference, restored, torch.tensor([0]))
    assert kl[0] == pytest.approx(0.125e-12, rel=1e-3)


def test_a_constant_added_to_all_logits_changes_nothing() -> None:
    reference, _, targets = logits()
    kl, *_ = score_logits(reference, reference + 7, targets)
    assert np.abs(kl).max() < 1e-13


def test_masked_tokens_have_no_probability() -> None:
    reference = torch.tensor([[0.0, 1.0, -math.inf]])
    kl, nll, _, agree = score_logits(reference, reference.clone(), torch.tensor([1]))
    assert (kl[0], agree[0]) == (0.0, True)
    assert nll[0] == pytest.approx(math.log(1 + math.exp(-1)))
    kl, *_ = score_logits(reference, torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([1]))
    assert kl[0] > 0
    with pytest.raises(InvalidInput, match="KL at position 0"):
        score_logits(torch.tensor([[0.0, 1.0, 0.0]]), reference, torch.tensor([1]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_logits_that_are_no_numbers_are_refused(bad: float, which: int) -> None:
    sides = list(logits())
    sides[which][99, 5] = bad
    with pytest.raises(InvalidInput, match=f"{('reference', 'restored')[which]} logits at position 99"):
        score_logits(*sides)


@pytest.mark.parametrize("target", [-1, 37])
def test_targets_outside_the_vocabulary_are_refused(target: int) -> None:
    reference, restored, targets = logits()
    targets[3] = target
    with pytest.raises(InvalidInput, match=f"0 to 36, got .*{target}"):
        score_logits(reference, restored, targets)


@pytest.mark.usefixtures("quick")
def test_shapes_that_do_not_fit_are_refused() -> None:
    reference, restored, targets = logits()
    for wrong in (
        (reference[1:], restored, targets),
        (reference, restored[:, 1:], targets),
        (reference, restored, targets[1:]),
    ):
        with pytest.raises(InvalidInput, match=r"expected logits \(n, V\)"):
            score_logits(*wrong)


def test_no_positions_no_scores() -> None:
    empty = torch.zeros(0, 5)
    assert [len(part) for part in score_logits(empty, empty, torch.zeros(0, dtype=torch.int64))] == [0] * 4


def test_retained_context_benefit_is_a_ratio_of_sums() -> None:
    """Window a: (3 − 2.5)·4 = 2 of (3 − 2)·4 = 4. Window b, where context hurts: −1 of −0.5. Together 1 of 3.5."""
    a = window("a")
    b = window("b", n=1, nll=3.0, nll_full=2.5, nll_empty=2.0)
    assert summarize([a]).rcb == 0.5
    assert summarize([a, b]).rcb == pytest.approx(1 / 3.5)
    assert summarize([b]).rcb is None
    assert summarize([b]).rcb_ci is None


def test_the_ends_of_the_scale() -> None:
    articles = [f"{i}" for i in range(12)]
    full = np.random.default_rng(0).exponential(size=12)
    exact = [window(a, nll=x, nll_full=x, nll_empty=x + 1, kl=0.0) for a, x in zip(articles, full, strict=True)]
    best = summarize(exact)
    assert (best.rcb, best.rcb_ci) == (1.0, (1.0, 1.0))
    assert (best.kl, best.kl_ci, best.kl_p99, best.dppl, best.dppl_ci) == (0.0, (0.0, 0.0), 0.0, 0.0, (0.0, 0.0))
    empty = summarize([replace(w, nll=w.nll_empty) for w in exact])
    assert (empty.rcb, empty.rcb_ci) == (0.0, (0.0, 0.0))


def test_summary_by_hand() -> None:
    a = window("a", n=3, kl=[0.1, 0.2, 0.3], nll=2.2, agree=[True, False, True])
    b = window("b", n=1, kl=0.6, nll=2.6, agree=False)
    c = replace(b, nll=np.array([2.0]))
    found = summarize([a, b, c])
    assert found.kl == pytest.approx(1.8 / 5)
    assert found.kl_p99 == pytest.approx(0.6)
    assert found.dppl == pytest.approx(math.exp((3 * 0.2 + 0.6) / 5) - 1)
    assert found.rcb == pytest.approx((3 * 0.8 + 0.4 + 1) / 5)
    assert found.top1_flips == pytest.approx(3 / 5)
    assert (found.windows, found.articles, found.tokens) == (3, 2, 5)


def test_intervals_hold_the_estimate_and_follow_the_seed() -> None:
    rng = np.random.default_rng(1)
    windows = [window(f"{i // 2}", kl=rng.exponential(), nll=2 + rng.normal() / 9) for i in range(40)]
    found = summarize(windows)
    for value, ci in ((found.kl, found.kl_ci), (found.dppl, found.dppl_ci), (found.rcb, found.rcb_ci)):
        assert ci is not None
        assert value is not None
        assert ci[0] < value < ci[1]
    assert summarize(windows) == found
    assert summarize(windows, seed=1).kl_ci != found.kl_ci


def test_one_article_has_no_interval() -> None:
    found = summarize([window(), window(kl=0.3)])
    assert (found.kl_ci, found.dppl_ci, found.rcb_ci) == (None, None, None)
    assert found.kl == pytest.approx(0.2)


def test_without_the_empty_cache_there_is_no_rcb() -> None:
    windows = [window("a", nll_empty=math.nan), window("b", nll_empty=math.nan)]
    assert summarize(windows).rcb is None
    assert summarize(windows).rcb_ci is None
    with pytest.raises(InvalidInput, match="rcb"):
        measure(windows, "rcb")
    with pytest.raises(InvalidInput, match="1 of 2"):
        summarize([windows[0], window("b")])


def test_no_window_is_refused() -> None:
    with pytest.raises(InvalidInput, match="got none"):
        summarize([])


@pytest.mark.parametrize("name", ["kl", "nll", "nll_full"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_no_numbers_are_refused(name: str, bad: float) -> None:
    with pytest.raises(InvalidInput, match=f"{name}: expected finite"):
        window(**{name: [0.0, 1.0, bad, 1.0]})


@pytest.mark.usefixtures("quick")
def test_windows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidInput, match="mixture"):
        window(nll_empty=[1.0, math.nan, 1.0, 1.0])
    with pytest.raises(InvalidInput, match="equal lengths"):
        replace(window(), kl=np.zeros(3))
    with pytest.raises(InvalidInput, match="equal lengths"):
        window(n=0)


def test_recipes_are_compared_on_the_same_windows() -> None:
    rng = np.random.default_rng(6)
    b = [window(f"{i}", kl=rng.exponential(), id=f"{i:x}") for i in range(20)]
    a = [replace(w, kl=w.kl + 0.01) for w in b]
    found = paired(measure(a, "kl"), measure(b, "kl"))
    assert found.value == pytest.approx(0.01)
    assert non_inferior(measure(a, "kl"), measure(b, "kl"), 0.011)
    assert not non_inferior(measure(a, "kl"), measure(b, "kl"), 0.009)
    with pytest.raises(InvalidInput, match="same windows"):
        paired(measure(a, "kl"), measure([replace(b[0], id="x"), *b[1:]], "kl"))
    with pytest.raises(InvalidInput, match="uncompressed scores"):
        paired(measure(a, "kl"), measure([replace(b[0], nll_full=b[0].nll_full + 0.1), *b[1:]], "kl"))


def test_a_better_rcb_is_a_higher_one() -> None:
    better, worse = ([window(f"{i}", nll=nll) for i in range(9)] for nll in (2.1, 2.3))
    assert non_inferior(measure(better, "rcb"), measure(worse, "rcb"), 0.0)
    assert not non_inferior(measure(worse, "rcb"), measure(better, "rcb"), 0.1)
