"""Types of arrays in the machine's own layers: those of every model go together, and of the zoo's bugs they see those
that forget or repeat a sum, but no wrong factor.
"""
import pytest
from hypothesis import given, settings

from tests import zoo
from tests.cases import Case
from tests.planted import planted
from tests.strategies import ANY_MODEL, cases
from tests.typed import EQUAL, FRESH, LARGEST, PARTIAL, RANKS, WIDTH, TypedArray, TypedGroup, TypeFault
from tests.typed_layers import types_go_together


@settings(max_examples=max(3, settings().max_examples // 8))
@given(cases(architectures=ANY_MODEL))
def test_the_types_of_every_model_go_together(case):
    """With tensor or sequence parallelism, forward and backward; gradients have the types that their weights want."""
    types_go_together(case)


SEEN = {
    "f without its all-reduce": "product|matmul", "g without its all-reduce": "counts once a rank",
    "the MLP's output bias added t times": "counts once a rank", "the maximum not shared": "largest",
    "tokens of other ranks not zeroed": "looked up needs what is partial",
    "g all-reduces backward too": "equal needs what is partial",
    "the sum of exp not shared": "log of .* partial is not that of the whole sum",
}
SILENT = "dropout is scaled forward alone", "every rank's epsilon differs", "every rank's positions begin at 0"


@pytest.mark.parametrize("name", SEEN)
def test_a_missing_or_repeated_sum_is_refused(name):
    entry = zoo.BY_NAME[name]
    with planted(*entry.bug), pytest.raises(TypeFault, match=SEEN[name]):
        types_go_together(case_of(entry))


@pytest.mark.parametrize("name", SILENT)
def test_a_wrong_factor_or_place_is_not_seen(name):
    """A type does not tell how often or where: only of what."""
    entry = zoo.BY_NAME[name]
    with planted(*entry.bug):
        types_go_together(case_of(entry))


def case_of(entry) -> Case:
    return next(one for one in entry.theorem.args if isinstance(one, Case))


PIECE, WHOLE = (5, WIDTH), (5, RANKS * WIDTH)


@pytest.mark.parametrize("wrong", [
    lambda a: a(PIECE) @ a((WIDTH, 4)) + a((4,)), lambda a: a(PIECE).mean(-1),
    lambda a: TypedGroup().all_reduce(a(PIECE), ""), lambda a: TypedGroup().all_gather(a(WHOLE), 1, ""),
    lambda a: a(WHOLE, PARTIAL) * a(WHOLE, PARTIAL),
    lambda a: abs(a(WHOLE, PARTIAL)), lambda a: a(WHOLE) / a(WHOLE, PARTIAL), lambda a: a(WHOLE, LARGEST) + 1,
    lambda a: TypedGroup().all_reduce(a(WHOLE, PARTIAL), "", op="max")])
def test_what_does_not_go_together_is_refused(wrong):
    with pytest.raises(TypeFault):
        wrong(lambda shape, kind=EQUAL: TypedArray(shape, kind=kind))


def test_what_goes_together_has_a_type():
    piece, weight, gain = TypedArray(PIECE), TypedArray((WIDTH, 4)), TypedArray((4,))
    partial = piece @ weight
    assert partial.kind == PARTIAL and (partial * gain).kind == (partial + partial).kind == PARTIAL
    assert TypedGroup().all_reduce(partial, "").kind == EQUAL and (partial + gain).kind == EQUAL
    assert piece.max(-1).kind == LARGEST and (partial.sum(0) + TypedArray((4,), kind=FRESH)).kind == EQUAL
