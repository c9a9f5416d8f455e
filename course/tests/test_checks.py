"""The messages of checks: none for a right answer; for a wrong one the place, the expected value, the found one, and a
hint.
"""
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from course.grading.checks import WIDTH, CheckFailed, count_kept, difference, expect_equal, expect_sent
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


@pytest.mark.parametrize("sent, messages, words", [
    ([4, 3], [1, 1], "less than 4"), ([4, 5], [1, 1], "4 are enough"), ([4, 4], [1, 3], "2 are enough"),
    ([4, 4], [2, 2], "")])
def test_a_rank_that_sends_too_little_too_much_or_too_often_is_named(sent, messages, words):
    with pytest.raises(CheckFailed, match=f"^rank 1 .*{words}") if words else nullcontext():
        expect_sent(Outcome([], sent, messages, []), 4, [4, 4], "it", messages=2)


@pytest.mark.parametrize("value, least, most", [
    ([np.ones(6)] * 2, 12, 14), ({"x" * 800: 1}, 101, 104), (1 << 6400, 100, 102), (np.empty((0, 77, 3)), 2, 3),
    (np.ones(5, "longdouble"), 10, 10), ([[[]] * 50] * 2, 100, 104)],
    ids=lambda value: repr(value)[:20])
def test_whatever_a_cache_holds_is_counted(value, least, most):
    assert least <= count_kept(value) <= most
