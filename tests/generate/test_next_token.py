"""The choice of the next token: the set that it may come from, and each token's frequency."""

import numpy as np
from hypothesis import assume, given, strategies as st

from reference.generation.decoding import Sampling, allowed_tokens, next_token
from reference.ops import softmax
from reference.random import counter_rng

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
    """The nucleus is the fewest tokens that reach p: two of 1/8, 1/2, 1/8, 1/4 reach 3/4 exactly."""
    probs = np.array([1, 4, 1, 2]) / 8
    for k, p, nucleus in (None, 0.5, [1]), (None, 0.75, [1, 3]), (None, 0.76, [0, 1, 3]), (3, 0.85, [1, 3]):
        assert np.flatnonzero(allowed_tokens(probs, k, p)).tolist() == nucleus      # 6/8 are 0.857 of 7/8


@given(LOGITS, st.builds(Sampling, st.floats(0.1, 3), st.none() | st.integers(1, 40), st.floats(0.05, 1),
                         st.integers(0, 2**32 - 1)), st.integers(0, 2**20), st.integers(0, 2**20))
def test_a_token_is_where_the_sum_of_probabilities_comes_to_the_draw(logits, sampling, position, text):
    """The draw depends on the seed, the text and the position alone."""
    draw = counter_rng.uniform(counter_rng.key(sampling.seed, "sampling", text), np.array([position], np.uint64))[0]
    probs = softmax(logits / sampling.temperature)
    probs = np.where(allowed_tokens(probs, sampling.top_k, sampling.top_p), probs, 0)
    sums = np.concatenate([[0], np.cumsum(probs)]) / probs.sum()
    assume(np.abs(sums - draw).min() > 1e-12)
    token = sampling.choose(logits, position, text)
    assert sums[token] < draw < sums[token + 1]
    assert sampling.choose_each(np.stack([logits, logits]), position, text - 1)[1] == token


@given(LOGITS, DRAWS, st.sampled_from([np.float32, np.float64]))
def test_at_temperature_0_the_likeliest_word_comes_and_of_equals_the_first(logits, draw, dtype):
    logits = np.round(logits).astype(dtype)
    expected = min(word for word in range(len(logits)) if logits[word] == logits.max())
    assert next_token(logits, draw, 0) == next_token(logits, draw, 1.0, top_k=1) == expected
    if (logits == logits.max()).sum() == 1:
        with np.errstate(over="ignore"):
            assert next_token(logits, draw, 1e-310) == expected
