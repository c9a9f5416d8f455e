"""The textbook runs on arrays that behave like CuPy's: no hidden host copy, no host array mixed in.

The machine does, with its kernels for them, in tests/gpu/test_ranks.py.
"""
import numpy as np
from hypothesis import given, settings, strategies as st

from reference.config import ModelConfig
from reference.layer_context import LayerContext
from reference.models.gpt import gpt_tensors
from reference.models.model import model_backward, model_forward, model_tensors
from reference.params import initialize_shard, join, split, tree_map
from reference.random import counter_rng
from tests.rank_theorems import wrapped
from tests.spy import SpyArray
from tests.strategies import ANY_MODEL, cases, close, recomputes, trees_close
from tests.textbook_theorems import sharded_model_backward, sharded_model_forward, upstream

SMALL = [cases(sizes=st.integers(1, 4), architectures=ANY_MODEL, experts=experts) for experts in (None, 1)]


@settings(max_examples=10)
@given(st.one_of(SMALL), recomputes())
def test_textbook(case, recompute):
    """The whole model, and all of its shards, forward and backward, dropout on."""
    c, tensors, batch = case.model, model_tensors(case.model), case.batch("", case.b)
    p = case.params(tensors)
    losses, cache = model_forward(None, p, c, batch, LayerContext(case.dropout))
    dlosses = upstream(case, losses)
    _, grads = model_backward(dlosses, p, cache, c)
    spies, spy_batch = tree_map(SpyArray, p), type(batch)(*(wrapped(x, SpyArray) for x in batch))
    shards, spy_dlosses = split(spies, tensors, case.t), tuple(map(SpyArray, dlosses))
    whole, cache = model_forward(None, spies, c, spy_batch, LayerContext(case.dropout, recompute))
    _, whole_grads = model_backward(spy_dlosses, spies, cache, c)
    sharded, cache = sharded_model_forward(spy_batch, shards, c, case.region, LayerContext(case.dropout, recompute))
    shard_grads = sharded_model_backward(spy_dlosses, shards, cache, c, case.region)
    for found, found_grads in ((whole, whole_grads), (sharded, join(shard_grads, tensors))):
        for one, loss in zip(found, losses, strict=True):
            close(one.get(), loss)
        trees_close(tree_map(SpyArray.get, found_grads), grads, 1e-10)


def test_random_numbers_are_the_same_bits_on_a_device():
    index = np.arange(2**32 - 500, 2**32 + 500, dtype=np.uint64)
    for draw in (counter_rng.bits, counter_rng.normal):
        key = counter_rng.key(1, "test")
        assert (draw(key, SpyArray(index)).get() == draw(key, index)).all()


def test_initial_weights_are_made_on_the_device():
    tensors = gpt_tensors(ModelConfig(1, 8, 2, 11, 3, make_vocab_size_divisible_by=4))
    ours = initialize_shard(tensors, 1, np.float32, 2, 1, like=SpyArray(np.empty(0)))
    trees_close(tree_map(SpyArray.get, ours), initialize_shard(tensors, 1, np.float32, 2, 1), 0.0)
