"""Trees, their split over ranks and their initial values."""
import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference.config import ModelConfig
from reference.errors import UserError
from reference.models.gpt import gpt_tensors
from reference.params import initialize, initialize_shard, leaves, split
from tests.strategies import cases, trees_close


@given(cases(), st.integers(0, 2**40))
def test_a_rank_draws_the_weights_that_the_split_would_give_it(case, seed):
    """Initial weights do not depend on t: to the last bit, padding included."""
    tensors = gpt_tensors(case.model)
    shards = split(initialize(tensors, seed, np.float64), tensors, case.t)
    for rank, shard in enumerate(shards):
        trees_close(initialize_shard(tensors, seed, np.float64, case.t, rank), shard, 0.0)


@given(cases(), st.integers(0, 2**40))
def test_initial_weights_do_not_depend_on_the_stage(case, seed):
    """A stage draws what the whole model has under the same names; so the two copies of a tied table are alike."""
    whole = dict(leaves(initialize(gpt_tensors(case.model), seed, np.float64)))
    for layer in range(case.model.num_layers):
        for name, x in leaves(initialize(gpt_tensors(case.model, range(layer, layer + 1)), seed, np.float64)):
            assert (x == whole[name]).all()


def test_initial_weights_have_the_declared_spread():
    """N(0, 0.02); what ends a residual branch N(0, 0.02 / sqrt(2 L)); norms 1; biases 0. Decay for matrices only."""
    model = ModelConfig(3, 96, 4, 500, 64)
    tensors = gpt_tensors(model)
    for (name, x), (_, tensor) in zip(leaves(initialize(tensors, 1, np.float64)), leaves(tensors), strict=True):
        if x.ndim == 1 or name.endswith("b_qkv"):
            assert (x == (1.0 if name.endswith("layernorm.weight") else 0.0)).all() and not tensor.decay
        else:
            std = 0.02 / np.sqrt(6) if name.endswith("w_out") else 0.02
            assert abs(x.std() / std - 1) < 6 / np.sqrt(2 * x.size) and tensor.decay
            assert abs(x.mean()) < 6 * std / np.sqrt(x.size)


@given(cases())
def test_what_cannot_be_cut_is_refused(case):
    """Everything but the vocabulary must divide by t, and is not padded behind one's back."""
    t = case.model.num_attention_heads + 1
    with pytest.raises(UserError, match=f"does not divide by {t}"):
        split(case.params(gpt_tensors(case.model)), gpt_tensors(case.model), t)
