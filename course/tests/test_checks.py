"""The messages of checks: none for a right answer; for a wrong one the place, the expected value, the found one, and a
hint.
"""
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from course.grading.answers import CURRENT
from course.grading.checks import (WIDTH, CheckFailed, count_kept, difference, each, expect_dicts, expect_equal,
                                   expect_sent, expect_values, run, run_given)
from course.grading.sandbox import Outcome

NUMBERS = hnp.arrays(np.float64, hnp.array_shapes(min_dims=0, min_side=0), elements=st.floats(-1e6, 1e6))


@given(NUMBERS.filter(lambda x: x.size), st.sampled_from([np.nan, np.inf, -np.inf, 1e9]), st.data())
def test_one_element_that_is_off_is_found(right, wrong, data):
    at = np.unravel_index(data.draw(st.integers(0, right.size - 1)), right.shape)
    mine = right.copy()
    mine[at] = wrong
    expected = f"Element [{', '.join(map(str, at))}]: expected" if at else "Expected"
    assert difference(mine, right, 1e-10).startswith(f"{expected} {right[at]:.6g}, got {wrong:.6g}.")
    assert difference(np.nextafter(right, np.inf), right, 0), "with tolerance 0 the last bit counts"
    expect_equal([right, right * (1 + 1e-13)], [right, right], "it")


@pytest.mark.parametrize("mine, right, words", [
    (None, 1.0, "is there a return"), ([[1], [1, 2]], [1.0], "its rows differ in length"),
    ("text", 1.0, "no array of numbers"), (np.ones((2, 1)), [1.0, 1.0], r"shape \[2\], got \[2, 1\]"),
    ([0.0], [np.nan], "expected nan, got 0"),
    (np.array([1], np.uint8), [-1], "expected -1, got 1"), (False, True, "Expected True, got False"),
    ([1e-300], [0.0], "expected 0, got 1e-300"),
], ids=repr)
def test_anything_else_is_reported(mine, right, words):
    with pytest.raises(CheckFailed, match=words):
        expect_equal([mine], [right], "it", "the hint")


@given(st.integers(0, 10 ** 5))
def test_a_value_of_any_length_leaves_a_short_message_with_its_beginning_and_end(length):
    said = str(CheckFailed(f"It is {'x' * length}, but must be 1.\nHint: count again"))
    assert len(said) < 700 and (length > 500 or "x" * length in said)
    assert said.startswith("It is ") and said.endswith("but must be 1.\nHint: count again")


def test_nan_is_equal_to_itself_and_the_rank_and_the_hint_are_reported_without_a_traceback():
    x = np.array([np.nan, np.inf, -np.inf, -0.0])
    assert difference(x, x, 0) == ""
    with pytest.raises(CheckFailed) as failed:
        expect_equal([1, 2, 4], [1, 2, 3], "the sum", "count again")
    assert str(failed.value) == "rank 2 of 3: the sum is not right. Expected 3, got 4.\nHint: count again"
    assert failed.value._render_traceback_() == str(failed.value).splitlines()


@given(st.lists(st.text("ab -", max_size=300)))
def test_a_notebook_shows_every_word_in_lines_that_fit_and_tracebacks_as_they_are(lines):
    message = "\n".join(lines)
    shown = CheckFailed(message)._render_traceback_()
    assert "\n".join(shown).split() == message.split()
    assert all(len(line) <= WIDTH or line in lines or " " not in line for line in shown)
    assert [line for line in shown if line[:1] == " "] == [line for line in lines if line[:1] == " "]


RIGHT = [{"a": 1.0}, {"a": 2.0}]


@pytest.mark.parametrize("act, arguments, words", [
    (expect_values, ([(1, 2), None], ("x", "y")), "^rank 1 should return 2 values: x, y"),
    (expect_dicts, ([[], {"a": 2}], RIGHT, "it"), "^rank 0: it should be a dict with 'a', but is a list"),
    (expect_dicts, ([{"a": 1}, {"b": 2}], RIGHT, "it"), "but is a dict with 'b'"),
    (expect_dicts, ([{"a": 1}, {"a": 3}], RIGHT, "it"), "^rank 1 of 2: it of 'a' is not right")])
def test_every_rank_returns_as_many_values_or_a_dict_with_these_keys(act, arguments, words):
    with pytest.raises(CheckFailed, match=words):
        act(*arguments)
    assert expect_values([(1, 2), [3, 4]], ("x", "y")) == [[1, 3], [2, 4]]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 8)), min_size=1, max_size=8), st.data())
def test_a_rank_that_sends_too_little_too_much_or_too_often_is_named(sent, data):
    """And whoever sends as much as expected passes, whatever the number of its messages up to the limit."""
    elements, messages = map(list, zip(*sent))
    outcome, most = Outcome([], elements, messages, []), max(messages)
    expect_sent(outcome, elements, elements, "it", messages=most)
    expect_sent(outcome, min(elements), max(elements), "it")
    rank = data.draw(st.integers(0, len(sent) - 1))
    one = np.arange(len(sent)) == rank
    for least, greatest, limit, words in ((elements + one, 99, most, f"{rank} .*it cannot be done with less than"),
                                          (0, elements - one, most, f"{rank} .*are enough"),
                                          (0, 99, messages[rank] - 1, "..*messages for it")):
        with pytest.raises(CheckFailed, match=f"^rank {words}"):
            expect_sent(outcome, least, greatest, "it", messages=limit)


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


@pytest.mark.parametrize("value, least, most", [
    ([np.ones(6)] * 2, 12, 14), ({"x" * 800: 1}, 101, 104), (1 << 6400, 100, 102), (np.empty((0, 77, 3)), 2, 3),
    (np.ones(5, "longdouble"), 10, 10), ([[[]] * 50] * 2, 100, 104)],
    ids=lambda value: repr(value)[:20])
def test_whatever_a_cache_holds_is_counted(value, least, most):
    assert least <= count_kept(value) <= most
