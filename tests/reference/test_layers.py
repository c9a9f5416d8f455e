"""The theorem of the textbook: every sharded layer is the unsharded one, in its output and in all gradients."""
import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference.config import ModelConfig, Recompute
from reference.layers.attention import Attention, attention_forward
from reference.layers.cross_entropy import sharded_cross_entropy_forward, unsafe_cross_entropy
from reference.layers.gated_mlp import GatedMLP, gated_mlp_forward, side_by_side_mlp_forward
from reference.layers.grouped_attention import GroupedAttention, grouped_attention_forward, grouped_attention_tensors
from reference.layers.mlp import MLP, mlp_forward, mlp_tensors, rows_first_mlp_forward
from reference.params import shard
from tests import textbook_theorems as theorems
from tests.strategies import ANY_MODEL, cases, close

EXACT = dict(tolerance=0.0)


@given(cases(), st.booleans())
def test_column_parallel_linear(case, gather_output):
    theorems.column_parallel_equals_whole(case, gather_output)


@given(cases())
def test_row_parallel_linear(case):
    theorems.row_parallel_equals_whole(case)


@given(cases())
def test_mlp(case):
    theorems.mlp_equals_whole(case)


@given(cases(architectures=ANY_MODEL), st.booleans(), st.booleans())
def test_attention(case, causal, selective):
    """It holds with and without padding, with dropout."""
    theorems.attention_equals_whole(case, causal, Recompute("selective" if selective else "none"))


@given(cases(architectures=ANY_MODEL), st.booleans())
def test_block(case, selective):
    """It holds in both orders of norms and residual connections."""
    theorems.block_equals_whole(case, Recompute("selective" if selective else "none"))


@given(cases(architectures=ANY_MODEL))
def test_embedding(case):
    """It holds with and without token types."""
    theorems.embedding_equals_whole(case)


@given(cases())
def test_logits(case):
    theorems.logits_equal_whole(case)


@given(cases())
def test_head_for_masked_tokens(case):
    theorems.masked_lm_equals_whole(case)


@given(cases(), st.sampled_from([1.0, 1000.0]))
def test_cross_entropy(case, scale):
    """It holds for logits in the thousands too, whose exp is infinite."""
    theorems.losses_agree(case, scale)


@given(cases(integers=True, activation="relu", hidden_dropout=0.5), st.booleans())
def test_linear_parts_agree_exactly_on_integers(case, gather_output):
    """Sums and products of small whole numbers are exact in any order, so there is nothing left to forgive."""
    theorems.column_parallel_equals_whole(case, gather_output, **EXACT)
    theorems.row_parallel_equals_whole(case, **EXACT)
    theorems.mlp_equals_whole(case, **EXACT)
    theorems.embedding_equals_whole(case, **EXACT)
    theorems.logits_equal_whole(case, **EXACT)


# ---- the wrong ways, shown to be wrong --------------------------------------------------------------------------


@given(cases(sizes=st.sampled_from([2, 3, 4]), num_layers=1, llama=False))
def test_rows_first_needs_a_second_synchronisation(case):
    """Splitting A by rows is right only if the partial products are summed before the activation."""
    c = case.model
    p, x = case.params(mlp_tensors(c)), case.x()
    close(rows_first_mlp_forward(x, p, case.t, c.activation, reduce_first=True), mlp_forward(x, p, c)[0])


@pytest.mark.parametrize("activation", ["gelu", "gelu_exact", "relu"])
def test_rows_first_is_another_function(activation):
    """GeLU of a sum is not the sum of GeLUs: with one rank nothing is split; with two the result is far off."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 8))
    p = MLP(rng.normal(size=(8, 32)), rng.normal(size=32), rng.normal(size=(32, 8)), rng.normal(size=8))
    right = mlp_forward(x, p, ModelConfig(1, 8, 1, 4, 4, activation=activation))[0]
    close(rows_first_mlp_forward(x, p, 1, activation, reduce_first=False), right)
    wrong = rows_first_mlp_forward(x, p, 2, activation, reduce_first=False)
    assert np.abs(wrong - right).max() > 0.1 * np.abs(right).max()


def test_rows_first_is_the_same_function_where_the_activation_is_linear():
    """ReLU of positive numbers is: each rank adds its part of the bias."""
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(2, 3, 8))
    p = MLP(rng.uniform(size=(8, 32)), rng.uniform(size=32), rng.uniform(size=(32, 8)), rng.uniform(size=8))
    right = mlp_forward(x, p, ModelConfig(1, 8, 1, 4, 4, activation="relu"))[0]
    close(rows_first_mlp_forward(x, p, 2, "relu", reduce_first=False), right)


@pytest.mark.parametrize("t", [1, 2, 3])
def test_a_gate_beside_what_it_multiplies_is_another_function(t):
    """The first of two ranks multiplies one half of the gate with the other half of it."""
    rng = np.random.default_rng(0)
    x, p = rng.normal(size=(2, 3, 8)), GatedMLP(rng.normal(size=(8, 2, 6)), rng.normal(size=(6, 8)))
    c = ModelConfig(1, 8, 1, 4, 4, swiglu=True, add_bias_linear=False)
    whole, found = gated_mlp_forward(x, p, c)[0], side_by_side_mlp_forward(x, p, c, t)
    assert found.shape == whole.shape
    assert (t == 1) == (np.abs(found - whole).max() < 0.1 * np.abs(whole).max())


@pytest.mark.parametrize("g, t, held", [(2, 1, [[0, 1]]), (2, 2, [[0], [1]]), (2, 4, [[0], [0], [1], [1]]),
                                        (1, 4, [[0]] * 4), (4, 2, [[0, 1], [2, 3]])])
def test_which_heads_of_keys_a_rank_holds(g, t, held):
    """Those that its own heads of queries need: one head at least, of which neighbours then hold copies."""
    c = ModelConfig(1, 8, 4, 4, 4, num_query_groups=g, add_bias_linear=False, swiglu=True)
    tensors = grouped_attention_tensors(c)
    heads = np.broadcast_to(np.arange(g)[:, None], tensors.w_kv.shape)
    assert [shard(heads, tensors.w_kv, t, rank)[0, 0, :, 0].tolist() for rank in range(t)] == held


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
