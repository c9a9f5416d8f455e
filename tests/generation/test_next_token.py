"""The choice of the next token: the set that it may come from, each token's frequency, and results that rounding must
not change.
"""
from math import inf, nan

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from reference import counter_rng
from reference.errors import UserError
from reference.generation.decoding import Sampling, allowed_tokens, next_token
from reference.ops import softmax
from tests.deep import every_other_deep

TIED = st.lists(st.integers(1, 6), min_size=1, max_size=12).map(lambda counts: np.array(counts) / sum(counts))
LOGITS = st.tuples(st.integers(1, 40), st.integers(0, 2**32 - 1)).map(
    lambda drawn: np.random.default_rng(drawn[1]).normal(0, 2, drawn[0]))
DRAWS = st.integers(0, 2**32 - 1).map(lambda bits: (bits + 0.5) * 2.0**-32)


@given(TIED, st.integers(1, 13))
def test_top_k_leaves_the_k_likeliest_and_of_equals_the_first(probs, k):
    left = np.flatnonzero(allowed_tokens(probs, top_k=k)).tolist()
    assert left == sorted(sorted(range(len(probs)), key=lambda word: (-probs[word], word))[:k])


@given(TIED, st.one_of(st.none(), st.integers(1, 13)), st.floats(0.01, 1))
def test_top_p_leaves_the_smallest_set_whose_probability_reaches_p(probs, k, p):
    """Of what top-k leaves: with it the share is reached, without its least likely word it is not; and none outside is
    likelier than one inside, nor as likely and earlier.
    """
    among, left = allowed_tokens(probs, k), allowed_tokens(probs, k, p)
    share = probs[left].sum() / probs[among].sum()
    least = probs[left].min()
    assume(min(abs(share - p), abs(share - least / probs[among].sum() - p)) > 1e-12 or p == 1)
    assert (left <= among).all() and share >= p * (1 - 1e-12)
    assert share - least / probs[among].sum() < p
    inside, outside = np.flatnonzero(left), np.flatnonzero(among & ~left)
    assert all((probs[i], -i) > (probs[o], -o) for i in inside for o in outside)


def test_top_p_of_known_numbers():
    """Of 1/2, 1/4, 1/8, 1/8, in another order: 3/4 is reached by two words exactly."""
    probs = np.array([1, 4, 1, 2]) / 8
    nuclei = [np.flatnonzero(allowed_tokens(probs, None, p)).tolist() for p in (0.1, 0.5, 0.51, 0.75, 0.76, 0.9, 1.0)]
    assert nuclei == [[1], [1], [1, 3], [1, 3], [0, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert np.flatnonzero(allowed_tokens(probs, 3, 0.86)).tolist() == [0, 1, 3]     # of 7/8, 6/8 are less
    assert np.flatnonzero(allowed_tokens(probs, 3, 0.85)).tolist() == [1, 3]


@given(LOGITS, DRAWS, st.floats(0.1, 3), st.one_of(st.none(), st.integers(1, 40)), st.floats(0.05, 1))
def test_a_word_is_where_the_sum_of_probabilities_comes_to_the_draw(logits, draw, temperature, k, p):
    probs = softmax(logits / temperature)
    probs = np.where(allowed_tokens(probs, k, p), probs, 0)
    sums = np.concatenate([[0], np.cumsum(probs)]) / probs.sum()
    assume(np.abs(sums - draw).min() > 1e-12)
    word = next_token(logits, draw, temperature, k, p)
    assert sums[word] < draw < sums[word + 1]


@given(st.integers(2, 40), DRAWS, st.integers(0, 2**32 - 1), st.booleans())
def test_rounding_changes_no_word(n, draw, seed, tied):
    """Though it changes which of two words is the likelier: unless the draw lies at the very edge between two."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, 3, n).astype(float) if tied else rng.normal(size=n)
    edges = np.cumsum(softmax(logits / 0.8))
    assume(np.abs(edges - draw).min() > 1e-9)
    assert next_token(logits + 1e-12 * rng.normal(size=n), draw, 0.8) == next_token(logits, draw, 0.8)


@given(LOGITS, DRAWS, st.sampled_from([np.float32, np.float64]))
def test_at_temperature_0_the_likeliest_word_comes_and_of_equals_the_first(logits, draw, dtype):
    logits = np.round(logits).astype(dtype)
    expected = min(word for word in range(len(logits)) if logits[word] == logits.max())
    assert next_token(logits, draw, 0) == next_token(logits, draw, 1.0, top_k=1) == expected
    if (logits == logits.max()).sum() == 1:
        with np.errstate(over="ignore"):
            assert next_token(logits, draw, 1e-310) == expected


@pytest.mark.parametrize("choices", every_other_deep([
    {}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 7}, {"top_p": 0.8},
    {"temperature": 1.5, "top_k": 15, "top_p": 0.9}]), ids=str)
def test_words_come_as_often_as_is_likely(choices):
    """Chi-square over 10,000 positions, within 5 standard deviations; and from one position to the next, of pairs."""
    logits, sampling = np.random.default_rng(0).normal(0, 1.5, 20), Sampling(**choices, seed=5)
    words = np.array([sampling.choose(logits, position, text=3) for position in range(10_000)])
    probs = softmax(logits / sampling.temperature)
    probs = np.where(allowed_tokens(probs, sampling.top_k, sampling.top_p), probs, 0)
    probs /= probs.sum()
    agrees(np.bincount(words, minlength=20), probs)
    agrees(np.bincount(20 * words[:-1] + words[1:], minlength=400), np.outer(probs, probs).reshape(-1))


def agrees(seen, probs):
    expected = seen.sum() * probs
    assert (seen[probs == 0] == 0).all()
    some = expected > 5
    chi_square, freedom = ((seen[some] - expected[some])**2 / expected[some]).sum(), some.sum() - 1
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_what_is_drawn_depends_on_seed_text_and_position_alone():
    logits = np.zeros(1000)
    words = {(seed, text, position): Sampling(seed=seed).choose(logits, position, text)
             for seed in range(5) for text in range(5) for position in range(5)}
    assert len(set(words.values())) > 100
    for (seed, text, position), word in words.items():
        draw = counter_rng.uniform(counter_rng.key(seed, "sampling", text), np.array([position], np.uint64))[0]
        assert word == np.floor(1000 * draw)


@pytest.mark.parametrize("choices, said", [
    ({"temperature": -0.1}, "--temperature is -0.1, but must be a number that is not negative"),
    ({"temperature": nan}, "--temperature is nan"), ({"temperature": inf}, "--temperature is inf"),
    ({"top_k": 0}, "--top-k is 0, but must be at least 1"), ({"top_p": 0.0}, "--top-p is 0.0, but must be above 0"),
    ({"top_p": 1.1}, "at most 1"), ({"top_p": nan}, "--top-p is nan")])
def test_no_way_to_choose(choices, said):
    with pytest.raises(UserError, match=said):
        Sampling(**choices)
