"""GPT samples: every rank count, every cut and every epoch sees the same stream."""
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from mpi_impl.data.dataset import PARTS, shuffle, split_samples
from mpi_impl.data.gpt import GPTDataset
from reference.errors import UserError

SPLITS = st.lists(st.integers(0, 99), min_size=1, max_size=3).filter(any).map(lambda x: ",".join(map(str, x)))


def stream(n, dtype=np.uint16):
    """Return tokens that are their own positions, so that a sample shows where it comes from."""
    return SimpleNamespace(prefix="data", tokens=np.arange(n).astype(dtype))


@st.composite
def datasets(draw, split=SPLITS):
    seq_length = draw(st.integers(1, 9))
    n = draw(st.integers(seq_length + 1, 300))
    return GPTDataset(stream(n), seq_length, draw(st.integers(0, 9)), draw(split))


@given(datasets(), st.sampled_from(PARTS), st.integers(0, 200), st.lists(st.integers(0, 40), min_size=1, max_size=5))
def test_batches_do_not_depend_on_how_they_are_cut(dataset, part, first, counts):
    """One large batch is any small ones put together, over the ends of epochs too; a sample is consecutive tokens."""
    assume(dataset.samples(part))
    whole = dataset.batch(part, first, sum(counts))
    starts = first + np.cumsum([0, *counts])
    pieces = [dataset.batch(part, int(start), count) for start, count in zip(starts, counts, strict=False)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    assert whole.dtype == np.int64 and whole.shape == (sum(counts), dataset.seq_length + 1)
    assert (np.diff(whole, axis=1) == 1).all()
    assert (whole[:, 0] % dataset.seq_length == 0).all()


@given(datasets(), st.integers(0, 5))
def test_every_training_sample_is_seen_once_an_epoch(dataset, epoch):
    """An epoch is a permutation of the training part, and no other part is in it."""
    n = dataset.samples("train")
    assume(n)
    seen = dataset.batch("train", epoch * n, n)[:, 0] // dataset.seq_length
    assert sorted(seen) == list(dataset.ranges["train"])


@given(datasets(), st.sampled_from(["validation", "test"]), st.integers(0, 99))
def test_validation_and_test_lie_in_order_and_wrap_round(dataset, part, first):
    """Sample i is sample i mod n of the part."""
    n = dataset.samples(part)
    assume(n)
    seen = dataset.batch(part, first, 2 * n)[:, 0] // dataset.seq_length
    assert list(seen) == [dataset.ranges[part][(first + i) % n] for i in range(2 * n)]


@given(datasets())
def test_parts_never_overlap_and_leave_nothing_out(dataset):
    """Every token but the first, up to the last whole sample, is a target in exactly one part."""
    targets = np.concatenate([dataset.targets(part) for part in PARTS])
    total = (len(dataset.indexed.tokens) - 1) // dataset.seq_length
    assert targets.tolist() == list(range(1, total * dataset.seq_length + 1))
    for part in PARTS:
        if n := dataset.samples(part):
            assert sorted(dataset.batch(part, 0, n)[:, 1:].ravel()) == dataset.targets(part).tolist()


@given(SPLITS, st.integers(0, 10_000))
def test_a_split_has_its_proportions(split, n):
    """Each part is within one sample of its share, a share of 0 is empty, and a missing number is 0."""
    weights = [int(x) for x in split.split(",")]
    weights += [0] * (3 - len(weights))
    for part, weight in zip(split_samples(split, n).values(), weights, strict=True):
        assert abs(len(part) - n * weight / sum(weights)) <= 1
        assert weight or not len(part)


def test_megatrons_default_split():
    """969, 30 and 1 of a thousand; fractions may be written as such."""
    assert list(map(len, split_samples("969,30,1", 1000).values())) == [969, 30, 1]
    assert split_samples("0.969,0.03,0.001", 1000) == split_samples("969,30,1", 1000)


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "0,0,0", "9,-1,1", "nan,1,1", "1/0,1", "1,,2",
                                   "1e999999999,1", "1e3,1", "1234567890,1", "inf"])
def test_a_split_that_is_none_is_refused(split):
    """Not numbers, too many, negative, nothing at all, or numbers that only a computer writes."""
    with pytest.raises(UserError, match=f"--split {split} is not a division"):
        split_samples(split, 10)


def test_epochs_and_seeds_differ():
    """Otherwise the model would see the corpus in one order only."""
    orders = {tuple(shuffle(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert tuple(range(50)) not in orders


@given(st.integers(), st.integers(0, 3))
def test_any_integer_is_a_seed(seed, epoch):
    """Negative ones and large ones too."""
    assert sorted(shuffle(20, seed, epoch)) == list(range(20))


def test_batches_come_in_the_order_of_their_epoch_and_their_seed():
    """Each epoch is another permutation, another seed gives others, and the same seed the same."""
    n = GPTDataset(stream(401), 4, 0, "1").samples("train")
    epochs = [GPTDataset(stream(401), 4, seed, "1").batch("train", epoch * n, n)[:, 0] // 4
              for seed in (0, 1, -1, 0) for epoch in range(3)]
    for order, (seed, epoch) in zip(epochs, [(s, e) for s in (0, 1, -1, 0) for e in range(3)], strict=True):
        assert order.tolist() == shuffle(n, seed, epoch).tolist()
    assert len({tuple(order) for order in epochs}) == 9


def test_the_order_is_the_same_everywhere():
    """A run can be repeated with another NumPy: this order was written down once."""
    assert shuffle(8, 1234, 1).tolist() == [2, 0, 7, 6, 1, 4, 5, 3]


def test_too_little_text_is_refused():
    """One sample takes seq_length + 1 tokens."""
    GPTDataset(stream(9), 8, 0)
    with pytest.raises(UserError, match="8 tokens, too few for one sample of --seq-length 8"):
        GPTDataset(stream(8), 8, 0)


def test_a_part_without_samples_is_refused_when_it_is_asked_for():
    """A short corpus may be trained on as long as nobody asks for its validation part."""
    dataset = GPTDataset(stream(30), 8, 0)
    assert dataset.batch("train", 0, 1).shape == (1, 9)
    with pytest.raises(UserError, match="The validation part of data has no sample: --split 969,30,1"):
        dataset.batch("validation", 0, 1)


@pytest.mark.parametrize(("position", "token"), [(0, 100), (4_500_000, 100), (4_999_999, 65_535), (3, -1)])
def test_a_token_beyond_the_vocabulary_is_named_with_its_position(position, token):
    """Wherever it is, in whichever block; 99 of 100 is still inside."""
    tokens = np.full(5_000_000, 99, np.int32 if token < 0 else np.uint16)
    dataset = GPTDataset(SimpleNamespace(prefix="data", tokens=tokens), 8, 0)
    dataset.check_vocabulary(100)
    tokens[position] = token
    with pytest.raises(UserError, match=f"token {token} at position {position:,}, outside the vocabulary of 100"):
        dataset.check_vocabulary(100)
