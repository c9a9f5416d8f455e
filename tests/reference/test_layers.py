"""The theorem of the textbook: every sharded layer is the unsharded one, in its output and in all gradients."""
import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference.config import Recompute
from reference.layers.cross_entropy import sharded_cross_entropy_forward, unsafe_cross_entropy
from reference.layers.mlp import MLP, mlp_forward, mlp_tensors, rows_first_mlp_forward
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


@given(cases(sizes=st.sampled_from([2, 3, 4]), num_layers=1))
def test_rows_first_needs_a_second_synchronisation(case):
    """Splitting A by rows is right only if the partial products are summed before the activation."""
    c = case.model
    p, x = case.params(mlp_tensors(c)), case.x()
    close(rows_first_mlp_forward(x, p, case.t, c.activation, reduce_first=True), mlp_forward(x, p, c.activation)[0])


@pytest.mark.parametrize("activation", ["gelu", "gelu_exact", "relu"])
def test_rows_first_is_another_function(activation):
    """GeLU of a sum is not the sum of GeLUs: with one rank nothing is split; with two the result is far off."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 8))
    p = MLP(rng.normal(size=(8, 32)), rng.normal(size=32), rng.normal(size=(32, 8)), rng.normal(size=8))
    right = mlp_forward(x, p, activation)[0]
    close(rows_first_mlp_forward(x, p, 1, activation, reduce_first=False), right)
    wrong = rows_first_mlp_forward(x, p, 2, activation, reduce_first=False)
    assert np.abs(wrong - right).max() > 0.1 * np.abs(right).max()


def test_rows_first_is_the_same_function_where_the_activation_is_linear():
    """ReLU of positive numbers is: each rank adds its part of the bias."""
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(2, 3, 8))
    p = MLP(rng.uniform(size=(8, 32)), rng.uniform(size=32), rng.uniform(size=(32, 8)), rng.uniform(size=8))
    close(rows_first_mlp_forward(x, p, 2, "relu", reduce_first=False), mlp_forward(x, p, "relu")[0])


def test_the_loss_without_a_shared_maximum_overflows():
    """exp(800) is infinite in float64, exp(89) in float32; the safe form subtracts the maximum over all ranks first."""
    logits = [np.array([[[800.0, 0.0]]]), np.array([[[0.0, 1.0]]])]
    with np.errstate(over="ignore"):
        assert not np.isfinite(unsafe_cross_entropy(logits, np.array([[0]])))
    close(sharded_cross_entropy_forward(logits, np.array([[0]]))[0], np.array([[0.0]]))
