"""Sizes that do not fit together are refused, with a sentence that names the option, its value and the rule."""
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from reference.config import (ExpertsConfig, ModelConfig, ParallelConfig, Recompute, check_model_fits,
                              check_sequence_fits, number_of_microbatches)
from reference.errors import UserError

FITS = dict(num_layers=2, hidden_size=12, num_attention_heads=4, vocab_size=50, max_position_embeddings=8)


@pytest.mark.parametrize("change, sentence", [
    (dict(num_layers=0), "--num-layers is 0, but must be at least 1."),
    (dict(num_layers=10_001), "--num-layers is 10,001, but must be at most 10,000, which is several times the largest"),
    (dict(hidden_size=10**19), "--hidden-size is 10,000,000,000,000,000,000, but must be at most 1,000,000"),
    (dict(layernorm_epsilon=float("inf")), "--layernorm-epsilon is inf, but must be a number above 0."),
    (dict(vocab_size=-3), "--vocab-size is -3, but must be at least 1."),
    (dict(num_attention_heads=5), "--num-attention-heads is 5, but must divide --hidden-size, which is 12."),
    (dict(activation="swish"), "The activation is 'swish', but must be one of gelu, gelu_exact, relu."),
    (dict(position_embedding_type="alibi"), "must be one of learned_absolute, rope"),
    (dict(rotary_percent=0.0), "--rotary-percent is 0.0, but must be above 0 and at most 1"),
    (dict(rotary_percent=1.5), "--rotary-percent is 1.5, but must be above 0 and at most 1"),
    (dict(init_method_std=float("nan")), "--init-method-std is nan, but must be a number that is not negative."),
    (dict(position_embedding_type="rope", hidden_size=20), "gives an even number above 0"),
    (dict(layernorm_epsilon=0.0), "--layernorm-epsilon is 0.0, but must be a number above 0."),
    (dict(hidden_dropout=1.0), "--hidden-dropout is 1.0, but must be in [0, 1)"),
    (dict(attention_dropout=float("nan")), "--attention-dropout is nan, but must be in [0, 1)"),
])
def test_a_model_that_does_not_fit_together(change, sentence):
    with pytest.raises(UserError) as error:
        ModelConfig(**FITS | change)
    assert sentence in str(error.value)


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 4))
def test_the_data_parallel_size_follows_from_the_world(world_size, t, p):
    """t p d is the number of ranks, or a sentence names a number that would do."""
    if world_size % (t * p) == 0:
        assert ParallelConfig.for_world(world_size, t, p).world_size == world_size
    else:
        with pytest.raises(UserError, match=f"must be a multiple of {t * p}, but it is {world_size}"):
            ParallelConfig.for_world(world_size, t, p)


@given(st.integers(1, 40), st.integers(1, 12))
def test_t_must_divide_the_heads(heads, t):
    model = ModelConfig(**FITS | dict(hidden_size=2 * heads, num_attention_heads=heads))
    if heads % t == 0:
        check_model_fits(model, ParallelConfig(t))
    else:
        with pytest.raises(UserError, match=f"--tensor-model-parallel-size is {t}, but must divide "
                                            f"--num-attention-heads, which is {heads}."):
            check_model_fits(model, ParallelConfig(t))


@given(st.integers(1, 40), st.integers(2, 12))
def test_t_must_divide_the_sequence_for_sequence_parallelism(s, t):
    check_sequence_fits(s, ParallelConfig(t))
    cut = ParallelConfig(t, sequence_parallel=True)
    if s % t == 0:
        check_sequence_fits(s, cut)
    else:
        with pytest.raises(UserError, match=f"but must divide --seq-length, which is {s}."):
            check_sequence_fits(s, cut)


@pytest.mark.parametrize("make, sentence", [
    (lambda: ParallelConfig(zero_stage=4), "--zero-stage is 4, but must be 0 (nothing is sharded)"),
    (lambda: ParallelConfig(cpu_offload=True), "without ZeRO there are no shards"),
    (lambda: ParallelConfig(1, 1, 4, num_distributed_optimizer_instances=2),
     "--num-distributed-optimizer-instances is 2, but without ZeRO every replica holds a copy of its own"),
    (lambda: ParallelConfig(1, 1, 4, zero_stage=1, num_distributed_optimizer_instances=3),
     "--num-distributed-optimizer-instances is 3, but must divide"),
    (lambda: ParallelConfig(1, 1, 4, zero_stage=1, expert_model_parallel_size=2, num_distributed_optimizer_instances=2),
     "--num-distributed-optimizer-instances is 2, but --expert-model-parallel-size is 2"),
    (lambda: ParallelConfig(sequence_parallel=True), "but --tensor-model-parallel-size is 1"),
    (lambda: ParallelConfig(2, keep_gathered_inputs=True), "--keep-gathered-inputs needs --sequence-parallel"),
    (lambda: Recompute("all"), "--recompute-granularity is 'all', but must be one of none, selective, full."),
    (lambda: Recompute("full", "each"), "--recompute-method is 'each', but must be one of uniform, block."),
    (lambda: Recompute("full", "block", 0), "--recompute-num-layers is 0, but must be at least 1."),
])
def test_choices_that_do_not_go_together(make, sentence):
    with pytest.raises(UserError) as error:
        make()
    assert sentence in str(error.value)


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 9))
def test_microbatches(batch, micro, d):
    """m b d = B, or a sentence names the nearest B that would do."""
    if batch % (micro * d) == 0:
        assert number_of_microbatches(batch, micro, d) * micro * d == batch
    else:
        with pytest.raises(UserError, match="The nearest that fits is") as error:
            number_of_microbatches(batch, micro, d)
        nearest = int(str(error.value).split()[-1].rstrip("."))
        assert number_of_microbatches(nearest, micro, d) >= 1
        assert abs(nearest - batch) <= micro * d


@given(st.integers(1, 10**6), st.integers(1, 256), st.integers(1, 16))
def test_the_padded_vocabulary_is_the_next_multiple(vocab_size, by, t):
    model = ModelConfig(**FITS | dict(vocab_size=vocab_size, make_vocab_size_divisible_by=by))
    padded = model.padded_vocab_size(t)
    assert padded % (by * t) == 0 and 0 <= padded - vocab_size < by * t


def test_gpt2_vocabulary_on_eight_ranks():
    """50,257 words become 51,200 at 128 x 8, as in the paper."""
    assert ModelConfig(**FITS | dict(vocab_size=50_257)).padded_vocab_size(8) == 51_200


def test_shared_layers_go_with_equal_layers_that_are_held_whole():
    """All layers have experts or none has; and nothing is gathered for one layer alone."""
    model = ModelConfig(4, 8, 2, 17, 8, share_layers=True)
    check_model_fits(model, ParallelConfig(2, 2, zero_stage=2))
    with pytest.raises(UserError, match="--zero-stage 3 gathers .* Choose --zero-stage 2, or leave --share-layers out"):
        check_model_fits(model, ParallelConfig(zero_stage=3))
    with pytest.raises(UserError, match="with --moe-layer-freq 2 only some layers have experts"):
        replace(model, experts=ExpertsConfig(4, moe_layer_freq=2))
    replace(model, experts=ExpertsConfig(4))
