"""Measured errors of reduction against the spectrum of Σ, on instances that are easy, hard, and in between.

    python benchmarks/risk_theory.py     measure, write benchmarks/results/risk_theory.json and docs/risk-theory.png

- `repeated`: one sentence over and over; tokens of a place in it differ by a little noise. Few directions of Σ matter.
- `lookup`: keys all sharply distinct, values unrelated, every key asked for alike. Σ is flat, so nothing may be dropped
  without losing its answer, and queries known beforehand hardly help.
- `topics`: in between, tokens around topics of which few are common.

The same instances as texts that grow: what a binary counter of summaries misses at length t, beside
log(2 + t/K)·tr(Σ)/K, the streaming bound.

ν is a sample of queries; query-aware reducers are given it, and the error is the mean of ‖ô − o‖² over it. Fitted are
the slopes of log error against log tr(Σ)/K for `random` and against log tail_{K/3}(Σ)/K for `balanced`, which keeps K/3
directions of Γ: 1 where the bounds say how the error goes. `matching` also fits values anew, which no reweighting does.
Unlike the other benchmarks this one is not about real caches: its point is that the instances are extreme.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from common import machine, write_result
from kvcellar.reduce.balanced import Balanced
from kvcellar.reduce.matching import Matching
from kvcellar.reduce.random import RandomSubset
from kvcellar.reduce.response import errors, responses
from kvcellar.reduce.tokens import Reducer, Weighted
from kvcellar.reduce.tree import Buckets, Merge

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "risk-theory.png"
TOKENS, WIDTH = 256, 32
SCALE = WIDTH**-0.5
QUERIES = 256
KEEPS = (16, 32, 64, 128)
SEEDS = 5
GROWING_SEEDS, GROWING_KEEP, LENGTHS = 20, 64, (128, 256, 512, 1024)


class Instance(NamedTuple):
    name: str
    strength: float
    tokens: Weighted
    queries: torch.Tensor


def _plain(keys: torch.Tensor, values: torch.Tensor) -> Weighted:
    return Weighted(keys, values, torch.arange(len(keys)), torch.zeros(len(keys)))


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=1, keepdim=True)


def repeated(noise: float, seed: int, count: int = TOKENS) -> Instance:
    """A sentence of 16 tokens over and over; `noise` relative to the distance of its tokens."""
    g = torch.Generator().manual_seed(seed)
    place = torch.arange(count) % 16
    keys, values = 3 * torch.randn(16, WIDTH, generator=g)[place], torch.randn(16, WIDTH, generator=g)[place]
    keys = keys + noise * 3 * torch.randn(count, WIDTH, generator=g)
    values = values + noise * torch.randn(count, WIDTH, generator=g)
    return Instance("repeated", noise, _plain(keys, values), torch.randn(QUERIES, WIDTH, generator=g))


def lookup(sharpness: float, seed: int, count: int = TOKENS) -> Instance:
    """Every key is asked for once; the right one gets exp(`sharpness`) times the attention of an unrelated one."""
    g = torch.Generator().manual_seed(seed)
    keys = _unit(torch.randn(count, WIDTH, generator=g)) * (sharpness / SCALE) ** 0.5
    return Instance("lookup", sharpness, _plain(keys, torch.randn(count, WIDTH, generator=g)), keys.clone())


def topics(spread: float, seed: int, count: int = TOKENS) -> Instance:
    """24 topics, the i-th as common as 1/i; tokens keep a distance of `spread` from their topic."""
    g = torch.Generator().manual_seed(seed)
    often = 1 / torch.arange(1, 25).float()
    topic = torch.multinomial(often, count, replacement=True, generator=g)
    keys = 2 * torch.randn(24, WIDTH, generator=g)[topic] + 2 * spread * torch.randn(count, WIDTH, generator=g)
    values = torch.randn(24, WIDTH, generator=g)[topic] + spread * torch.randn(count, WIDTH, generator=g)
    return Instance("topics", spread, _plain(keys, values), torch.randn(QUERIES, WIDTH, generator=g))


FAMILIES: tuple[tuple[Callable[..., Instance], tuple[float, ...]], ...] = (
    (repeated, (0.03, 0.1, 0.2)),
    (lookup, (4.0, 6.0, 8.0)),
    (topics, (0.1, 0.3, 0.6)),
)


def reducers(keep: int) -> dict[str, Reducer]:
    return {
        "random": RandomSubset(),
        "balanced": Balanced(features="responses", protected=max(1, keep // 3)),
        "matching": Matching(),
    }


def missed(instance: Instance, reducer: Reducer, keep: int, seed: int) -> float:
    """Mean of ‖ô − o‖² over the queries."""
    generator = torch.Generator().manual_seed(seed)
    reduced = reducer.reduce(instance.tokens, keep, instance.queries, SCALE, generator)
    return float(errors(instance.tokens, reduced, instance.queries, SCALE).square().sum(dim=1).mean())


def rows(seeds: int = SEEDS, keeps: tuple[int, ...] = KEEPS) -> Iterator[dict[str, Any]]:
    """One row for each instance and K: bounds, and the mean error of each reducer over `seeds` texts."""
    for family, strengths in FAMILIES:
        for strength in strengths:
            made = [family(strength, seed) for seed in range(seeds)]
            profiles = [responses(i.tokens, i.queries, SCALE) for i in made]
            for keep in keeps:
                found = {
                    name: sum(missed(i, reducer, keep, seed) for seed, i in enumerate(made)) / seeds
                    for name, reducer in reducers(keep).items()
                }
                yield {
                    "instance": made[0].name,
                    "strength": strength,
                    "keep": keep,
                    "effective_rank": sum(p.effective_rank for p in profiles) / seeds,
                    "trace_over_k": sum(p.agnostic_bound(keep) for p in profiles) / seeds,
                    "tail_over_k": sum(p.aware_bound(keep) for p in profiles) / seeds,
                    "expected_random": sum(p.sampling_error(keep) for p in profiles) / seeds,
                    "error": found,
                }


def growing(seeds: int = GROWING_SEEDS, lengths: tuple[int, ...] = LENGTHS) -> Iterator[dict[str, Any]]:
    """One row for each instance and length t of a growing text: what a binary counter of summaries of `GROWING_KEEP`
    random tokens misses, beside tr(Σ)/K of one reduction and log(2 + t/K) times that."""
    for family, strengths in FAMILIES:
        strength = strengths[len(strengths) // 2]
        missed_at: dict[int, list[float]] = {t: [] for t in lengths}
        traces: dict[int, list[float]] = {t: [] for t in lengths}
        for seed in range(seeds):
            made = family(strength, seed, lengths[-1])
            buckets = Buckets(Merge(RandomSubset(), GROWING_KEEP, SCALE, seed=seed))
            for start in range(0, lengths[-1], GROWING_KEEP):
                buckets.push(made.tokens[start : start + GROWING_KEEP])
                t = start + GROWING_KEEP
                if t in missed_at:
                    # in a lookup every token so far is asked for, and none that is still to come
                    asked = made.queries[:t] if len(made.queries) == len(made.tokens) else made.queries
                    before, reduced = made.tokens[:t], buckets.before()
                    assert reduced is not None
                    missed_at[t].append(float(errors(before, reduced, asked, SCALE).square().sum(dim=1).mean()))
                    traces[t].append(responses(before, asked, SCALE).agnostic_bound(GROWING_KEEP))
        for t in lengths:
            once = sum(traces[t]) / seeds
            yield {
                "instance": made.name,
                "strength": strength,
                "tokens": t,
                "keep": GROWING_KEEP,
                "trace_over_k": once,
                "streaming_bound": math.log(2 + t / GROWING_KEEP) * once,
                "error": sum(missed_at[t]) / seeds,
            }


def slope(bounds: list[float], measured: list[float]) -> float:
    """Of the least-squares line through (log bound, log measured)."""
    x, y = ([math.log(v) for v in values] for values in (bounds, measured))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    across = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return across / sum((a - mean_x) ** 2 for a in x)


def slopes(measured: list[dict[str, Any]]) -> dict[str, float]:
    """`random` against tr(Σ)/K and against its expected error, `balanced` against tail_{K/3}(Σ)/K."""

    def of(bound: str, name: str) -> float:
        return slope([row[bound] for row in measured], [row["error"][name] for row in measured])

    return {
        "random against trace_over_k": of("trace_over_k", "random"),
        "random against expected_random": of("expected_random", "random"),
        "balanced against tail_over_k": of("tail_over_k", "balanced"),
    }


def draw(measured: list[dict[str, Any]], path: Path) -> None:
    """Left: error against bound. Right: what knowing the queries is worth, by K."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"repeated": "tab:green", "topics": "tab:blue", "lookup": "tab:red"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5))
    for name, colour in colours.items():
        own = [row for row in measured if row["instance"] == name]
        for bound, method, mark in (("trace_over_k", "random", "o"), ("tail_over_k", "balanced", "x")):
            label = f"{name}: {method} against {'tr(Σ)/K' if mark == 'o' else 'tail(Σ)/K'}"
            left.loglog([r[bound] for r in own], [r["error"][method] for r in own], mark, color=colour, label=label)
        strongest = [r for r in own if r["strength"] == own[len(own) // 2]["strength"]]
        for method, line in (("random", "--"), ("balanced", "-"), ("matching", ":")):
            errors_ = [r["error"][method] for r in strongest]
            right.loglog([r["keep"] for r in strongest], errors_, line, color=colour, label=f"{name}: {method}")
    ends = [min(r["tail_over_k"] for r in measured), max(r["trace_over_k"] for r in measured)]
    left.loglog(ends, ends, color="grey", linewidth=0.8)
    left.set(xlabel="bound", ylabel="mean squared error of what queries read")
    right.set(xlabel=f"K of {TOKENS} tokens", ylabel="mean squared error")
    for axes in (left, right):
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    measured = []
    for row in rows():
        measured.append(row)
        shown = "  ".join(f"{name} {value:.2e}" for name, value in row["error"].items())
        print(f"{row['instance']:9} {row['strength']:<5g} K {row['keep']:<4} {shown}", flush=True)
    longer = list(growing())
    for row in longer:
        share = row["error"] / row["streaming_bound"]
        print(f"{row['instance']:9} t {row['tokens']:<5} error {row['error']:.2e} = {share:.2f} log(2 + t/K) tr(Σ)/K")
    result = {
        "machine": machine(),
        "seeds": SEEDS,
        "tokens": TOKENS,
        "slopes": slopes(measured),
        "rows": measured,
        "growing_seeds": GROWING_SEEDS,
        "growing_slope": slope([r["streaming_bound"] for r in longer], [r["error"] for r in longer]),
        "growing": longer,
    }
    draw(measured, PICTURE)
    print(write_result("risk_theory", result))
    print({name: round(value, 3) for name, value in result["slopes"].items()})


if __name__ == "__main__":
    main()
