"""GPT samples: every rank count, every batch and every epoch sees the same stream; and the unigram model of it."""
from collections import Counter
from math import isclose, log
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from mpi_impl.data.dataset import PARTS, shuffle, split_samples
from mpi_impl.data.gpt import GPTDataset
from mpi_impl.data.unigram import unigram_cross_entropy
from reference.errors import UserError

SPLITS = st.lists(st.integers(0, 99), min_size=1, max_size=3).filter(any).map(lambda x: ",".join(map(str, x)))


def stream(tokens):
    return SimpleNamespace(prefix="data", tokens=np.array(tokens, np.uint16))


@st.composite
def datasets(draw):
    """Draw a data set whose tokens are their own positions, so that a sample shows where it comes from."""
    seq_length = draw(st.integers(1, 9))
    n = draw(st.integers(seq_length + 1, 300))
    return GPTDataset(stream(range(n)), seq_length, draw(st.integers(-2, 9)), draw(SPLITS))


@given(datasets(), st.sampled_from(PARTS), st.integers(0, 200), st.integers(1, 99))
def test_samples_are_consecutive_tokens_in_the_order_of_their_part(dataset, part, first, count):
    """Training passes through its part in another order each epoch, the other parts as they lie, again and again. So it
    does not matter in which batch a sample is.
    """
    n, s = dataset.samples(part), dataset.seq_length
    assume(n)
    batch = dataset.batch(part, first, count)
    assert batch.dtype == np.int64
    for row, sample in zip(batch, range(first, first + count), strict=True):
        epoch, place = divmod(sample, n)
        place = shuffle(n, dataset.seed, epoch)[place] if part == "train" else place
        start = s * (dataset.ranges[part].start + place)
        assert row.tolist() == list(range(start, start + s + 1))


@given(datasets())
def test_parts_never_overlap_and_leave_nothing_out(dataset):
    """Every token but the first, up to the last whole sample, is a target in exactly one part."""
    targets = np.concatenate([dataset.targets(part) for part in PARTS])
    total = (len(dataset.indexed.tokens) - 1) // dataset.seq_length
    assert targets.tolist() == list(range(1, total * dataset.seq_length + 1))


@given(SPLITS, st.integers(0, 10_000))
def test_a_split_has_its_proportions(split, n):
    """Each part is within one sample of its share, a share of 0 is empty, and a missing number is 0."""
    weights = [int(x) for x in split.split(",")]
    weights += [0] * (3 - len(weights))
    for part, weight in zip(split_samples(split, n).values(), weights, strict=True):
        assert abs(len(part) - n * weight / sum(weights)) <= 1
        assert weight or not len(part)


@given(st.integers(), st.integers(0, 3), st.integers(1, 3))
def test_every_epoch_of_every_seed_is_another_permutation(seed, epoch, more):
    """Any integer is a seed, negative ones and large ones too."""
    order = shuffle(50, seed, epoch).tolist()
    assert sorted(order) == list(range(50)) != order
    assert order != shuffle(50, seed + more, epoch).tolist() and order != shuffle(50, seed, epoch + more).tolist()


def test_the_order_is_the_same_everywhere():
    """A run can be repeated with another NumPy: this order was written down once."""
    assert shuffle(8, 1234, 1).tolist() == [2, 0, 7, 6, 1, 4, 5, 3]


def test_too_little_text_is_refused():
    """One sample takes seq_length + 1 tokens."""
    GPTDataset(stream(range(9)), 8, 0)
    with pytest.raises(UserError, match="8 tokens, too few.*--seq-length 8"):
        GPTDataset(stream(range(8)), 8, 0)


def test_a_part_without_samples_is_refused_when_it_is_asked_for():
    """A short corpus may be trained on as long as nobody asks for its validation part."""
    dataset = GPTDataset(stream(range(30)), 8, 0)
    assert dataset.batch("train", 0, 1).shape == (1, 9)
    with pytest.raises(UserError, match="validation part of data has no sample: --split 969,30,1"):
        dataset.batch("validation", 0, 1)


@pytest.mark.parametrize(("position", "token"), [(0, 100), (4_999_999, 65_535), (3_000_003, -1)])
def test_a_token_beyond_the_vocabulary_is_named_with_its_position(position, token):
    """Wherever it is, in whichever block; 99 of 100 is still inside."""
    tokens = np.full(5_000_000, 99, np.int32 if token < 0 else np.uint16)
    dataset = GPTDataset(SimpleNamespace(prefix="data", tokens=tokens), 8, 0)
    dataset.check_vocabulary(100)
    tokens[position] = token
    with pytest.raises(UserError, match=f"token {token} at position {position:,}, outside the vocabulary of 100"):
        dataset.check_vocabulary(100)


@given(st.lists(st.integers(0, 6), min_size=21, max_size=80), st.integers(7, 9))
def test_the_unigram_model_is_the_smoothed_training_frequency_scored_on_validation(tokens, vocab_size):
    """The mean of -log((count + 1) / (total + V)), one validation token after another."""
    dataset = GPTDataset(stream(tokens), 2, 0, "1,1")
    n, m = 2 * dataset.samples("train"), 2 * dataset.samples("validation")
    counts = Counter(tokens[1 : 1 + n])
    losses = [-log((counts[token] + 1) / (n + vocab_size)) for token in tokens[1 + n : 1 + n + m]]
    assert isclose(unigram_cross_entropy(dataset, vocab_size), sum(losses) / m, rel_tol=1e-12)
