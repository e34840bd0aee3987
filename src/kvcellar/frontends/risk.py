"""The risk profile of a model on a text: what each head can lose, as predicted and as it turned out.

The text's first T tokens are the cache. For each KV head

- *predicted*, from the cache and the document's own queries ν alone, turned to later positions. In theory: spectrum,
  trace and tails of the response covariance Σ (`reduce/response.py`), the expected error of a random subset to first
  order (`sampling`), and tail_{K/3}(Σ)/K (`aware`) for methods that look at queries or features. By trial
  (`expected`): the error of the method itself on ν, of one that draws over several draws, of one fitted to queries on
  the half of ν that it was not fitted to. Where K is small and attention is sharp, the first order overestimates;
- *measured*, on the queries of the next tokens of the same text, which nothing was chosen by: mean ‖ô − o‖² of each
  method at each K, and of `random` the mean over seeds.

Both count sinks and recent tokens in what is read. Errors are in squared units of what a head reads; relative ones are
divided by the mean of ‖o‖² over ν. Whether the prediction holds is said by the rank correlation over heads (Spearman
1904) and the slope of log measured error over log predicted error, by least squares.

Source: "The risk of KV cache compression" (Haverbeck et al. 2026). Importing this imports transformers. Tried on: CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from torch import Tensor

from ..cache import KVCache
from ..errors import InvalidInput, UnsupportedCache
from ..reduce.response import ResponseProfile, responses
from ..reduce.tokens import joined
from ..reduce.weighted import RECENT, SINKS, Reducer, Weighted, reduce_head
from .bench.ratebits import spearman
from .cli.common import progress
from .cli.models import LocalModel, empty_cache, held_in
from .queries import collect_queries, turns_or_none
from .reduce import number_to_keep
from .riskqueries import own_asked
from .transformers import take_cache

SEEDS = 5
QUERIES = 256
AGNOSTIC = "random"
"""The method that draws, and whose error `sampling_error` is an expectation of."""
TRIALS = 2
"""How many times as many draws predict as are measured."""
BESIDE = SINKS + RECENT


def slots_for(keep: Sequence[float], tokens: int) -> dict[float, int]:
    """Slots of each kept fraction. Raises InvalidInput for one that leaves nothing to choose."""
    found = {fraction: number_to_keep(float(fraction), tokens, 0) for fraction in keep}
    for fraction, slots in found.items():
        if not BESIDE < slots < tokens:
            raise InvalidInput(
                f"{fraction:g} of {tokens} tokens are {slots}; expected over {BESIDE}, the sinks and recent tokens "
                f"that stay anyway, and fewer than {tokens}"
            )
    if not found:
        raise InvalidInput("no kept fraction given; expected at least one")
    return found


class Text:
    """A text read by the model: the cache of its first tokens, ν, and what its next tokens ask."""

    def __init__(self, local: LocalModel, ids: Sequence[int], tokens: int, *, queries: int = QUERIES, seed: int = 0):
        """Reads `ids`, of which `tokens` are the cache. Raises InvalidInput when nothing follows them,
        UnsupportedCache for a model whose layers do not hold every token each."""
        if not BESIDE < tokens < len(ids):
            raise InvalidInput(
                f"a text of {len(ids)} tokens, {tokens} of them the cache; expected a cache of over {BESIDE}, and more "
                "text behind it"
            )
        cache, model = empty_cache(), local.model
        local.prefill(list(ids[:tokens]), cache, quiet=True)
        held_in(cache, getattr(local, "cache_dtype", model.dtype))
        self.kv: KVCache = take_cache(cache)
        if not any(layer.dense and not layer.window and not layer.empty for layer in self.kv.layers):
            raise UnsupportedCache("no layer that holds every token: there is nothing to reduce")
        prefix = np.array(ids[:tokens], np.int64)
        turns = turns_or_none(model, self.kv, prefix)
        self.later = turns is not None
        self.asked = own_asked(local, self.kv, prefix).later(turns, tokens, queries, seed=seed)
        held_in(cache, model.dtype)
        with collect_queries(model, len(ids) - tokens) as behind:
            local.prefill(list(ids[tokens:]), cache, quiet=True)
        self.behind, self.scales = behind.layers, behind.scales

    @property
    def heads(self) -> list[tuple[int, int]]:
        """(layer, KV head) of all that can be reduced."""
        return [
            (i, h)
            for i, kv in enumerate(self.kv.layers)
            if kv.dense and not kv.window and not kv.empty
            for h in range(kv.keys.shape[0])
        ]

    def of_head(self, layer: int, head: int) -> tuple[Weighted, Tensor, Tensor, float]:
        """A head's tokens in float32, ν (q, width) of all query heads that read it, the next tokens' queries, scale."""
        kv = self.kv.layers[layer]
        tokens = Weighted.of(kv)[head]
        tokens = Weighted(tokens.keys.float(), tokens.values.float(), tokens.positions, tokens.log_weights)
        group = self.asked[layer].shape[0] // kv.keys.shape[0]
        rows = slice(head * group, (head + 1) * group)
        own, behind = (side[layer][rows].float().flatten(0, 1) for side in (self.asked, self.behind))
        return tokens, own, behind, self.scales[layer]


def risks(
    text: Text,
    keep: Sequence[float],
    methods: Mapping[str, Reducer],
    *,
    seeds: int = SEEDS,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """A row for each head: `layer head trace effective_rank cost read` and, for each kept fraction, what was predicted
    and measured. `cost` is the trace of what is read, `read` the mean of ‖o‖² over ν. Raises InvalidInput."""
    if seeds < 1:
        raise InvalidInput(f"{seeds} seeds; expected at least 1")
    slots = slots_for(keep, len(text.kv))
    rows: list[dict[str, Any]] = []
    with progress(f"risk of {len(text.heads)} heads", len(text.heads), quiet=quiet) as advance:
        for layer, head in text.heads:
            tokens, own, behind, scale = text.of_head(layer, head)
            middle, rest = _apart(tokens)
            profile = responses(middle, own, scale, rest)
            read = float(tokens.attend(own, scale).square().sum(dim=1).mean())
            # Each head has draws of its own, and what predicts others than what is measured.
            draws = [seed * len(text.heads) + len(rows) for seed in range((1 + TRIALS) * seeds)]
            at = {}
            for fraction, count in slots.items():
                found: dict[str, dict[str, float]] = {"expected": {}, "measured": {}}
                for name, reducer in methods.items():
                    drawn = name == AGNOSTIC
                    half = slice(0, None, 2) if reducer.needs_queries else slice(0, 0)
                    other = slice(1, None, 2) if reducer.needs_queries else slice(None)
                    one = _Trial(reducer, tokens, count, scale)
                    found["expected"][name] = one.error(own[half], own[other], draws[seeds:] if drawn else [0])
                    found["measured"][name] = one.error(own, behind, draws[:seeds] if drawn else [0])
                at[f"{fraction:g}"] = {"slots": count, **_bounds(profile, count - BESIDE), **found}
            rows.append(
                {
                    "layer": layer,
                    "head": head,
                    "trace": profile.trace,
                    "effective_rank": profile.effective_rank,
                    "cost": profile.sampling_error(1),
                    "read": read,
                    "spectrum": profile.spectrum[:64].tolist(),
                    "keep": at,
                }
            )
            advance(1)
    return rows


def _apart(tokens: Weighted) -> tuple[Weighted, Weighted]:
    """The tokens a reducer chooses among, and the sinks and recent ones beside them."""
    first, middle, last = tokens[:SINKS], tokens[SINKS:-RECENT], tokens[-RECENT:]
    return middle, joined([first, last])


def _bounds(profile: ResponseProfile, keep: int) -> dict[str, float]:
    return {
        "sampling": profile.sampling_error(keep),
        "agnostic": profile.agnostic_bound(keep),
        "aware": profile.aware_bound(keep),
        "tail": profile.tail(keep // 3),
    }


class _Trial(NamedTuple):
    """A method on a head's tokens."""

    reducer: Reducer
    tokens: Weighted
    keep: int
    scale: float

    def error(
        self, own: Float[Tensor, "own width"], asked: Float[Tensor, "asked width"], seeds: Sequence[int]
    ) -> float:
        """Mean ‖ô − o‖² over the queries `asked` and the seeds, when the method goes by the queries `own`."""
        whole, found = self.tokens.attend(asked, self.scale), []
        for seed in seeds:
            queries = own if len(own) else None
            reduced = reduce_head(self.reducer, self.tokens, self.keep, queries=queries, scale=self.scale, seed=seed)
            found.append(float((reduced.attend(asked, self.scale) - whole).square().sum(dim=1).mean()))
        return sum(found) / len(found)


def predictors(method: str) -> tuple[str, ...]:
    """Which predictions go with a method's measured error, the best first."""
    theory: dict[str, tuple[str, ...]] = {AGNOSTIC: ("sampling",), "streaming": ()}
    return ("expected", *theory.get(method, ("aware",)))


def predicted_error(row: Mapping[str, Any], keep: str, method: str, by: str) -> float:
    """A head's predicted error under a method, in squared units of what it reads."""
    at = row["keep"][keep]
    return float(at["expected"][method] if by == "expected" else at[by])


def agreement(rows: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> list[dict[str, Any]]:
    """For each method, kept fraction and predictor how measured errors of heads follow predicted ones: `spearman`, and
    the log–log `slope`, None where heads do not vary; `ratio` is the median of measured ÷ predicted."""
    found = []
    for method in methods:
        for by in predictors(method):
            for fraction in rows[0]["keep"]:
                was = [row["keep"][fraction]["measured"][method] for row in rows]
                said = [predicted_error(row, fraction, method, by) for row in rows]
                found.append({"method": method, "keep": float(fraction), "predictor": by, **law(said, was)})
    return found


def law(said: Sequence[float], was: Sequence[float]) -> dict[str, Any]:
    """How errors measured on heads follow predicted ones."""
    pairs = np.array([pair for pair in zip(said, was, strict=True) if min(pair) > 0]).reshape(-1, 2)
    varies = len(pairs) > 1 and float(pairs[:, 0].std()) > 0
    return {
        "heads": len(pairs),
        "spearman": spearman(np.array(said), np.array(was)) if len(said) > 1 else None,
        "slope": float(np.polyfit(np.log(pairs[:, 0]), np.log(pairs[:, 1]), 1)[0]) if varies else None,
        "ratio": float(np.median(pairs[:, 1] / pairs[:, 0])) if len(pairs) else None,
    }


def mean_errors(rows: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> list[dict[str, Any]]:
    """For each method and kept fraction the mean over heads of the measured error ÷ `read`."""
    return [
        {
            "method": method,
            "keep": float(fraction),
            "slots": rows[0]["keep"][fraction]["slots"],
            "relative_error": float(np.mean([row["keep"][fraction]["measured"][method] / row["read"] for row in rows])),
        }
        for method in methods
        for fraction in rows[0]["keep"]
    ]
