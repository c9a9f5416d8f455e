"""The messages of checks: none for a right answer; for a wrong one the place, the expected value, the found one, and a
hint.
"""
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from grading import checks
from grading.answers import CURRENT
from grading.checks import (CheckFailed, count_kept, difference, each, expect, expect_dicts, expect_equal, expect_sent,
                            expect_values, passed, run)
from grading.lab_group import OPERATIONS
from grading.sandbox import Outcome

NUMBERS = hnp.arrays(np.float64, hnp.array_shapes(min_dims=0, min_side=0), elements=st.floats(-1e6, 1e6))


@given(st.lists(NUMBERS, min_size=1, max_size=4))
def test_what_is_equal_passes(arrays):
    expect_equal(arrays, arrays, "it", tolerance=0)
    expect_equal([x.tolist() for x in arrays], arrays, "it", tolerance=0) if all(x.size for x in arrays) else None
    expect_equal([x * (1 + 1e-13) for x in arrays], arrays, "it")


@given(NUMBERS.filter(lambda x: x.size), st.data())
def test_one_element_that_is_off_is_found(right, data):
    at = np.unravel_index(data.draw(st.integers(0, right.size - 1)), right.shape)
    wrong = data.draw(st.sampled_from([np.nan, np.inf, -np.inf, 1e9]))
    mine = right.copy()
    mine[at] = wrong
    said = difference(mine, right, 1e-10)
    place = f"Element [{', '.join(map(str, at))}]" if at else "It"
    assert said.startswith(f"{place}: expected {right[at]:.6g}, got {wrong:.6g}.")


@given(NUMBERS.filter(lambda x: x.size))
def test_with_tolerance_0_the_last_bit_counts(right):
    assert difference(np.nextafter(right, np.inf), right, 0)


@pytest.mark.parametrize("mine, right, words", [
    (None, 1.0, "is there a return"), ([[1], [1, 2]], [1.0], "its rows differ in length"),
    ("text", 1.0, "no array of numbers"), ({"a": 1}, 1.0, "no array of numbers"), (10**30, 1.0, "no array of numbers"),
    ([None, 1], [1.0, 1.0], "no array of numbers"),
    (np.ones((2, 1)), [1.0, 1.0], r"shape \[2\], got \[2, 1\]"), (1.0, [1.0], r"shape \[1\], got \[\]"),
    ([True, False], [1.0, 1.0], r"Element \[1\]: expected 1, got 0\. 1 of 2"), ([0.0], [np.nan], "expected nan, got 0"),
    ([1, 2], [True, False], "expected 0, got 2"), ([np.nan], [0.0], "expected 0, got nan"),
    ([0.0], [np.inf], "expected inf"),
    (np.array([1], np.uint8), [-1], "expected -1, got 1"), ([1e-300], [0.0], "expected 0, got 1e-300"),
], ids=repr)
def test_anything_else_is_reported(mine, right, words):
    with pytest.raises(CheckFailed, match=words):
        expect_equal([mine], [right], "it", "the hint")


def test_nan_and_infinity_are_equal_to_themselves():
    x = np.array([np.nan, np.inf, -np.inf, -0.0])
    assert difference(x, x, 0) == "" and difference([0.0], np.array([-0.0]), 0) == ""


def test_the_rank_and_the_hint_are_reported():
    with pytest.raises(CheckFailed) as failed:
        expect_equal([1, 2, 4], [1, 2, 3], "the sum", "count again")
    assert str(failed.value) == "rank 2 of 3: the sum is not right. It: expected 3, got 4.\nHint: count again"
    assert failed.value._render_traceback_() == str(failed.value).splitlines()
    with pytest.raises(CheckFailed, match="^no\nHint: why$"):
        expect(False, "no", "why")
    expect(True, "no")


def test_several_values_or_a_dict_of_each_rank():
    assert expect_values([(1, 2), [3, 4]], ("x", "y")) == [[1, 3], [2, 4]]
    for wrong in None, (1,), (1, 2, 3):
        with pytest.raises(CheckFailed, match="^rank 1 should return 2 values: x, y"):
            expect_values([(1, 2), wrong], ("x", "y"))
    right = [{"a": 1.0}, {"a": 2.0}]
    expect_dicts(right, right, "the shard")
    with pytest.raises(CheckFailed, match="^rank 0: the shard should be a dict with 'a', but is a list"):
        expect_dicts([[], {"a": 2}], right, "the shard")
    with pytest.raises(CheckFailed, match="but is a dict with 'b'"):
        expect_dicts([{"a": 1}, {"b": 2}], right, "the shard")
    with pytest.raises(CheckFailed, match="^rank 1 of 2: the shard of 'a' is not right"):
        expect_dicts([{"a": 1}, {"a": 3}], right, "the shard")


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


def test_what_passed_is_said(capsys):
    passed("it")
    assert capsys.readouterr().out == "passed: it\n"


def test_without_answers_nothing_runs(monkeypatch):
    CURRENT.clear()
    with pytest.raises(CheckFailed, match="run the cells that begin with %%answer"):
        run(2, "f")


def test_a_run_has_its_own_arguments_on_each_rank_and_the_checks_limit(monkeypatch):
    asked = []
    monkeypatch.setattr(checks.SANDBOX, "run", lambda *args: asked.append(args))
    monkeypatch.setitem(CURRENT, "f", "source")
    run(2, "f", each([1, 2]), 3, allow=("send",), limit=9)
    run(None, "f")
    (answers, function, (first, second), n, allow, limit, given_), default = asked
    assert (answers, function, first.values, second, n, allow, limit) == (CURRENT, "f", [1, 2], 3, 2, ("send",), 9)
    assert default[2:] == ((), None, OPERATIONS, checks.LIMIT, {}) and given_ == {}
    CURRENT.clear()


@pytest.mark.parametrize("value, least, most", [
    (1.0, 1, 1), (None, 1, 1), (np.ones((2, 3)), 6, 6), (np.ones(8, bool), 8, 8), ([np.ones(6)] * 2, 12, 14),
    ("x" * 800, 100, 102), (1 << 6400, 100, 102), ({"x" * 800: 1}, 101, 104), (np.empty((0, 77, 3)), 2, 3),
    (np.ones(5, "longdouble"), 10, 10), ([[[]] * 50] * 2, 100, 104)], ids=lambda value: repr(value)[:20])
def test_whatever_a_cache_holds_is_counted(value, least, most):
    assert least <= count_kept(value) <= most
