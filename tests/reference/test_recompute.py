"""Recomputing activations: what is computed again, what is kept instead, and that nothing else changes."""
import gc
import weakref
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference.config import ModelConfig, Recompute
from reference.layer_context import LayerContext
from reference.layers.attention import CoreInputs
from reference.models import stage
from reference.models.gpt import gpt_forward, gpt_tensors
from tests import textbook_theorems as theorems
from tests.strategies import Case, cases, recomputes

LAYERS = st.integers(0, 9).flatmap(lambda first: st.builds(range, st.just(first), st.integers(first, 9)))


@given(cases(sizes=st.just(1)), recomputes())
def test_recompute_changes_nothing(case, recompute):
    theorems.recompute_changes_nothing(case, recompute)


# ---- groups ---------------------------------------------------------------------------------------------------------


@given(LAYERS, recomputes())
def test_groups_are_the_layers_in_order(layers, recompute):
    """Each layer of a stage is in one group, and no group is empty."""
    groups = recompute.groups(layers)
    assert [layer for group, _ in groups for layer in group] == list(layers)
    assert all(group for group, _ in groups)


@given(LAYERS, st.integers(1, 10))
def test_uniform_groups_have_one_size(layers, n):
    """Megatron's `uniform` makes groups of n layers, the rest in the last, and keeps only the inputs of all."""
    groups = Recompute("full", "uniform", n).groups(layers)
    assert all(again for _, again in groups) and len(groups) == -(-len(layers) // n)
    assert all(len(group) == n for group, _ in groups[:-1])


@given(LAYERS, st.integers(1, 10))
def test_block_recomputes_the_first_layers(layers, n):
    """Megatron's `block`: n of each stage, one by one, or as many as there are. The others keep everything."""
    groups = Recompute("full", "block", n).groups(layers)
    assert groups == [([layer], layer in layers[:n]) for layer in layers]


@pytest.mark.parametrize("granularity", ["none", "selective"])
@given(LAYERS, st.sampled_from(["uniform", "block"]), st.integers(1, 10))
def test_else_every_layer_is_kept(granularity, layers, method, n):
    assert Recompute(granularity, method, n).groups(layers) == [([layer], False) for layer in layers]


# ---- what is kept ---------------------------------------------------------------------------------------------------

CASE = Case(1, ModelConfig(5, 12, 3, 10, 7), 2, 7, seed=1)      # s = 7: like no other size


@pytest.mark.parametrize("recompute", [Recompute("full", "uniform", n) for n in (1, 2, 3, 9)] +
                         [Recompute("full", "block", n) for n in (1, 3, 9)], ids=str)
def test_full_keeps_the_input_of_a_group_and_nothing_else(recompute):
    """Of all arrays that the group's layers made for their backward, none is alive."""
    made: dict[int, list] = {}

    def watched(x, p, c, context, block_forward=stage.block_forward):
        y, cache = block_forward(x, p, c, context)
        made[context.dropout.layer] = [weakref.ref(array) for array in arrays_in(cache)]
        return y, cache

    with mock.patch.object(stage, "block_forward", watched):
        cache = forward(CASE, recompute)
    gc.collect()
    for layers, caches, x in cache.layers:
        alive = [array for layer in layers for ref in made[layer] if (array := ref()) is not None]
        assert (caches is None) == (x is not None)
        if caches is None:
            assert not alive and [array.shape for array in arrays_in(x)] == [(CASE.b, CASE.s, CASE.model.hidden_size)]
        else:
            assert len(alive) == sum(len(made[layer]) for layer in layers)


@pytest.mark.parametrize("recompute, quadratic", [(Recompute(), True), (Recompute("selective"), False)])
def test_selective_keeps_nothing_that_grows_with_the_square_of_the_sequence(recompute, quadratic):
    cache = forward(CASE, recompute)
    squares = [array for array in arrays_in(cache.layers) if array.shape[-2:] == (CASE.s, CASE.s)]
    assert bool(squares) == quadratic
    cores = [caches[layer].attention.core for (layer,), caches, _ in cache.layers]
    assert all(isinstance(core, CoreInputs) != quadratic for core in cores)


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
