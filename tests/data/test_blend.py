"""Blends: Megatron's order, and random access."""
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from mpi_impl.data.blend import BLOCK, Blend, parse_blend

WEIGHTS = st.lists(st.fractions(min_value="1/100", max_value=100, max_denominator=1000), min_size=1, max_size=9)
FIRST = st.integers(0, 100) | st.integers(BLOCK - 30, 3 * BLOCK)


class Numbered:
    """A data set whose sample j is the row [k, j]."""

    def __init__(self, k):
        self.k = k

    def samples(self, part):
        return 10 + self.k

    def batch(self, part, first_sample, count):
        assert part == "train"
        return np.stack([np.full(count, self.k), np.arange(first_sample, first_sample + count)], axis=1)


class Long(SimpleNamespace):
    """The facts about a data set that Megatron's blend asks for."""

    def __len__(self):
        return 10**9


def blend(weights):
    return Blend([Numbered(k) for k in range(len(weights))], weights)


@given(WEIGHTS)
def test_the_samples_of_a_data_set_come_in_their_order(weights):
    """None is left out or given twice, and no data set is ever a sample ahead of its share."""
    rows = blend(weights).batch("train", 0, 500)
    shares = [float(weight / sum(weights)) for weight in weights]
    for k, share in enumerate(shares):
        (places,) = np.nonzero(rows[:, 0] == k)
        assert rows[places, 1].tolist() == list(range(len(places)))
        assert (rows[places, 1] <= share * np.maximum(places, 1) + 1e-9).all()


# Equal shares, shares that a second division by their sum changes, and more than a block.
@example([Fraction(1, 10)] * 7, 2 * BLOCK)
@example([Fraction(9), Fraction(2), Fraction(10)], 2000)
@example([Fraction(3), Fraction(7)], 2 * BLOCK)
@given(WEIGHTS, st.integers(1, 2000))
def test_the_order_is_megatrons(weights, n):
    """Sample for sample, that of Megatron-core's BlendedDataset with the weights as its builder passes them on."""
    normalize = pytest.importorskip("megatron.core.datasets.utils").normalize
    theirs = pytest.importorskip("megatron.core.datasets.blended_dataset").BlendedDataset
    config = SimpleNamespace(defer_npy_index_mmap=False, path_to_cache=None)
    split = SimpleNamespace(name="train")
    datasets = [Long(index_split=split, unique_identifiers={}) for _ in weights]
    expected = theirs(datasets, normalize([float(weight) for weight in weights]), n, config)
    assert np.array_equal(blend(weights).batch("train", 0, n),
                          np.stack([expected.dataset_index, expected.dataset_sample_index], axis=1))


@given(WEIGHTS, FIRST, st.lists(st.integers(0, 20), max_size=5))
def test_any_slice_gives_the_rows_of_the_whole(weights, first, sizes):
    """Over the ends of blocks, too, and of no rows."""
    whole = blend(weights).batch("train", first, sum(sizes))
    starts = [first + sum(sizes[:i]) for i in range(len(sizes))]
    parts = [blend(weights).batch("train", start, size) for start, size in zip(starts, sizes)]
    assert whole.shape == (sum(sizes), 2) and whole.dtype == np.int64
    assert np.array_equal(whole, np.concatenate([whole[:0], *parts]))


def test_a_list_of_weights_and_data_sets_is_read_as_megatron_reads_it():
    assert parse_blend(["0.3", "A", "0.7", "B"]) == [(Fraction(3, 10), "A"), (Fraction(7, 10), "B")]
    assert parse_blend(["2", "A", "1", "A"]) == [(Fraction(2), "A"), (Fraction(1), "A")]
    assert parse_blend(["0.3"]) == [(Fraction(1), "0.3")]
