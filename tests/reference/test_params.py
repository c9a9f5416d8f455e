"""Trees, their split over ranks and their initial values."""
import numpy as np
import pytest
from hypothesis import given

from reference.config import ModelConfig
from reference.errors import UserError
from reference.models.gpt import gpt_tensors
from reference.params import initialize, leaves, split
from tests.strategies import cases


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
