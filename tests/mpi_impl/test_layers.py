"""On real ranks, every sharded layer is the unsharded one: output, input gradient and every weight gradient."""
from hypothesis import given
from hypothesis import strategies as st

from tests import rank_theorems as theorems
from tests.strategies import cases


@given(cases(), st.booleans())
def test_column_parallel_linear(ranks, case, gather_output):
    ranks.run(case.t, theorems.column_parallel_equals_whole, case, gather_output)


@given(cases())
def test_row_parallel_linear(ranks, case):
    ranks.run(case.t, theorems.row_parallel_equals_whole, case)


@given(cases())
def test_mlp(ranks, case):
    ranks.run(case.t, theorems.mlp_equals_whole, case)


@given(cases(), st.booleans())
def test_attention(ranks, case, causal):
    ranks.run(case.t, theorems.attention_equals_whole, case, causal)


@given(cases())
def test_block(ranks, case):
    ranks.run(case.t, theorems.block_equals_whole, case)


@given(cases())
def test_embedding(ranks, case):
    ranks.run(case.t, theorems.embedding_equals_whole, case)


@given(cases())
def test_logits(ranks, case):
    ranks.run(case.t, theorems.logits_equal_whole, case)


@given(cases(), st.sampled_from([1.0, 1000.0]))
def test_cross_entropy(ranks, case, scale):
    ranks.run(case.t, theorems.loss_equals_whole, case, scale)


@given(cases(integers=True, activation="relu"), st.booleans())
def test_linear_parts_agree_exactly_on_integers(ranks, case, gather_output):
    """Sums and products of small whole numbers are exact in any order, so there is nothing left to forgive."""
    ranks.run(case.t, integers_agree_exactly, case, gather_output)


def integers_agree_exactly(group, case, gather_output):
    theorems.column_parallel_equals_whole(group, case, gather_output, tolerance=0.0)
    theorems.row_parallel_equals_whole(group, case, tolerance=0.0)
    theorems.mlp_equals_whole(group, case, tolerance=0.0)
    theorems.embedding_equals_whole(group, case, tolerance=0.0)
    theorems.logits_equal_whole(group, case, tolerance=0.0)


@given(cases())
def test_gpt(ranks, case):
    ranks.run(case.t, theorems.gpt_equals_whole, case)
