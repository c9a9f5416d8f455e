"""Recomputing activations: what is recomputed, and what is kept. test_theorems.py proves that no result changes."""
import gc
import weakref
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference.config import ModelConfig, Recompute
from reference.layer_context import LayerContext
from reference.models import stage
from reference.models.gpt import gpt_forward, gpt_tensors
from tests.cases import Case

CASE = Case(1, ModelConfig(5, 12, 3, 10, 7), 2, 7, seed=1)      # s = 7: like no other size

LAYERS = st.integers(0, 9).flatmap(lambda first: st.builds(range, st.just(first), st.integers(first, 9)))


@given(LAYERS, st.integers(1, 10))
def test_groups_of_a_stages_layers(layers, n):
    """Megatron's `uniform` makes groups of n layers, the rest in the last, and keeps only the inputs of all. `block`
    recomputes the first n of each stage, or as many as there are, one by one. Else every layer is kept.
    """
    starts = range(0, len(layers), n)
    assert Recompute("full", "uniform", n).groups(layers) == [(list(layers[i:i + n]), True) for i in starts]
    assert Recompute("full", "block", n).groups(layers) == [([layer], layer in layers[:n]) for layer in layers]
    for recompute in (Recompute("none", "uniform", n), Recompute("selective", "block", n)):
        assert recompute.groups(layers) == [([layer], False) for layer in layers]


@pytest.mark.parametrize("method, n", [("uniform", 2), ("uniform", 9), ("block", 3)])
def test_full_keeps_the_input_of_a_group_and_nothing_else(method, n):
    """Of all arrays that the group's layers made for their backward, none is alive."""
    made: dict[int, list] = {}

    def watched(x, p, c, context, block_forward=stage.block_forward):
        y, cache = block_forward(x, p, c, context)
        made[context.dropout.layer] = [weakref.ref(array) for array in arrays_in(cache)]
        return y, cache

    with mock.patch.object(stage, "block_forward", watched):
        cache = forward(CASE, Recompute("full", method, n))
    gc.collect()
    for layers, caches, x in cache.layers:
        alive = [array for layer in layers for ref in made[layer] if (array := ref()) is not None]
        assert (caches is None) == (x is not None)
        if caches is None:
            assert not alive and [array.shape for array in arrays_in(x)] == [(CASE.b, CASE.s, CASE.model.hidden_size)]
        else:
            assert len(alive) == sum(len(made[layer]) for layer in layers)


def forward(case: Case, recompute: Recompute):
    """Return the whole model's cache, with dropout."""
    p = case.params(gpt_tensors(case.model))
    tokens, targets = case.ids("tokens", case.b, case.s), case.ids("targets", case.b, case.s)
    return gpt_forward(tokens, p, case.model, targets, LayerContext(case.dropout, recompute))[1]


def arrays_in(tree):
    """List all arrays in nested tuples, lists and dicts, and the arrays that they are views of."""
    if isinstance(tree, np.ndarray):
        return [tree] if tree.base is None else [tree, *arrays_in(tree.base)]
    below = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return [array for subtree in below for array in arrays_in(subtree)]
