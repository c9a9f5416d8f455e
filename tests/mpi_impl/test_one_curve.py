"""The main theorem for GPT, Llama and Llama with experts: on any ranks training has one process's loss curve."""
from itertools import combinations

import pytest

from reference.ops import ACTIVATIONS
from tests.deep import one_fast_of
from tests.exact_theorems import proved
from tests.sampled_runs import MODELS, RANKS, RUNS, Choices, legal_choices, sampled_runs
from tests.training_theorems import training_equals_one_process

EVERY = [(model, number) for model in MODELS for number in range(RUNS)]


@pytest.mark.parametrize("model, number", [
    pytest.param(*one, marks=[] if one[1] == RUNS // 2 else pytest.mark.deep) for one in EVERY])
def test_floats(ranks, model, number):
    """In four steps losses differ by less than 1e-11, and gradients and weights by less than 1e-10."""
    choices, case, m, plan = sampled_runs(model)[number]
    ranks.run(choices.ranks, training_equals_one_process, case, 4, m, 0.05, plan, timeout=120.0)


@pytest.mark.parametrize("model, number", one_fast_of(RUNS, EVERY))
def test_exact_numbers(ranks, model, number):
    """Two steps and an evaluation; one step of a deep model, since the chance of an error grows with the degree."""
    choices, case, m, plan = sampled_runs(model)[number]
    steps = 2 if case.model.num_layers < 8 else 1
    ranks.run(choices.ranks, proved, training_equals_one_process, case.exactly(), steps, m, 0.5, plan, timeout=300.0)


# ---- the samples ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_every_two_choices_meet_that_go_together(model):
    chosen = [run.choices for run in sampled_runs(model)]
    assert pairs(chosen) == pairs(legal_choices(model == "experts"))
    assert len(set(chosen)) == RUNS >= 60 and max(choices.ranks for choices in chosen) == RANKS


def pairs(rows: list[Choices]) -> set[tuple]:
    """Return all pairs of values of two choices that occur in a row."""
    columns = list(zip(*rows))
    return {(i, j, *values) for i, j in combinations(range(len(columns)), 2) for values in zip(columns[i], columns[j])}


def test_every_choice_of_a_model_is_met():
    """And what is ragged is: layers that do not divide, vocabularies that are padded, one position, one microbatch."""
    runs = {model: sampled_runs(model) for model in MODELS}
    configs = {model: [run.case.model for run in runs[model]] for model in MODELS}
    assert {c.activation for c in configs["gpt"]} == set(ACTIVATIONS)
    assert {c.position_embedding_type for c in configs["gpt"]} == {"learned_absolute", "rope"}
    for model in MODELS:
        every = runs[model]
        for name in ("scatter_gather", "cpu_offload"):
            assert {getattr(run.plan, name) for run in every} == {False, True}
        assert {run.case.keep_gathered_inputs for run in every} == {False, True}
        either(configs[model], lambda c: c.tied, lambda c: c.hidden_dropout > 0, lambda c: c.attention_dropout > 0,
               lambda c: c.vocab_size % c.make_vocab_size_divisible_by)
        either(every, lambda run: run.microbatches < run.plan.p, lambda run: run.microbatches > 1,
               lambda run: run.case.b > 1, lambda run: run.case.s == 1,
               lambda run: run.case.model.num_layers % run.plan.p)
    for model in ("llama", "experts"):
        either(configs[model], lambda c: c.qk_layernorm, lambda c: c.add_qkv_bias, lambda c: c.use_rope_scaling,
               lambda c: c.kv_channels, lambda c: c.groups == 1, lambda c: c.groups == c.num_attention_heads)
        either(runs[model], lambda run: run.case.model.groups < run.case.t)
    either([c.experts for c in configs["experts"]], lambda c: c.moe_router_pre_softmax, lambda c: c.moe_ffn_hidden_size,
           lambda c: c.moe_shared_expert_intermediate_size, lambda c: c.moe_aux_loss_coeff,
           lambda c: c.moe_z_loss_coeff, lambda c: c.moe_layer_freq > 1, lambda c: c.moe_router_topk == c.num_experts)
    either(runs["experts"], lambda run: run.case.model.experts.num_experts > run.plan.e > 1)


def either(several, *properties) -> None:
    """Assert that some have each property, and others have not."""
    for has in properties:
        assert {bool(has(one)) for one in several} == {False, True}
