"""Named axes: what any layout derives is the textbook's whole layer, as formulas, and the types' rules are theorems."""
from math import prod

import pytest
from hypothesis import given, strategies as st

from reference.named.mesh import Mesh
from reference.named.program import CONSTANT, WEIGHT, Program
from tests.named_theorems import NAMES, NamedCase, derived_is_the_textbook


@st.composite
def named_cases(draw, name, ranks=27, most=2):
    """Draw any layout at all, on a mesh of up to three axes, with at most so many elements of an axis on a rank. GPT's
    attention has one query for a head of keys.
    """
    mesh = draw(st.dictionaries(st.sampled_from("tcd"), st.integers(1, 3), min_size=1).filter(
        lambda mesh: prod(mesh.values()) <= ranks))
    free = "bshfgdV" + ("r" if name == "grouped attention" else "")
    layout = draw(st.dictionaries(st.sampled_from(free), st.sampled_from(sorted(mesh))))
    local = {axis: draw(st.integers(1, most)) if axis in free else 1 for axis in "bsfgrdV"}
    return NamedCase(mesh, layout, local, draw(st.integers(0, 2**32 - 1)))


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_any_layout_computes_the_formulas_of_the_whole_layer(name, data):
    case = data.draw(named_cases(name))
    derived_is_the_textbook(Mesh(case.mesh), name, case)


def test_data_are_cut_where_the_layout_says():
    """So that no rank looks up what it does not need; nothing is sent but the table's gradient."""
    p = Program({"d": 2}, {"b": "d"}, dict(b=2, s=1, V=3, h=1))
    x = p.product(p.array("tokens", "b s V", CONSTANT), p.array("word", "V h", WEIGHT), "b s h")
    assert x.types == {"d": "b"}
    assert str(p) == ("tokens [b s V] on d: invariant -> cut along b (take, backward gather)\n"
                      "word [V h] on d: invariant -> replicated (keep, backward sum)")
