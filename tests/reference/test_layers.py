"""Layers: wrong ways to shard them. test_theorems.py proves the right ones."""
import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference.config import ModelConfig
from reference.layers.attention import Attention, attention_forward
from reference.layers.cross_entropy import sharded_cross_entropy_forward, unsafe_cross_entropy
from reference.layers.gated_mlp import GatedMLP, gated_mlp_forward, side_by_side_mlp_forward
from reference.layers.grouped_attention import GroupedAttention, grouped_attention_forward, grouped_attention_tensors
from reference.layers.mlp import MLP, mlp_forward, mlp_tensors, rows_first_mlp_forward
from tests.strategies import cases, close


@given(cases(sizes=st.sampled_from([2, 3, 4]), num_layers=1, llama=False))
def test_rows_first_needs_a_second_synchronisation(case):
    """Splitting A by rows is right only if the partial products are summed before the activation."""
    c = case.model
    p, x = case.params(mlp_tensors(c)), case.x()
    close(rows_first_mlp_forward(x, p, case.t, c.activation, reduce_first=True), mlp_forward(x, p, c)[0])


def test_rows_first_is_another_function():
    """GeLU of a sum is not the sum of GeLUs: with one rank nothing is split; with two the result is far off."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 8))
    p = MLP(rng.normal(size=(8, 32)), rng.normal(size=32), rng.normal(size=(32, 8)), rng.normal(size=8))
    right = mlp_forward(x, p, ModelConfig(1, 8, 1, 4, 4))[0]
    close(rows_first_mlp_forward(x, p, 1, "gelu", reduce_first=False), right)
    wrong = rows_first_mlp_forward(x, p, 2, "gelu", reduce_first=False)
    assert np.abs(wrong - right).max() > 0.1 * np.abs(right).max()


@pytest.mark.parametrize("t", [1, 2])
def test_a_gate_beside_what_it_multiplies_is_another_function(t):
    """The first of two ranks multiplies one half of the gate with the other half of it."""
    rng = np.random.default_rng(0)
    x, p = rng.normal(size=(2, 3, 8)), GatedMLP(rng.normal(size=(8, 2, 6)), rng.normal(size=(6, 8)))
    c = ModelConfig(1, 8, 1, 4, 4, swiglu=True, add_bias_linear=False)
    whole, found = gated_mlp_forward(x, p, c)[0], side_by_side_mlp_forward(x, p, c, t)
    assert found.shape == whole.shape
    assert (t == 1) == (np.abs(found - whole).max() < 0.1 * np.abs(whole).max())


def test_groups_whose_heads_are_alike_are_plain_attention():
    """Keys and values that are the same for all heads of a group: the same function as GPT's, with copies of them."""
    rng, a, g, d = np.random.default_rng(1), 4, 2, 3
    c = ModelConfig(1, a * d, a, 4, 5, num_query_groups=g)
    shapes = vars(grouped_attention_tensors(c))
    p = GroupedAttention(**{name: None if tensor is None else rng.normal(size=tensor.shape)
                            for name, tensor in shapes.items()})
    w_kv, b_kv = np.repeat(p.w_kv, a // g, 2), np.repeat(p.b_kv, a // g, 1)
    plain = Attention(np.concatenate([p.w_q[:, None], w_kv], 1), np.concatenate([p.b_q[None], b_kv]), p.w_out, p.b_out)
    x = rng.normal(size=(2, 5, a * d))
    close(grouped_attention_forward(x, p, c)[0], attention_forward(x, plain, c)[0])


def test_the_loss_without_a_shared_maximum_overflows():
    """exp(800) is infinite in float64, exp(89) in float32; the safe form subtracts the maximum over all ranks first."""
    logits = [np.array([[[800.0, 0.0]]]), np.array([[[0.0, 1.0]]])]
    with np.errstate(over="ignore"):
        assert not np.isfinite(unsafe_cross_entropy(logits, np.array([[0]])))
    close(sharded_cross_entropy_forward(logits, np.array([[0]]))[0], np.array([[0.0]]))
