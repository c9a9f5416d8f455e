"""The number of microbatches follows from the batch, or the nearest batch that would do is named; layers are shared."""
from dataclasses import replace

import pytest
from hypothesis import example, given, strategies as st

from reference.config import ExpertsConfig, ModelConfig, ParallelConfig, check_model_fits, number_of_microbatches
from reference.errors import UserError

MODEL = ModelConfig(num_layers=2, hidden_size=12, num_attention_heads=4, vocab_size=50, max_position_embeddings=8)


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
