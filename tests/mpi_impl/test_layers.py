"""Sharded layers on real ranks: each equals the unsharded one in its output, input gradient and every weight gradient.

In floats, but for rounding, and in exact numbers, which have none: there they are the same formulas.
"""
import pytest
from hypothesis import given, settings, strategies as st

from reference.config import ModelConfig, Recompute
from tests import rank_theorems as theorems
from tests.exact_theorems import proved
from tests.memory_theorems import only_inputs_are_kept
from tests.strategies import ANY_MODEL, Case, cases, recomputes

SELECTIVE = st.sampled_from([Recompute(), Recompute("selective")])
LAYERS = [      # a theorem, and what is drawn beside its case
    (theorems.column_parallel_equals_whole, st.booleans()), (theorems.row_parallel_equals_whole,),
    (theorems.mlp_equals_whole,), (theorems.attention_equals_whole, st.booleans(), SELECTIVE),
    (theorems.block_equals_whole, SELECTIVE), (theorems.embedding_equals_whole,), (theorems.logits_equal_whole,),
    (theorems.masked_lm_equals_whole,), (theorems.loss_equals_whole, st.sampled_from([1.0, 1000.0])),
    (theorems.model_equals_whole, recomputes())]
EACH = pytest.mark.parametrize("theorem, choices", [(theorem, choices) for theorem, *choices in LAYERS],
                               ids=lambda x: getattr(x, "__name__", ""))


@EACH
@given(case=cases(architectures=ANY_MODEL), data=st.data())
def test_floats(ranks, theorem, choices, case, data):
    """With any sizes, on one to eight ranks, sequence parallel or not, dropout on."""
    ranks.run(case.t, theorem, case, *map(data.draw, choices))


@EACH
@settings(max_examples=max(3, settings().max_examples // 6))
@given(case=cases(exact=True, architectures=ANY_MODEL), data=st.data())
def test_exact_numbers(ranks, theorem, choices, case, data):
    ranks.run(case.t, proved, theorem, case, *map(data.draw, choices), timeout=120.0)


@pytest.mark.parametrize("recompute, cut", [
    (Recompute(), False), (Recompute("selective"), True), (Recompute("full"), False),
    (Recompute("full", "uniform", 2), True), (Recompute("full", "block", 2), False)], ids=str)
def test_what_recompute_keeps(ranks, recompute, cut):
    model = ModelConfig(3, 16, 4, 10, 14)
    ranks.run(2, only_inputs_are_kept, Case(2, model, 3, 14, seed=1, sequence_parallel=cut), recompute)
