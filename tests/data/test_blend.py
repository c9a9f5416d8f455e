"""Blends: shares, order and random access."""
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from mpi_impl.data.blend import Blend, parse_blend
from reference.errors import UserError

WEIGHTS = st.lists(st.fractions(min_value="1/100", max_value=100, max_denominator=1000), min_size=1, max_size=9)
FIRST = st.integers(0, 100) | st.integers(10**6, 10**15)


class Numbered:
    """A data set whose sample j is the row [k, j]."""

    def __init__(self, k):
        self.k = k

    def samples(self, part):
        return 10 + self.k

    def batch(self, part, first_sample, count):
        assert part == "train"
        return np.stack([np.full(count, self.k), np.arange(first_sample, first_sample + count)], axis=1)


def blend(weights):
    return Blend([Numbered(k) for k in range(len(weights))], weights)


def counts(rows, k):
    """Count how many of the first n rows come from each of k data sets, for each n: [rows + 1, k]."""
    return np.concatenate([np.zeros((1, k), int), np.cumsum(rows[:, :1] == np.arange(k), axis=0)])


@given(WEIGHTS)
def test_each_data_set_has_its_share_all_along(weights):
    """After any number of samples: to within half a sample for each halving of the list; in their order, none left out
    or given twice. In total there is no error.
    """
    n, k = 500, len(weights)
    rows = blend(weights).batch("train", 0, n)
    given = counts(rows, k)
    assert all(rows[rows[:, 0] == i, 1].tolist() == list(range(given[-1, i])) for i in range(k))
    shares = np.outer(np.arange(n + 1), [float(w / sum(weights)) for w in weights])
    assert np.abs(given - shares).max() <= (k - 1).bit_length() / 2 + 1e-9
    assert (given.sum(axis=1) == np.arange(n + 1)).all()


@given(WEIGHTS, FIRST, st.lists(st.integers(0, 20), max_size=5))
def test_any_slice_gives_the_rows_of_the_whole(weights, first, sizes):
    """Far out, too, and of no rows."""
    whole = blend(weights).batch("train", first, sum(sizes))
    starts = [first + sum(sizes[:i]) for i in range(len(sizes))]
    parts = [blend(weights).batch("train", start, size) for start, size in zip(starts, sizes)]
    assert whole.shape == (sum(sizes), 2) and whole.dtype == np.int64
    assert np.array_equal(whole, np.concatenate([whole[:0], *parts]))


@given(st.fractions(min_value="1/1000", max_value="999/1000", max_denominator=1000))
@example(Fraction(1, 2))        # of two that are equally far behind, the first
def test_of_two_the_one_further_behind_gives_the_sample(share):
    """Megatron's greedy rule, played step by step."""
    weights, given = [share, 1 - share], [0, 0]
    rows = blend(weights).batch("train", 0, 200)
    for n, (source, _) in enumerate(rows, start=1):
        behind = [weight * n - count for weight, count in zip(weights, given)]
        assert source == behind.index(max(behind))
        given[source] += 1


def test_a_list_of_weights_and_data_sets_is_read_as_megatron_reads_it():
    assert parse_blend(["0.3", "A", "0.7", "B"]) == [(Fraction(3, 10), "A"), (Fraction(7, 10), "B")]
    assert parse_blend(["2", "A", "1", "A"]) == [(Fraction(2), "A"), (Fraction(1), "A")]
    assert parse_blend(["0.3"]) == [(Fraction(1), "0.3")]


@pytest.mark.parametrize("words, said", [
    (["0.3", "A", "B"], "3 words"), (["A", "B"], "has A where"), (["0.3", "A", "0", "B"], "has 0 where"),
    (["1e999999999", "A", "1", "B"], "has 1e999999999 where")])
def test_anything_else_is_refused(words, said):
    with pytest.raises(UserError, match=f"--data-path {' '.join(words)} .*{said}"):
        parse_blend(words)
