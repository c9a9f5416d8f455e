"""The messages of checks: none for a right answer; for a wrong one the place, the expected value, the found one, and a
hint.
"""
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from grading.answers import CURRENT
from grading.checks import (CheckFailed, count_kept, difference, each, expect, expect_dicts, expect_equal, expect_sent,
                            expect_values, run, run_given)
from grading.sandbox import Outcome

NUMBERS = hnp.arrays(np.float64, hnp.array_shapes(min_dims=0, min_side=0), elements=st.floats(-1e6, 1e6))


@given(st.lists(NUMBERS, min_size=1, max_size=4))
def test_what_is_equal_passes(arrays):
    expect_equal(arrays, arrays, "it", tolerance=0)
    expect_equal([x * (1 + 1e-13) for x in arrays], arrays, "it")


@given(NUMBERS.filter(lambda x: x.size), st.sampled_from([np.nan, np.inf, -np.inf, 1e9]), st.data())
def test_one_element_that_is_off_is_found(right, wrong, data):
    at = np.unravel_index(data.draw(st.integers(0, right.size - 1)), right.shape)
    mine = right.copy()
    mine[at] = wrong
    place = f"Element [{', '.join(map(str, at))}]" if at else "It"
    assert difference(mine, right, 1e-10).startswith(f"{place}: expected {right[at]:.6g}, got {wrong:.6g}.")
    assert difference(np.nextafter(right, np.inf), right, 0), "with tolerance 0 the last bit counts"


@pytest.mark.parametrize("mine, right, words", [
    (None, 1.0, "is there a return"), ([[1], [1, 2]], [1.0], "its rows differ in length"),
    ("text", 1.0, "no array of numbers"),
    (np.ones((2, 1)), [1.0, 1.0], r"shape \[2\], got \[2, 1\]"),
    ([True, False], [1.0, 1.0], r"Element \[1\]: expected 1, got 0\. 1 of 2"), ([0.0], [np.nan], "expected nan, got 0"),
    ([1, 2], [True, False], "expected 0, got 2"), ([0.0], [np.inf], "expected inf"),
    (np.array([1], np.uint8), [-1], "expected -1, got 1"), ([1e-300], [0.0], "expected 0, got 1e-300"),
], ids=repr)
def test_anything_else_is_reported(mine, right, words):
    with pytest.raises(CheckFailed, match=words):
        expect_equal([mine], [right], "it", "the hint")


def test_what_is_within_the_tolerance_is_equal_and_nan_to_itself():
    x = np.array([np.nan, np.inf, -np.inf, -0.0])
    assert difference(x, x, 0) == "" and difference([0.0], np.array([-0.0]), 0) == ""
    assert difference([1 + 2e-10], np.ones(1), 1e-10) and not difference([1 + 5e-11], np.ones(1), 1e-10)


def test_the_rank_and_the_hint_are_reported_without_a_traceback():
    with pytest.raises(CheckFailed) as failed:
        expect_equal([1, 2, 4], [1, 2, 3], "the sum", "count again")
    assert str(failed.value) == "rank 2 of 3: the sum is not right. It: expected 3, got 4.\nHint: count again"
    assert failed.value._render_traceback_() == str(failed.value).splitlines()
    expect(True, "no")


RIGHT = [{"a": 1.0}, {"a": 2.0}]


@pytest.mark.parametrize("act, arguments, words", [
    (expect_values, ([(1, 2), [3, 4]], ("x", "y")), ""), (expect_dicts, (RIGHT, RIGHT, "it"), ""),
    (expect_values, ([(1, 2), None], ("x", "y")), "^rank 1 should return 2 values: x, y"),
    (expect_values, ([(1, 2, 3)], ("x", "y")), "^rank 0 should return 2 values"),
    (expect_dicts, ([[], {"a": 2}], RIGHT, "it"), "^rank 0: it should be a dict with 'a', but is a list"),
    (expect_dicts, ([{"a": 1}, {"b": 2}], RIGHT, "it"), "but is a dict with 'b'"),
    (expect_dicts, ([{"a": 1}, {"a": 3}], RIGHT, "it"), "^rank 1 of 2: it of 'a' is not right")])
def test_every_rank_returns_as_many_values_or_a_dict_with_these_keys(act, arguments, words):
    if words:
        with pytest.raises(CheckFailed, match=words):
            act(*arguments)
    else:
        assert act(*arguments) in ([[1, 3], [2, 4]], None)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 8)), min_size=1, max_size=8), st.data())
def test_a_rank_that_sends_too_little_too_much_or_too_often_is_named(sent, data):
    """And whoever sends as much as expected passes, whatever the number of its messages up to the limit."""
    outcome = Outcome([], [elements for elements, _ in sent], [messages for _, messages in sent], [])
    least, most = [min(elements, 4) for elements, _ in sent], [max(elements, 3) for elements, _ in sent]
    fewest = max(messages for _, messages in sent)
    expect_sent(outcome, least, most, "it", messages=fewest)
    expect_sent(outcome, min(least), max(most), "it")
    rank = data.draw(st.integers(0, len(sent) - 1))
    for low, high, messages, words in ((least[rank] + 9, 99, fewest, "it cannot be done with less than"),
                                       (0, sent[rank][0] - 1, fewest, "are enough"),
                                       (0, 99, sent[rank][1] - 1, "messages for it")):
        lows, highs = [0] * len(sent), [99] * len(sent)
        lows[rank], highs[rank] = low, high
        with pytest.raises(CheckFailed, match=f"^rank {rank if messages == fewest else '.'} has sent .*{words}"):
            expect_sent(outcome, lows, highs, "it", messages=messages)


SUM = "def total(group, x):\n    return group.all_reduce(x)"


def test_an_answer_or_a_given_function_runs_on_ranks_with_an_argument_for_each(monkeypatch):
    """Without answers nothing runs, but what is given, which is not an answer."""
    CURRENT.clear()
    with pytest.raises(CheckFailed, match="cells that begin with %%answer"):
        run(3, "total")
    xs = each([np.full(2, 1.0), np.full(2, 2.0), np.full(2, 4.0)])
    outcome = run_given(SUM, 3, "total", xs)
    assert [list(found) for found in outcome.results] == [[7, 7]] * 3 and CURRENT == {}
    monkeypatch.setitem(CURRENT, "total", SUM)
    assert run(3, "total", xs).sent == outcome.sent


@pytest.mark.parametrize("source, options, words", [
    (SUM, {"allow": ("send",)}, "may not be used here"),
    ("def total(*_):\n    while True: pass", {"limit": 0.2}, "within 0.2 seconds")])
def test_a_given_function_is_limited_as_an_answer_is(source, options, words):
    with pytest.raises(CheckFailed, match=words):
        run_given(source, 2, "total", np.ones(2), **options)


@pytest.mark.parametrize("value, least, most", [
    (1.0, 1, 1), (np.ones(8, bool), 8, 8), ([np.ones(6)] * 2, 12, 14), ("x" * 800, 100, 102), (1 << 6400, 100, 102),
    ({"x" * 800: 1}, 101, 104), (np.empty((0, 77, 3)), 2, 3), (np.ones(5, "longdouble"), 10, 10),
    ([[[]] * 50] * 2, 100, 104)], ids=lambda value: repr(value)[:20])
def test_whatever_a_cache_holds_is_counted(value, least, most):
    assert least <= count_kept(value) <= most
