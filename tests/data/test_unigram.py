"""The unigram model, against its definition."""
from collections import Counter
from math import isclose, log
from types import SimpleNamespace

import numpy as np
from hypothesis import given, strategies as st

from mpi_impl.data.gpt import GPTDataset
from mpi_impl.data.unigram import unigram_cross_entropy


@given(st.lists(st.integers(0, 6), min_size=21, max_size=80), st.integers(7, 9))
def test_it_is_the_smoothed_training_frequency_scored_on_validation(tokens, vocab_size):
    """The mean of -log((count + 1) / (total + V)), one validation token after another."""
    dataset = GPTDataset(SimpleNamespace(prefix="data", tokens=np.array(tokens, np.uint16)), 2, 0, "1,1")
    n, m = 2 * dataset.samples("train"), 2 * dataset.samples("validation")
    counts = Counter(tokens[1 : 1 + n])
    losses = [-log((counts[token] + 1) / (n + vocab_size)) for token in tokens[1 + n : 1 + n + m]]
    assert isclose(unigram_cross_entropy(dataset, vocab_size), sum(losses) / m, rel_tol=1e-12)


def test_a_constant_text_is_no_surprise_and_a_uniform_one_is_log_v():
    """The two ends of the scale."""
    for tokens, expected in (np.zeros(40_001, int), 0.0), (np.arange(40_001) % 10, log(10)):
        dataset = GPTDataset(SimpleNamespace(prefix="data", tokens=tokens), 10, 0, "1,1,0")
        assert isclose(unigram_cross_entropy(dataset, 10), expected, abs_tol=1e-3)
