"""Token ids in few bits: without a model, and under one that is given as a function."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import DamagedArchive, InvalidInput, TokensMismatch
from kvcellar.language import idkernels as kernels
from kvcellar.language.idcode import MAX_ID, _start, decode_ids, encode_ids, raw_size
from kvcellar.language.modelcode import decode_under, encode_under, frequencies
from kvcellar.symbols.binarycoder import DECODE, ENCODE, TOP, flush

IDS = st.lists(st.one_of(st.integers(0, MAX_ID), st.integers(0, 300)), max_size=60)


def zipf(tokens: int, seed: int = 0) -> np.ndarray:
    """Ids with the ranks of words: P(k) ∝ 1/(k + 3), each after some that depend on the one before."""
    rng = np.random.default_rng(seed)
    weights = 1 / (np.arange(49_152) + 3)
    drawn = rng.choice(49_152, tokens, p=weights / weights.sum())
    again = rng.random(tokens) < 0.3
    for t in range(1, tokens):
        if again[t]:
            drawn[t] = (drawn[t - 1] * 7919 + 13) % 997
    return drawn.astype(np.int64)


@given(IDS)
@settings(max_examples=60, deadline=None)
def test_ids_come_back_and_never_grow(ids: list[int]) -> None:
    array = np.array(ids, np.int64)
    stream = encode_ids(array)
    assert np.array_equal(decode_ids(stream, len(ids)), array)
    assert len(stream) <= raw_size(array) + (len(ids) > 0)


@pytest.mark.parametrize("tokens", [1, 2, 1000, 4000])
def test_random_ids_cost_at_most_a_hundredth_more_than_packed(tokens: int) -> None:
    ids = np.random.default_rng(tokens).integers(0, 49_152, tokens)
    assert len(encode_ids(ids)) <= max(1.01 * raw_size(ids), raw_size(ids) + 1)


def test_ids_with_the_statistics_of_words_cost_far_less_than_packed() -> None:
    ids = zipf(4000)
    stream = encode_ids(ids)
    assert np.array_equal(decode_ids(stream, len(ids)), ids)
    assert 8 * len(stream) / len(ids) < 11.5  # packed: 16; drawn from about 8.5 bits


def test_a_repeated_text_costs_almost_nothing_the_second_time() -> None:
    ids = zipf(1500)
    assert len(encode_ids(np.tile(ids, 4))) < 1.15 * len(encode_ids(ids))


def test_the_compiled_walk_and_the_plain_one_write_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.concatenate([zipf(80), zipf(80)[20:70]])
    compiled, plain = (np.zeros(2000, np.uint8) for _ in range(2))
    places = [np.array([0, TOP, 0], np.int64) for _ in range(2)]
    assert kernels.walk(ENCODE, ids.copy(), 16, compiled, places[0], *_start(len(ids), 16)) == kernels.DONE
    with np.errstate(over="ignore"):
        assert kernels.walk.py_func(ENCODE, ids.copy(), 16, plain, places[1], *_start(len(ids), 16)) == kernels.DONE
        assert np.array_equal(places[0], places[1])
        stop = flush(plain, places[1][2], places[1][0])
        assert flush(compiled, places[0][2], places[0][0]) == stop
        assert np.array_equal(compiled, plain)
        read, first = np.zeros(len(ids), np.int64), int.from_bytes(plain[:5].tobytes(), "big")
        place = np.array([first, TOP, 5], np.int64)
        done = kernels.walk.py_func(DECODE, read, 16, plain[:stop], place, *_start(len(ids), 16))
    assert done == kernels.DONE
    assert np.array_equal(read, ids)


def test_ids_that_are_none_are_refused() -> None:
    for ids in ([-1], [MAX_ID + 1]):
        with pytest.raises(InvalidInput, match="expected 0"):
            encode_ids(np.array(ids, np.int64))


@pytest.mark.parametrize("stream", [b"", b"\xff12", b"\x0f", b"\x2f" + bytes(3), b"\x0f1234567"])
def test_streams_that_cannot_hold_the_ids_are_refused(stream: bytes) -> None:
    with pytest.raises(DamagedArchive, match="token ids"):
        decode_ids(stream, 1 << 26)


def test_a_stream_cut_short_is_noticed() -> None:
    stream = encode_ids(zipf(500))
    with pytest.raises(DamagedArchive):
        decode_ids(stream[: len(stream) // 2], 500)


class Toy:
    """A model whose logits depend on all tokens before, through a number."""

    def __init__(self, vocabulary: int, sharpness: float):
        self.vocabulary, self.sharpness, self.state, self.steps = vocabulary, sharpness, 0, 0

    def __call__(self, token: int) -> np.ndarray:
        self.state, self.steps = (31 * self.state + token + 1) % 1_000_003, self.steps + 1
        drawn = np.random.default_rng(self.state).normal(size=self.vocabulary)
        return (drawn * self.sharpness).astype(np.float32)

    def sample(self, tokens: int) -> tuple[np.ndarray, float]:
        """Ids from the model's own distribution, and the bits they take under it."""
        rng, ids, bits = np.random.default_rng(1), [0], float(np.log2(self.vocabulary))
        while len(ids) < tokens:
            p = np.exp(self(ids[-1]).astype(np.float64))
            p /= p.sum()
            ids.append(int(rng.choice(self.vocabulary, p=p)))
            bits -= float(np.log2(p[ids[-1]]))
        return np.array(ids, np.int64), bits


@pytest.mark.parametrize(("vocabulary", "sharpness"), [(2, 0.1), (300, 8.0), (5000, 3.0), (128, 0.0)])
def test_ids_under_a_model_take_its_entropy(vocabulary: int, sharpness: float) -> None:
    ids, bits = Toy(vocabulary, sharpness).sample(400)
    stream = encode_under(ids, vocabulary, Toy(vocabulary, sharpness), 1 << 30)
    assert stream is not None
    assert len(stream) <= 1.002 * bits / 8 + 3
    again = Toy(vocabulary, sharpness)
    assert np.array_equal(decode_under(stream, 400, vocabulary, again), ids)
    assert again.steps == 400  # the last token is read as well, so that the cache is complete


def test_the_encoder_stops_where_another_code_is_smaller() -> None:
    ids = np.random.default_rng(0).integers(0, 300, 200)
    model = Toy(300, 30.0)
    assert encode_under(ids, 300, model, 100) is None
    assert model.steps < 200


def test_one_improbable_token_after_another_has_a_bounded_price() -> None:
    model, ids = Toy(300, 40.0), [5]
    for _ in range(60):
        ids.append(int(model(ids[-1]).argmin()))
    stream = encode_under(np.array(ids), 300, Toy(300, 40.0), 1 << 30)
    assert stream is not None
    assert len(stream) <= 61 * 36 / 8
    assert decode_under(stream, 61, 300, Toy(300, 40.0)).tolist() == ids


def test_frequencies_are_integers_of_at_least_one() -> None:
    found = frequencies(np.array([0.0, -1.0, -1000.0, -np.inf], np.float32))
    assert found.tolist() == [(1 << 28) + 1, int(2**28 * np.exp(-1)) + 1, 1, 1]
    for logits in ([np.nan, 0.0], [np.inf, 0.0], [-np.inf, -np.inf]):
        with pytest.raises(InvalidInput, match="logits"):
            frequencies(np.array(logits, np.float32))


def test_ids_outside_the_vocabulary_are_refused_before_the_model_runs() -> None:
    model = Toy(300, 1.0)
    with pytest.raises(TokensMismatch, match=r"token id 300; .* 0…299"):
        encode_under(np.array([1, 300]), 300, model, 1000)
    assert model.steps == 0


def test_a_stream_of_another_model_ends_or_gives_other_ids() -> None:
    ids, _ = Toy(300, 3.0).sample(100)
    stream = encode_under(ids, 300, Toy(300, 3.0), 1 << 30)
    assert stream is not None
    with contextlib.suppress(DamagedArchive):
        assert not np.array_equal(decode_under(stream, 100, 300, Toy(300, 2.9)), ids)
