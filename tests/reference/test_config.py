"""Sizes and choices that do not fit together are refused, with a sentence that names the option."""
from dataclasses import replace
from functools import partial
from math import inf, nan

import pytest
from hypothesis import example, given, strategies as st

from reference.config import (ExpertsConfig, ModelConfig, ParallelConfig, Recompute, check_model_fits,
                              number_of_microbatches)
from reference.errors import UserError
from reference.optimizer import OptimizerConfig
from reference.precision import LossScaling, Precision

MODEL = ModelConfig(num_layers=2, hidden_size=12, num_attention_heads=4, vocab_size=50, max_position_embeddings=8)
# What options can do wrong, too, is in tests/mpi_impl/test_arguments.py. The first of each row is named.
REFUSED = {
    partial(replace, MODEL): [
        dict(num_layers=10_001), dict(hidden_size=10**19), dict(num_query_groups=3), dict(activation="swish"),
        dict(position_embedding_type="alibi"), dict(rotary_percent=1.5),
        dict(rotary_percent=1.0, position_embedding_type="rope", hidden_size=20), dict(init_method_std=nan),
        dict(layernorm_epsilon=0.0), dict(hidden_dropout=1.0), dict(heads=("sop",)),
        dict(untie_embeddings_and_output_weights=True, architecture="bert"),
        dict(share_layers=True, experts=ExpertsConfig(4, moe_layer_freq=2))],
    partial(ExpertsConfig, num_experts=4): [
        dict(moe_layer_freq=0), dict(moe_aux_loss_coeff=-1.0), dict(moe_expert_capacity_factor=0.0)],
    partial(ParallelConfig, 1, 1, 4): [
        dict(num_distributed_optimizer_instances=2),
        dict(num_distributed_optimizer_instances=3, zero_stage=1),
        dict(num_distributed_optimizer_instances=2, zero_stage=1, expert_model_parallel_size=2)],
    Recompute: [dict(granularity="all")],
    partial(OptimizerConfig, lr=1.0, lr_decay_iters=10): [
        dict(lr=nan), dict(adam_eps=0.0), dict(min_lr=2.0), dict(clip_grad=-0.1),
        dict(lr_decay_iters=0, lr_decay_style="constant"), dict(lr_decay_iters=10, lr_warmup_iters=10),
        dict(adam_beta2=1.0)],
    LossScaling: [
        dict(loss_scale=1e-30), dict(loss_scale=1e30), dict(initial_loss_scale=inf), dict(loss_scale_window=0),
        dict(loss_scale_factor=1.0)],
    Precision: [dict(compute="float8")],
}


@pytest.mark.parametrize("make, wrong", [(make, wrong) for make, rows in REFUSED.items() for wrong in rows])
def test_a_choice_that_makes_no_sense_is_refused_by_its_name(make, wrong):
    with pytest.raises(UserError, match=next(iter(wrong)).replace("_", "-")):
        make(**wrong)


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 9))
@example(1, 3, 3)
def test_microbatches(batch, micro, d):
    """m b d = B, or a sentence names the nearest B that would do."""
    nearest = batch
    if batch % (micro * d):
        with pytest.raises(UserError) as error:
            number_of_microbatches(batch, micro, d)
        nearest = int(str(error.value).split()[-1].rstrip("."))
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
