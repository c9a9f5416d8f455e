"""Every layer of both packages runs on arrays that behave like CuPy's: no hidden host copy, no host array mixed in."""
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from reference import counter_rng
from reference.config import ExpertsConfig, ModelConfig, Recompute
from reference.layer_context import LayerContext
from reference.models.gpt import gpt_tensors
from reference.models.model import model_backward, model_forward, model_tensors
from reference.params import initialize_shard, join, split, tree_map
from tests import rank_theorems as theorems, training_theorems
from tests.deep import one_fast_of
from tests.rank_theorems import wrapped
from tests.spy import SpyArray
from tests.strategies import ANY_MODEL, Case, cases, close, recomputes, trees_close
from tests.textbook_theorems import sharded_model_backward, sharded_model_forward, upstream

FEWER = settings(max_examples=10)
SMALL = [cases(sizes=st.integers(1, 4), architectures=ANY_MODEL, experts=experts) for experts in (None, 1)]
THEOREMS = [theorems.row_parallel_equals_whole, theorems.mlp_equals_whole, theorems.attention_equals_whole,
            theorems.block_equals_whole, theorems.embedding_equals_whole, theorems.logits_equal_whole,
            theorems.masked_lm_equals_whole, theorems.loss_equals_whole]


@pytest.mark.parametrize("theorem", THEOREMS, ids=lambda f: f.__name__)
@FEWER
@given(case=st.one_of(SMALL))
def test_machine(ranks, theorem, case):
    """The theorems again, with the machine's arrays on the device."""
    ranks.run(case.t, on_spies, theorem, case)


@FEWER
@given(cases(sizes=st.integers(1, 4)), st.booleans())
def test_column_parallel(ranks, case, gather_output):
    ranks.run(case.t, theorems.column_parallel_equals_whole, case, gather_output, SpyArray)


def on_spies(group, theorem, case):
    theorem(group, case, wrap=SpyArray)


@FEWER
@given(st.one_of(SMALL), recomputes())
def test_model(ranks, case, recompute):
    """Recompute and dropout are on: masks are drawn on the device."""
    ranks.run(case.t, theorems.model_equals_whole, case, recompute, SpyArray)


@FEWER
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


ON_A_DEVICE = [
    (2, 1, 2, "1f1b", None, False, 0, False, Recompute()), (2, 2, 2, "1f1b", None, False, 1, True, Recompute("full")),
    (1, 2, 2, "zb-h1", None, True, 2, False, Recompute("selective")),
    (2, 2, 1, "interleaved", 2, False, 3, True, Recompute("full", "uniform", 2)),
    (2, 2, 2, "zb-v", None, False, 3, False, Recompute("full", "block", 1))]
EXPERTS = ExpertsConfig(4, 2, moe_layer_freq=2, moe_shared_expert_intermediate_size=2, moe_aux_loss_coeff=0.1,
                        moe_z_loss_coeff=0.1, moe_expert_capacity_factor=4)
KINDS = {"rope": dict(position_embedding_type="rope"), "bert": dict(architecture="bert", heads=("lm", "sop")),
         "experts": dict(experts=EXPERTS)}


@pytest.mark.parametrize("kind, t, p, d, schedule, chunks, untied, stage, offload, recompute", one_fast_of(8, (
    (kind, *plan) for i, plan in enumerate(ON_A_DEVICE) for kind in sorted(KINDS, reverse=i % 2 == 1))))
def test_training_on_a_device(ranks, kind, t, p, d, schedule, chunks, untied, stage, offload, recompute):
    """The main theorem with parameters, gradients, moments, batches and all messages on the device; offloaded
    shards are on the host. Both regions are tried, with dropout. Experts are dealt out to all replicas, with room for
    all copies that they may get.
    """
    model = ModelConfig(4, 8, 2, 11, 6, make_vocab_size_divisible_by=4,
                        untie_embeddings_and_output_weights=untied and kind == "rope", **KINDS[kind])
    for scatter, sharded in ((True, False), (False, t > 1)):
        case = Case(t, model, 2, 6, seed=3, sequence_parallel=sharded)
        ranks.run(t * p * d, train_on_spies, case, training_theorems.Plan(
            p, schedule, chunks, scatter, bucket_size=200, zero_stage=stage, cpu_offload=offload, recompute=recompute,
            e=d if kind == "experts" else 1))


def train_on_spies(group, case, plan):
    training_theorems.training_equals_one_process(group, case, 2, plan.p, 0.05, plan, wrap=SpyArray)
