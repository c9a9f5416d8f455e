"""Masks: whole words, as many as the budget allows, and with the shares that BERT's authors gave."""
from math import sqrt
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpi_impl.data.masking import choose_positions, replace_masked
from reference import counter_rng


def draws(seed):
    """Return a source of random numbers: each is a function of its purpose and an index."""
    return lambda what, index: counter_rng.uniform(counter_rng.key(seed, what), index)


@st.composite
def batches(draw):
    """Draw a batch of ragged samples: where text is, where its words begin (also after each gap), each sample's budget
    of masked tokens, the source of random numbers, and the tokens' indices.
    """
    b, s = draw(st.integers(1, 4)), draw(st.integers(1, 25))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    text = rng.random((b, s)) < draw(st.sampled_from([0.5, 0.9, 1.0]))
    after_gap = np.hstack([np.ones((b, 1), bool), ~text[:, :-1]])
    begins = text & (after_gap | (rng.random((b, s)) < draw(st.sampled_from([0.2, 0.6, 1.0]))))
    budgets = rng.integers(1, draw(st.integers(2, s + 2)), b)
    index = draw(st.integers(0, 2**40)) * s + np.arange(b * s).reshape(b, s)
    return begins, text, budgets, draws(draw(st.integers(0, 99))), index


def words_of(begins, text):
    """Return the positions of each word of a sample, word by word."""
    words = []
    for position in np.flatnonzero(text):
        if begins[position]:
            words.append([])
        words[-1].append(int(position))
    return words


def plain_mask(words, budget, turn, lengths):
    """Return the masked positions of one sample, computed with sets after the description."""
    masked = set()
    for i in sorted(range(len(words)), key=lambda i: turn[words[i][0]]):
        n = lengths[words[i][0]]
        while n and len(masked) + len(sum(words[i:i + n], [])) > budget:
            n -= 1
        gram = set(sum(words[i:i + n], []))
        if not gram & masked:
            masked |= gram
    return masked


@given(batches())
def test_masks_are_those_of_the_plain_loop(case):
    """Sample by sample, with the same draws: a length below 6/11 is 1, below 9/11 it is 2."""
    begins, text, budgets, uniform, index = case
    masked = choose_positions(begins, text, budgets, uniform, index)
    for k in range(len(begins)):
        chance = uniform("n-gram", index[k])
        lengths = np.where(chance < 6 / 11, 1, np.where(chance < 9 / 11, 2, 3))
        expected = plain_mask(words_of(begins[k], text[k]), budgets[k], uniform("turn", index[k]), lengths)
        assert set(np.flatnonzero(masked[k])) == expected


@given(batches())
def test_words_are_masked_whole_and_within_the_budget(case):
    """And nothing but words; at least one, if one fits at all."""
    begins, text, budgets, uniform, index = case
    masked = choose_positions(begins, text, budgets, uniform, index)
    assert masked.dtype == bool and masked.shape == text.shape and not (masked & ~text).any()
    for k, budget in enumerate(budgets):
        words = words_of(begins[k], text[k])
        assert all(masked[k, word].all() or not masked[k, word].any() for word in words)
        assert masked[k].sum() <= budget
        assert masked[k].any() or all(len(word) > budget for word in words)


def test_ngrams_have_the_weights_of_their_lengths():
    """Where three one-token words may be masked of many, three in a row, apart, or two and one are as often as n-grams
    with weights of 1, 1/2 and 1/3 make them.

    That is, within five standard deviations, and the small chance that n-grams touch or stand at the end of a sample.
    """
    b, s = 5_000, 200
    text = np.ones((b, s), bool)
    masked = choose_positions(text, text, np.full(b, 3), draws(3), np.arange(b * s).reshape(b, s))
    runs = (np.diff(masked.astype(int), axis=1, prepend=0) == 1).sum(1)             # [b]
    one, two, three = 6 / 11, 3 / 11, 2 / 11
    for n, share in (1, three), (2, two + one * (two + three)), (3, one * one):
        assert abs((runs == n).mean() - share) < 5 * sqrt(share * (1 - share) / b) + 6 / s
    assert (np.abs(masked[:, 3:-3].mean(0) - 3 / s) < 5 * sqrt(3 / s / b) + 0.1 * 3 / s).all()  # wherever they stand


def test_eight_of_ten_are_mask_one_is_another_and_one_itself():
    """Token by token; and the others are any of the vocabulary, as often as another. Within five deviations."""
    tokenizer = SimpleNamespace(mask=4, vocab_size=50)
    b, s = 500, 400
    tokens = np.full((b, s), 7)
    masked = np.zeros((b, s), bool)
    masked[:, ::2] = True
    seen = replace_masked(tokens, masked, tokenizer, draws(5), np.arange(b * s).reshape(b, s))
    assert (seen[~masked] == 7).all() and (tokens == 7).all() and seen.dtype == np.int64
    counts = np.bincount(seen[masked], minlength=50)
    expected = np.full(50, 0.1 / 50) + 0.8 * (np.arange(50) == 4) + 0.1 * (np.arange(50) == 7)
    n = masked.sum()
    assert len(counts) == 50
    assert (np.abs(counts - n * expected) < 5 * np.sqrt(n * expected)).all()


@pytest.mark.parametrize("what", ["n-gram", "turn"])
def test_both_draws_matter(what):
    """With other numbers for either of them, other words are masked."""
    text = np.ones((4, 50), bool)
    index = np.arange(200).reshape(4, 50)

    def masks(seed):
        return choose_positions(text, text, np.full(4, 8), lambda w, i: draws(seed if w == what else 0)(w, i), index)

    assert (masks(0) != masks(1)).any()
