"""Experts: ties and capacities. test_theorems.py proves the rest."""
import numpy as np

from reference.config import ExpertsConfig
from reference.layers.dispatch import combine, order_of
from reference.layers.router import top_k


def test_the_first_of_equal_logits_is_chosen():
    assert top_k(np.array([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]]), 2).tolist() == [[1, 2], [0, 1]]


def test_a_capacity_drops_the_last_copies_of_an_expert():
    """Of four tokens that all choose expert 0 first, a factor of 1 keeps two; dropped copies add nothing."""
    ids = np.array([[[0, 1], [0, 1], [0, 2], [0, 3]]])
    order = order_of(ids, ExpertsConfig(4, 2, moe_expert_capacity_factor=1.0))
    assert order.copies.tolist() == [0, 2, 1, 3, 5, 7] and order.counts.tolist() == [2, 2, 1, 1]
    y = combine(np.ones((6, 1)), np.ones(ids.shape), order)
    assert y[0, :, 0].tolist() == [2, 2, 1, 1]
