"""Sharded = unsharded as formulas, on real ranks: exact numbers have no rounding, so nothing is forgiven.

Each theorem is one that also holds for floats (test_layers.py, test_training.py). Two layers, or two steps, that agree
on random exact numbers are the same formulas, but for a chance that `proved` asserts to be small.
"""
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl.prediction.predict import PassCounts
from reference.config import (ARCHITECTURES, CP_COMM_TYPES, NORMALIZATIONS, POSITION_EMBEDDINGS, RECOMPUTE,
                              ExpertsConfig, ModelConfig, Recompute)
from reference.exact.array import as_exact
from reference.ops import ACTIVATIONS
from reference.schedules.generators import SCHEDULES, make
from tests import rank_theorems as theorems
from tests.cases import Case, ExactCase
from tests.deep import one_fast_of
from tests.exact_theorems import proved, training_that_clips
from tests.mpi_impl.test_training import EVERY, RECOMPUTES, place_and_plan
from tests.rank_theorems import as_is
from tests.strategies import ANY_MODEL, cases, recomputes
from tests.training_theorems import Plan, ledger_is_predicted, training_equals_one_process

FEW = settings(max_examples=max(3, settings().max_examples // 6))
LIMIT = 120.0       # seconds: Python's integers are slow

# ---- layers ---------------------------------------------------------------------------------------------------------


@st.composite
def exact_cases(draw):
    """Draw a small case of any model, with exact numbers."""
    case = draw(cases(architectures=ANY_MODEL, num_layers=draw(st.integers(1, 2)), vocab_size=draw(st.integers(2, 12))))
    heads = case.model.num_attention_heads
    model = case.model if case.model.hidden_size <= 24 else replace(case.model, hidden_size=2 * heads, rotary_percent=1)
    return ExactCase(**vars(replace(case, model=model)))


SELECTIVE = st.sampled_from([Recompute(), Recompute("selective")])
LAYERS = [(theorems.column_parallel_equals_whole, st.booleans()), (theorems.row_parallel_equals_whole,),
          (theorems.mlp_equals_whole,), (theorems.attention_equals_whole, st.booleans(), SELECTIVE),
          (theorems.block_equals_whole, SELECTIVE), (theorems.embedding_equals_whole,), (theorems.logits_equal_whole,),
          (theorems.masked_lm_equals_whole,), (theorems.loss_equals_whole,),
          (theorems.model_equals_whole, recomputes())]


@pytest.mark.parametrize("theorem, choices", [(theorem, choices) for theorem, *choices in LAYERS],
                         ids=lambda x: getattr(x, "__name__", ""))
@FEW
@given(case=exact_cases(), data=st.data())
def test_layers(ranks, theorem, choices, case, data):
    """With any sizes, on one to eight ranks, sequence parallel or not, dropout on."""
    ranks.run(case.t, proved, theorem, case, *map(data.draw, choices), timeout=LIMIT)


# ---- whole steps ----------------------------------------------------------------------------------------------------


class Training(NamedTuple):
    """Two steps of a model on t x p x d ranks."""

    t: int
    d: int
    m: int
    plan: Plan
    model: dict = {}
    sequence_parallel: bool = False
    keep_gathered_inputs: bool = False

    @property
    def case(self) -> ExactCase:
        stages, c = make(self.plan.schedule, self.plan.p, self.m, self.plan.chunks).stages, self.plan.c
        s = 2 * c if c > 1 else 3 + self.sequence_parallel
        sizes = dict(num_layers=max(stages, 3), hidden_size=4 * self.t, num_attention_heads=2 * self.t, vocab_size=10,
                     max_position_embeddings=max(s, 4), make_vocab_size_divisible_by=3)
        return ExactCase(self.t, ModelConfig(**sizes | self.model), 1, s, self.t, False, self.sequence_parallel,
                         self.keep_gathered_inputs)

    @property
    def ranks(self) -> int:
        return self.t * self.plan.p * self.plan.c * self.d


NO_DROPOUT = dict(hidden_dropout=0.0, attention_dropout=0.0)
UNTIED = dict(untie_embeddings_and_output_weights=True)
LLAMA = dict(normalization="RMSNorm", swiglu=True, add_bias_linear=False, ffn_hidden_size=8, rotary_base=5e5,
             position_embedding_type="rope")
EXPERTS = ExpertsConfig(4, 2, moe_ffn_hidden_size=2, moe_aux_loss_coeff=0.5, moe_z_loss_coeff=0.25)
# Together they have every choice that there is.
RUNS = {
    "gpipe, ZeRO-1": Training(1, 2, 2, Plan(2, "gpipe", bucket_size=7, zero_stage=1), NO_DROPOUT),
    "1f1b, sequence parallel": Training(
        2, 2, 2, Plan(2, "1f1b", bucket_size=1 << 30, recompute=Recompute("selective")), UNTIED, True),
    "interleaved, keeps gathered inputs": Training(
        2, 1, 2, Plan(2, "interleaved", 2, bucket_size=5), dict(position_embedding_type="rope"), True, True),
    "zb-h1, ZeRO-2, BERT": Training(
        2, 2, 2, Plan(2, "zb-h1", scatter_gather=False, bucket_size=13, zero_stage=2, recompute=Recompute("full")),
        dict(architecture="bert", heads=("lm", "sop"))),
    "zb-h2, ZeRO-3, offloaded": Training(1, 2, 3, Plan(3, "zb-h2", zero_stage=3, cpu_offload=True)),
    "zb-v, ZeRO-3": Training(1, 2, 2, Plan(2, "zb-v", zero_stage=3), dict(activation="gelu_exact")),
    "dualpipe-v, ZeRO-2, offloaded, BERT": Training(
        1, 2, 2, Plan(2, "dualpipe-v", bucket_size=101, zero_stage=2, cpu_offload=True),
        dict(architecture="bert", heads=("choice",), apply_residual_connection_post_layernorm=True)),
    "a Llama, more ranks than groups": Training(
        4, 1, 2, Plan(bucket_size=7, recompute=Recompute("selective")), LLAMA | dict(num_query_groups=2)),
    "a Qwen, multi-query, a pipeline, ZeRO-2, sequence parallel": Training(
        2, 2, 2, Plan(2, zero_stage=2), LLAMA | UNTIED | dict(
            num_query_groups=1, qk_layernorm=True, add_qkv_bias=True, kv_channels=4, use_rope_scaling=True), True),
    "ZeRO-1, BERT, sequence parallel": Training(
        4, 2, 1, Plan(bucket_size=1, zero_stage=1, recompute=Recompute("full", "block", 1)),
        dict(architecture="bert", heads=("lm",), activation="relu", num_layers=2), True),
    "ZeRO-3 on three replicas, sequence parallel": Training(
        2, 3, 2, Plan(zero_stage=3, recompute=Recompute("full", "uniform", 2)), {}, True),
    "a ring of three, rope, 1f1b": Training(
        1, 1, 2, Plan(2, c=3, zero_stage=1), dict(position_embedding_type="rope", num_layers=2)),
    "a ring of two, sequence parallel, BERT": Training(
        2, 2, 1, Plan(c=2, zero_stage=2, recompute=Recompute("full")),
        dict(architecture="bert", heads=("lm", "sop"), num_layers=2), True),
    "gathered keys, ZeRO-3": Training(
        1, 2, 2, Plan(c=2, cp_comm_type="all_gather", zero_stage=3), dict(num_layers=2)),
    "hybrid sharding, ZeRO-3, rings of two in each of two instances": Training(
        1, 2, 2, Plan(c=2, zero_stage=3, instances=2), dict(num_layers=2)),
    "hybrid sharding, ZeRO-1, two instances, a pipeline": Training(
        1, 4, 2, Plan(2, bucket_size=100, zero_stage=1, instances=2), dict(num_layers=2)),
    "experts dealt out to two, sequence parallel": Training(
        2, 4, 1, Plan(zero_stage=1, bucket_size=100, e=2), dict(experts=EXPERTS, num_layers=2), True),
    "experts dealt out to four of two, a ring of two, ZeRO-3": Training(
        1, 2, 1, Plan(c=2, zero_stage=3, recompute=Recompute("full"), e=4), dict(
            experts=replace(EXPERTS, moe_router_pre_softmax=True, moe_shared_expert_intermediate_size=2),
            num_layers=2)),
    "experts in a V, ZeRO-2, BERT": Training(
        1, 2, 2, Plan(2, "zb-v", zero_stage=2, e=2), dict(
            experts=replace(EXPERTS, moe_layer_freq=2), architecture="bert", heads=("lm",))),
    "heads for positions, BERT": Training(
        2, 1, 2, Plan(2, "zb-h1", c=2, cp_comm_type="a2a", recompute=Recompute("selective")),
        dict(architecture="bert", heads=("choice",), num_layers=2)),
}


@pytest.mark.parametrize("name", one_fast_of(3, RUNS))
def test_training(ranks, name):
    """Two steps, so that the update itself is proved, and an evaluation."""
    run = RUNS[name]
    ranks.run(run.ranks, proved, training_equals_one_process, run.case, 2, run.m, 0.5, run.plan, timeout=LIMIT)


def test_every_choice_is_met():
    """By the runs above, and either side of every yes and no."""
    plans, every = [run.plan for run in RUNS.values()], [run.case for run in RUNS.values()]
    models = [case.model for case in every]
    assert {plan.schedule for plan in plans} == SCHEDULES.keys() - {"forward-only"}
    assert {plan.zero_stage for plan in plans} == set(range(4))
    assert {plan.cp_comm_type for plan in plans if plan.c > 1} == set(CP_COMM_TYPES)
    assert {plan.instances > 1 for plan in plans} == {False, True}
    assert {plan.recompute.granularity for plan in plans} == set(RECOMPUTE)
    assert {plan.recompute.method for plan in plans} == {"uniform", "block"}
    assert {(c.architecture, c.heads) for c in models} == {(name, each) for name in ARCHITECTURES
                                                         for each in ARCHITECTURES[name]}
    assert {c.activation for c in models} == set(ACTIVATIONS)
    assert {c.position_embedding_type for c in models} == set(POSITION_EMBEDDINGS)
    assert {c.normalization for c in models} == set(NORMALIZATIONS)
    assert {c.groups < case.t for c, case in zip(models, every)} == {False, True}
    for several, names in ((plans, ("cpu_offload", "scatter_gather")),
                           (every, ("sequence_parallel", "keep_gathered_inputs")),
                           (models, ("untie_embeddings_and_output_weights", "apply_residual_connection_post_layernorm",
                                     "hidden_dropout", "swiglu", "grouped_attention", "qk_layernorm", "add_qkv_bias",
                                     "kv_channels", "use_rope_scaling"))):
        for name in names:
            assert {bool(getattr(each, name)) for each in several} == {False, True}, name


@pytest.mark.parametrize("clips", [False, True])
def test_clipping(ranks, clips):
    """Where the norm is above its bound, and where it is not. (Exact numbers are compared in a random order.)"""
    ranks.run(4, proved, training_that_clips, Training(2, 2, 2, Plan()).case, clips, 2, Plan(zero_stage=1),
              timeout=LIMIT)


@pytest.mark.parametrize("t, p, d, schedule, v", EVERY[::3])
@pytest.mark.deep
def test_a_third_of_all_places_and_schedules_on_up_to_eight_ranks(ranks, t, p, d, schedule, v):
    """Go through all choices of what a rank holds in turn. (Floats, ten times as fast, go to every place.)"""
    turn = EVERY.index((t, p, d, schedule, v))
    case, m, plan = place_and_plan(t, p, d, schedule, v, turn % 4, bool(turn // 4 % 2), RECOMPUTES[turn % 5])
    ranks.run(t * p * d, proved, training_equals_one_process, ExactCase(**vars(case)), 2, m, 0.5, plan, timeout=600.0)


# ---- what is sent ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpipe, ZeRO-1", "zb-h1, ZeRO-2, BERT"])
def test_exact_numbers_count_as_float64_in_the_ledger(ranks, name):
    """What is sent is what the formulas say, in elements; and in bytes, what floats would be."""
    run = RUNS[name]
    (exact, *_), (floats, *_) = (ranks.run(run.ranks, ledger_is_predicted, case, PassCounts(1, run.m, 1, run.m),
                                           run.plan, wrap, timeout=LIMIT)
                                 for case, wrap in ((run.case, as_exact), (Case(**vars(run.case)), as_is)))
    assert exact.totals == floats.totals and {entry.dtype for entry in exact.totals} == {"float64", "int64"}
