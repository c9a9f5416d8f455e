"""Programs with named axes on real ranks: what a layout derives is the textbook's layer there, too, and sends what the
layers that are written by hand send.
"""
from math import prod

import pytest
from hypothesis import given, settings, strategies as st

from tests.named_theorems import NAMES, NamedCase, derived_on_ranks_is_the_textbook, machine_sends_what_is_derived
from tests.reference.test_named import named_cases


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=max(3, settings().max_examples // 4))
@given(data=st.data())
def test_any_layout_on_ranks(ranks, name, data):
    """In exact numbers, on a mesh of up to eight ranks. Each computes the whole layer, too, so it is small."""
    case = data.draw(named_cases(name, ranks=8, most=1))
    ranks.run(prod(case.mesh.values()), derived_on_ranks_is_the_textbook, name, case, timeout=120.0)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "norm"])
@settings(max_examples=max(3, settings().max_examples // 8))
@given(t=st.integers(2, 4), local=st.fixed_dictionaries({axis: st.integers(1, 3) for axis in "bsfgrdV"}))
def test_the_machine_sends_what_is_derived(ranks, name, sequence_parallel, t, local):
    """Megatron's layout of a block: columns and rows of the MLP, heads, the vocabulary; and positions."""
    layout = dict(f="t", g="t", V="t") | (dict(s="t") if sequence_parallel else {})
    case = NamedCase({"t": t}, layout, local | ({} if name == "grouped attention" else dict(r=1)), exact=False)
    ranks.run(t, machine_sends_what_is_derived, name, case)
