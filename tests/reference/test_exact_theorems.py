"""The textbook's theorems without rounding: sharded and unsharded, dealt out or not, cached or not, are one formula.

Each is the theorem that another file tests with floats, on numbers of a prime field. A wrong formula passes for a right
one with a chance of 1e-20 for each example, so a few of them are enough: they sample the shapes.
"""
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from reference import ops
from reference.config import ModelConfig, Recompute
from reference.dropout import Dropout
from reference.exact.array import random_array
from reference.kv_cache import empty_kv_cache
from reference.models.gpt import gpt_logits, gpt_tensors, next_logits
from reference.optimizer import adam_update
from reference.schedules.generators import make
from tests import experts_theorems, textbook_theorems as theorems
from tests.generation import test_kv_cache
from tests.planted import planted
from tests.reference import (test_batches, test_bert, test_dropout, test_gpt, test_layers, test_mappings, test_params,
                             test_pipeline, test_zero)
from tests.reference.test_ops import attention_by_definition, lengths
from tests.strategies import ANY_MODEL, Case, ExactCase, cases, close, recomputes

BOOL, COUNT, EACH, DATA = st.booleans(), st.integers(1, 3), st.integers(1, 2), st.data()


def some(sizes=(1, 2, 3, 4), **choices):
    return cases(sizes=st.sampled_from(sizes), exact=True, **choices)


GPT, MODEL, BERT = some(), some(architectures=ANY_MODEL), some(architectures=("bert",))
ONE_GPT, ONE_MODEL = some([1]), some([1], architectures=ANY_MODEL)
ONE_BERT = some([1], architectures=("bert",))
CUTS = st.sets(st.integers(1, 2))


def body(test):
    """Return what a test of another file checks of each example."""
    return test.hypothesis.inner_test


def attention(case, causal, recompute):
    theorems.attention_equals_whole(case, causal, Recompute("selective" if recompute else "none"))


def block(case, recompute):
    theorems.block_equals_whole(case, Recompute("selective" if recompute else "none"))


def cross_entropy(case):
    """Check two ways, for logits of any size. The third, without a maximum, needs the law of log."""
    theorems.losses_agree(case, scale=1000.0)


def stages(case, cuts):
    theorems.stages_equal_whole(case, [cut for cut in cuts if cut < case.model.num_layers])


def zero(case, d, m, stage, bucket_size, clip_grad):
    test_zero.zero_equals_one_process(case, d, m, stage, bucket_size, clip_grad, steps=2)


def pipeline(schedule, data, experts=None):
    layers = schedule.stages + data.draw(st.integers(0, 1))
    test_pipeline.pipeline_equals_one_process(schedule, data.draw(some([1], num_layers=layers, experts=experts,
                                                                       architectures=ANY_MODEL)))


def dealt_experts(data, e):
    experts_theorems.dealt_experts_equal_whole(data.draw(some([1], architectures=ANY_MODEL, experts=e)), e)


def adjoint(region, t, n):
    """Check f and g, or the pair of sequence parallelism."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_mappings, "draw", lambda seed, *shape: random_array(shape, *seed))
        for test in (test_mappings.test_entering_and_its_backward_are_adjoint,
                     test_mappings.test_leaving_and_its_backward_are_adjoint,
                     test_mappings.test_the_backward_of_one_is_the_forward_of_the_other):
            body(test)(region, t, n, 0)


def attention_is_its_definition(data, b, s, g, each, d, causal):
    """Compare with one query at a time, with padding and dropout."""
    a = each * g
    q, k, v = (random_array((b, s, heads, d), name) for name, heads in zip("qkv", (a, g, g)))
    real, rate = data.draw(lengths(b, s)), data.draw(st.sampled_from(test_dropout.RATES))
    site = Dropout(test_dropout.model(n=6, a=6, attention=rate), 1, 1, 10).attention(2)
    factors = test_dropout.mask_of(site, b, a, s, s) * site.scale
    close(ops.attention_core(q, k, v, causal, site, real)[0],
          attention_by_definition(q, k, v, causal, real, factors))


def cached_attention(b, n, before, g, each, d):
    m = n + before - 1
    q, k, v = (random_array((b, m, heads, d), name) for name, heads in zip("qkv", (each * g, g, g)))
    close(ops.cached_attention(q[:, m - n:], k, v), ops.attention_core(q, k, v, True)[0][:, m - n:])


def softmax_is_its_definition(n, m):
    """Check that to subtract the maximum changes nothing: that is the law of exp."""
    x = random_array((n, m), "x")
    close(ops.softmax(x), np.exp(x) / np.exp(x).sum(-1, keepdims=True))


def adam_moves_slices_as_the_whole(cut, steps, decay):
    """Check that a shard of a flat buffer moves as it does within the whole."""
    c = test_zero.optimizer_of(0.5)
    whole = [random_array(9, "param"), *(np.zeros_like(random_array(9, "m")) for _ in "mv")]
    parts = [[x[where].copy() for x in whole] for where in (slice(cut), slice(cut, 9))]
    for step in range(1, steps + 1):
        grad = random_array(9, "grad", step)
        adam_update(whole[0], grad, *whole[1:], step, 1e-2, decay, c)
        for (param, *moments), where in zip(parts, (slice(cut), slice(cut, 9))):
            adam_update(param, grad[where], *moments, step, 1e-2, decay, c)
    for x, *split in zip(whole, *parts):
        close(np.concatenate(split), x)


THEOREMS = {
    "column-parallel linear": (theorems.column_parallel_equals_whole, GPT, BOOL),
    "row-parallel linear": (theorems.row_parallel_equals_whole, GPT),
    "MLP": (theorems.mlp_equals_whole, GPT),
    "attention": (attention, MODEL, BOOL, BOOL),
    "block": (block, MODEL, BOOL),
    "embedding": (theorems.embedding_equals_whole, MODEL),
    "logits": (theorems.logits_equal_whole, GPT),
    "head for masked tokens": (theorems.masked_lm_equals_whole, GPT),
    "cross-entropy": (cross_entropy, GPT),
    "rows first, and one more sum": (body(test_layers.test_rows_first_needs_a_second_synchronisation),
                                     some([2, 3], llama=False)),
    "GPT": (theorems.model_equals_whole, GPT, recomputes()),
    "BERT": (theorems.model_equals_whole, BERT, recomputes()),
    "recompute": (theorems.recompute_changes_nothing, ONE_MODEL, recomputes()),
    "stages": (stages, ONE_MODEL, CUTS),
    "joined parts": (body(test_gpt.test_joined_parts_are_the_whole), some([1], architectures=ANY_MODEL, num_layers=5),
                     DATA),
    "the future is hidden": (body(test_gpt.test_the_future_is_hidden), ONE_GPT),
    "f and g": (adjoint, st.sampled_from([test_mappings.TENSOR_PARALLEL, *test_mappings.SPLIT]), COUNT, COUNT),
    "pipeline": (pipeline, test_pipeline.training_schedules(), DATA),
    "replicas": (theorems.replicas_equal_one_process, ONE_GPT, COUNT, COUNT),
    "experts by their definition": (experts_theorems.experts_are_their_definition,
                                    some([1], architectures=ANY_MODEL, experts=1)),
    "experts": (experts_theorems.experts_equal_whole, some(architectures=ANY_MODEL, experts=1)),
    "experts dealt out": (dealt_experts, DATA, COUNT),
    "a model with experts": (theorems.model_equals_whole, some(architectures=ANY_MODEL, experts=1), recomputes()),
    "a pipeline with experts": (partial(pipeline, experts=1), test_pipeline.training_schedules(), DATA),
    "replicas with experts": (theorems.replicas_equal_one_process, some([1], experts=1), COUNT, COUNT),
    "ZeRO with experts": (zero, some([1], experts=1, **test_zero.SPREAD), COUNT, COUNT, test_zero.STAGE,
                          test_zero.BUCKET, st.sampled_from([0.0, 0.5])),
    "a batch dealt in any way": (body(test_batches.test_dealt_in_any_way_a_batch_has_one_loss), ONE_MODEL,
                                 st.permutations(range(5)), st.sets(st.integers(1, 4))),
    "padding of any content": (body(test_bert.test_nothing_depends_on_the_content_of_padding), ONE_BERT),
    "padding of any length": (body(test_bert.test_padding_may_be_of_any_length), ONE_BERT),
    "targets without weight": (body(test_bert.test_targets_without_weight_do_not_matter), ONE_BERT),
    "KV cache": (body(test_kv_cache.test_logits_are_those_of_the_whole_prefix), ONE_GPT, DATA),
    "ZeRO": (zero, some([1], **test_zero.SPREAD), COUNT, COUNT, test_zero.STAGE, test_zero.BUCKET,
             st.sampled_from([0.0, 0.5])),
    "Adam": (adam_moves_slices_as_the_whole, st.integers(0, 9), COUNT, BOOL),
    "split and joined": (body(test_params.test_join_is_the_inverse_of_split), GPT),
    "attention by its definition": (attention_is_its_definition, DATA, COUNT, COUNT, COUNT, EACH, COUNT, BOOL),
    "cached attention": (cached_attention, COUNT, COUNT, COUNT, COUNT, EACH, COUNT),
    "softmax": (softmax_is_its_definition, COUNT, COUNT),
}


@pytest.mark.parametrize("name", THEOREMS)
@settings(max_examples=settings().max_examples // 2)
@given(data=DATA)
def test_holds_exactly(name, data):
    theorem, *strategies = THEOREMS[name]
    theorem(*(data if strategy is DATA else data.draw(strategy) for strategy in strategies))


# ---- what floats do not see -----------------------------------------------------------------------------------------

CASE = dict(t=2, model=ModelConfig(2, 4, 2, 5, 6, make_vocab_size_divisible_by=3), b=1, s=4, seed=7)


def kv_cache(case):
    """Compare a text in two pieces with all of it."""
    c, p, tokens = case.model, case.params(gpt_tensors(case.model)), case.ids("tokens", case.b, case.s)
    kv_cache = empty_kv_cache(c, p.blocks, case.s, p.embedding.word, case.b)
    for piece in (tokens[:, :3], tokens[:, 3:]):
        logits = next_logits(piece, p, c, kv_cache)
    close(logits, gpt_logits(tokens, p, c)[:, -1])


def zero_2(case):
    test_zero.zero_equals_one_process(case, 2, 2, 2, 1 << 20, steps=1)


def two_stages(case):
    test_pipeline.pipeline_equals_one_process(make("1f1b", 2, 2), case)


def grouped_attention(case):
    """Four ranks with two heads of keys and values: two ranks each hold a copy."""
    model = replace(case.model, num_query_groups=2, num_attention_heads=4, qk_layernorm=True, normalization="RMSNorm",
                    kv_channels=4)
    theorems.attention_equals_whole(replace(case, t=4, model=model))


UNSEEN = {
    "the MLP's bias": (theorems.mlp_equals_whole, "layers.mlp", "y + p.b_out for", "y + p.b_out * (1 + 2**-50) for"),
    "the sum over copies": (grouped_attention, "comm.mappings", "for x in all_reduce(parts[first:first + n])",
                            "for x in all_reduce([y * (1 + 2**-50) for y in parts[first:first + n]])"),
    "the bias's gradient": (theorems.mlp_equals_whole, "layers.mlp", "replace(grad, b_out=db_out)",
                            "replace(grad, b_out=db_out * (1 + 2**-50))"),
    "a part of softmax": (cross_entropy, "layers.cross_entropy", "(exp / total[..., None], *cache)",
                          "(exp / (total[..., None] + 2**-50), *cache)"),
    "the loss": (cross_entropy, "layers.cross_entropy", "np.log(total) - all_reduce(picked)[0]",
                 "np.log(total * (1 + 2**-50)) - all_reduce(picked)[0]"),
    "the mean": (partial(theorems.replicas_equal_one_process, d=3, m=1), "parallel.data_parallel",
                 "(microbatch, 1 / tokens.size)", "(microbatch, 1 / tokens.size + 2**-50)"),
    "the clipped gradient": (zero_2, "parallel.zero", "param, clip * grad, m", "param, clip * grad * (1 + 2**-50), m"),
    "a cached key": (kv_cache, "kv_cache", "self.length] = k, v", "self.length] = k * (1 + 2**-50), v"),
    "a pipeline's share": (two_stages, "parallel.pipeline", "dy = shares[i]", "dy = [x + 2**-50 for x in shares[i]]"),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_floats_do_not_see_is_another_formula(name):
    """An error of 2^-50 passes with floats of 53 bits, whose roundings add up to more."""
    theorem, module, right, wrong = UNSEEN[name]
    theorem(ExactCase(**CASE))
    with planted(f"reference.{module}", right, wrong):
        theorem(Case(**CASE))
        with pytest.raises(AssertionError, match="other formulas"):
            theorem(ExactCase(**CASE))
