"""Sizes and choices that do not fit together are refused, with a sentence that names the option."""
from dataclasses import replace
from functools import partial
from math import inf, nan

import pytest
from hypothesis import example, given, strategies as st

from reference.config import (ExpertsConfig, ModelConfig, ParallelConfig, Recompute, check_model_fits,
                              check_sequence_fits, number_of_microbatches)
from reference.costs.flops import iteration_flops
from reference.costs.memory import layer_activations, most_in_flight
from reference.errors import UserError
from reference.optimizer import OptimizerConfig
from reference.parallel.model_states import model_states
from reference.precision import LossScaling, Precision

MODEL = ModelConfig(num_layers=2, hidden_size=12, num_attention_heads=4, vocab_size=50, max_position_embeddings=8)
# The first option of each row is the one that the sentence names.
REFUSED = {
    partial(replace, MODEL): [
        dict(num_layers=0), dict(num_layers=10_001), dict(hidden_size=10**19), dict(num_attention_heads=5),
        dict(num_query_groups=3), dict(activation="swish"), dict(activation="relu", swiglu=True, add_bias_linear=False),
        dict(swiglu=True), dict(position_embedding_type="alibi"), dict(rotary_percent=1.5),
        dict(rotary_percent=1.0, position_embedding_type="rope", hidden_size=20), dict(rotary_base=0.5),
        dict(init_method_std=nan), dict(layernorm_epsilon=0.0), dict(hidden_dropout=1.0), dict(heads=("sop",)),
        dict(untie_embeddings_and_output_weights=True, architecture="bert"),
        dict(share_layers=True, experts=ExpertsConfig(4, moe_layer_freq=2))],
    partial(ExpertsConfig, num_experts=4): [
        dict(moe_router_topk=5), dict(moe_router_topk=1), dict(moe_layer_freq=0), dict(moe_aux_loss_coeff=-1.0),
        dict(moe_expert_capacity_factor=0.0)],
    partial(ParallelConfig, 1, 1, 4): [
        dict(cpu_offload=True), dict(num_distributed_optimizer_instances=2),
        dict(num_distributed_optimizer_instances=3, zero_stage=1),
        dict(num_distributed_optimizer_instances=2, zero_stage=1, expert_model_parallel_size=2),
        dict(expert_model_parallel_size=3), dict(sequence_parallel=True), dict(keep_gathered_inputs=True)],
    Recompute: [dict(granularity="all")],
    partial(OptimizerConfig, lr=1.0, lr_decay_iters=10): [
        dict(lr=nan), dict(adam_eps=0.0), dict(min_lr=2.0), dict(clip_grad=-0.1),
        dict(lr_decay_iters=0, lr_decay_style="constant"), dict(lr_decay_iters=10, lr_warmup_iters=10),
        dict(adam_beta2=1.0)],
    LossScaling: [
        dict(loss_scale=1e-30), dict(loss_scale=1e30), dict(initial_loss_scale=inf), dict(loss_scale_window=0),
        dict(loss_scale_factor=1.0), dict(initial_loss_scale=2.0, min_loss_scale=4.0)],
    Precision: [dict(compute="float8")],
}


@pytest.mark.parametrize("make, wrong", [(make, wrong) for make, rows in REFUSED.items() for wrong in rows])
def test_a_choice_that_makes_no_sense_is_refused_by_its_name(make, wrong):
    with pytest.raises(UserError, match=next(iter(wrong)).replace("_", "-")):
        make(**wrong)


@pytest.mark.parametrize("refused, says", [
    (lambda: model_states(1, 1, 4), "--zero-stage"), (lambda: iteration_flops(MODEL, 1, 1, "some"), "'some'.*none"),
    (lambda: layer_activations(MODEL, 1, 1, recompute="some"), "'some'.*none, selective, full"),
    (lambda: most_in_flight("2f2b", 1, 1, 0), "'2f2b'.*gpipe, 1f1b")])
def test_an_unknown_choice_of_a_formula_is_refused(refused, says):
    with pytest.raises(UserError, match=says):
        refused()


def fits_or_is_refused(fits: bool, check, *args) -> str:
    """Assert that the check passes, or raises; return its sentence."""
    if fits:
        check(*args)
        return ""
    with pytest.raises(UserError) as error:
        check(*args)
    return str(error.value)


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 4))
def test_the_data_parallel_size_follows_from_the_world(world_size, t, p):
    """t p d is the number of ranks, or a sentence names a number that would do."""
    fits = world_size % (t * p) == 0
    sentence = fits_or_is_refused(fits, ParallelConfig.for_world, world_size, t, p)
    assert fits or f"multiple of {t * p}, but it is {world_size}" in sentence
    assert not fits or ParallelConfig.for_world(world_size, t, p).world_size == world_size


@given(st.integers(1, 40), st.integers(2, 12))
def test_t_must_divide_the_heads_and_the_sequence_for_sequence_parallelism(n, t):
    model = replace(MODEL, hidden_size=2 * n, num_attention_heads=n)
    sentence = fits_or_is_refused(n % t == 0, check_model_fits, model, ParallelConfig(t))
    assert n % t == 0 or f"{t}, but must divide --num-attention-heads, which is {n}." in sentence
    check_sequence_fits(n, ParallelConfig(t))
    sentence = fits_or_is_refused(n % t == 0, check_sequence_fits, n, ParallelConfig(t, sequence_parallel=True))
    assert n % t == 0 or f"but must divide --seq-length, which is {n}." in sentence


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 9))
@example(1, 3, 3)
def test_microbatches(batch, micro, d):
    """m b d = B, or a sentence names the nearest B that would do."""
    fits = batch % (micro * d) == 0
    sentence = fits_or_is_refused(fits, number_of_microbatches, batch, micro, d)
    nearest = batch if fits else int(sentence.split()[-1].rstrip("."))
    assert number_of_microbatches(nearest, micro, d) * micro * d == nearest and abs(nearest - batch) <= micro * d


@given(st.integers(1, 10**6), st.integers(1, 256), st.integers(1, 16))
@example(50_257, 128, 8)
def test_the_padded_vocabulary_is_the_next_multiple(vocab_size, by, t):
    """50,257 words become 51,200 at 128 x 8, as in the paper."""
    padded = replace(MODEL, vocab_size=vocab_size, make_vocab_size_divisible_by=by).padded_vocab_size(t)
    assert padded % (by * t) == 0 and 0 <= padded - vocab_size < by * t


def test_shared_layers_go_with_equal_layers_that_are_held_whole():
    """All layers have experts or none has; and nothing is gathered for one layer alone."""
    model = replace(MODEL, share_layers=True)
    check_model_fits(replace(model, experts=ExpertsConfig(4)), ParallelConfig(2, 2, zero_stage=2))
    with pytest.raises(UserError, match="--zero-stage 3 .*--share-layers"):
        check_model_fits(model, ParallelConfig(zero_stage=3))
