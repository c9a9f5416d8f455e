"""Layers: when rows first are right, and when groups of heads are plain attention. test_theorems.py proves the rest."""
import numpy as np
from hypothesis import given, strategies as st

from reference.config import ModelConfig
from reference.layers.attention import Attention, attention_forward
from reference.layers.grouped_attention import GroupedAttention, grouped_attention_forward, grouped_attention_tensors
from reference.layers.mlp import mlp_forward, mlp_tensors, rows_first_mlp_forward
from tests.strategies import cases, close


@given(cases(sizes=st.sampled_from([2, 3, 4]), num_layers=1, llama=False))
def test_rows_first_needs_a_second_synchronisation(case):
    """Splitting A by rows is right only if the partial products are summed before the activation."""
    c = case.model
    p, x = case.params(mlp_tensors(c)), case.x()
    close(rows_first_mlp_forward(x, p, case.t, c.activation, reduce_first=True), mlp_forward(x, p, c)[0])


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
