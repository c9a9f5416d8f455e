"""The functions in which the labs' checks are written: run an answer on ranks, compare, and explain what is wrong.

    xs = list(check_data("ring_all_reduce").normal(size=(4, 10)))
    outcome = run(4, "ring_all_reduce", each(xs), allow=("send", "receive"))
    expect_equal(outcome.results, [sum(xs)] * 4, "the sum", "does every rank get every chunk?")
"""
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from course.grading.answers import CURRENT
from course.grading.lab_group import OPERATIONS
from course.grading.sandbox import AnswerFailed, Each, Outcome, Sandbox

SANDBOX = Sandbox()
LIMIT = 5.0             # seconds for a run of a check that does not set its own
GIVEN: dict[str, str] = {}      # the course's own answers to earlier tasks, which replace those that are checked ...
LATER: set[str] = set()         # ... and the later tasks, whose answers are left out


WIDTH = 88      # of a message in a notebook


class CheckFailed(AssertionError):
    """A wrong answer. The message says what is wrong and where, with a hint; a notebook shows no traceback."""

    def __init__(self, message: str):
        """Cut the middle out of lines that a value of the answer has made long."""
        super().__init__(re.sub(r"(?m)^(.{300}).{9,}(.{300})$", r"\1 [...] \2", message))

    def _render_traceback_(self) -> list[str]:
        """Wrap sentences, since JupyterLab breaks long lines inside words; leave a traceback's indented lines."""
        return [part for line in str(self).splitlines() for part in ([line] if line[:1] == " " else textwrap.wrap(
            line, WIDTH, break_long_words=False, break_on_hyphens=False) or [""])]


def each(values: Sequence) -> Each:
    """Make an argument that is different on each rank: rank r gets values[r]."""
    return Each(values)


def run(n: int | None, function: str, *args, allow: Collection[str] = OPERATIONS, limit: float | None = None,
        hint: str = "", elements: int | None = None) -> Outcome:
    """Call the answer's `function(group, *args)` on n limited ranks, or `function(*args)` on one if n is None.

    It may use the operations of group that `allow` names, and must end within `limit` seconds. If the ranks only need
    the sum of `elements`, none may send more than the clumsiest sum does. Raises CheckFailed, with the hint if ranks
    hang.
    """
    if not CURRENT:
        raise CheckFailed("There is no answer to check yet: run the cells that begin with %%answer, from the top.")
    try:
        answers = {name: source for name, source in CURRENT.items() if name not in LATER}
        outcome = SANDBOX.run(answers, function, args, n, allow, limit or LIMIT, GIVEN)
    except AnswerFailed as failed:
        raise CheckFailed(f"{failed}{format_hint(hint if failed.hangs else '')}") from None
    if elements is not None:
        expect_sent(outcome, 0, 2 * elements * len(outcome.sent), function, "compute where the shards are.", 1000)
    return outcome


def run_given(source: str, n: int | None, function: str, *args, allow: Collection[str] = OPERATIONS,
              limit: float | None = None) -> Outcome:
    """Call a function as `run` does, but one from this text instead of an answer. Raises CheckFailed."""
    try:
        return SANDBOX.run({"given": source}, function, args, n, allow, limit or LIMIT)
    except AnswerFailed as failed:
        raise CheckFailed(str(failed)) from None


@contextmanager
def alone(given: Mapping[str, str], later: Collection[str]) -> Iterator[None]:
    """Check with the course's own answers to these earlier tasks, and without answers to later ones."""
    GIVEN.update(given)
    LATER.update(later)
    try:
        yield
    finally:
        GIVEN.clear()
        LATER.clear()


def close() -> None:
    """End the server of limited ranks. The next run starts another one."""
    SANDBOX.close()


def expect(true: bool, what: str, hint: str = "") -> None:
    """Raise CheckFailed with this sentence unless the condition is true."""
    if not true:
        raise CheckFailed(f"{what}{format_hint(hint)}")


def expect_equal(found: Sequence, expected: Sequence, what: str, hint: str = "", tolerance: float = 1e-10) -> None:
    """Check every rank's array (or number). The tolerance is relative to the largest expected element; 0 is to the bit.

    Raises CheckFailed, which names the rank, the element, its expected and its actual value.
    """
    for rank, (mine, right) in enumerate(zip(found, expected, strict=True)):
        who = f"rank {rank} of {len(expected)}: " if len(expected) > 1 else ""
        problem = difference(mine, np.asarray(right), tolerance)
        if problem:
            raise CheckFailed(f"{who}{what} is not right. {problem}{format_hint(hint)}")


def expect_near(found: Sequence, expected: Sequence, what: str) -> None:
    """Check that every rank's array resembles the expected one: the cosine of the two is above 0.8.

    A check of cost asks no more of the values, since a mistake in them has cost its points in another check; but what
    a rank sends counts only if the result comes of it. Raises CheckFailed.
    """
    for rank, (mine, right) in enumerate(zip(found, expected, strict=True)):
        problem = difference(mine, np.asarray(right), np.inf)
        if not problem and np.any(right):       # zeros resemble nothing
            x, y = np.ravel(mine).astype(float), np.ravel(right)
            problem = "" if x @ y > 0.8 * np.sqrt(x @ x) * np.sqrt(y @ y) else "It is far from the right result."
        if problem:
            raise CheckFailed(f"rank {rank} of {len(expected)}: {what} is not right, so its cost does not count. "
                              f"{problem}")


def expect_values(results: Sequence, names: Sequence[str]) -> list[list]:
    """Check that every rank returned one value for each name. Return a list of the ranks' values for each name."""
    for rank, result in enumerate(results):
        expect(isinstance(result, list | tuple) and len(result) == len(names),
               f"rank {rank} should return {len(names)} values: {', '.join(names)}.", "look at the last line.")
    return [list(values) for values in zip(*results)]


def expect_dicts(found: Sequence, expected: Sequence[Mapping], what: str, hint: str = "") -> None:
    """Check that every rank's dict has the expected arrays under the expected keys. Raises CheckFailed."""
    for rank, (mine, right) in enumerate(zip(found, expected, strict=True)):
        has = f"a dict with {', '.join(map(repr, mine))}" if isinstance(mine, dict) else f"a {type(mine).__name__}"
        expect(isinstance(mine, dict) and set(mine) == set(right),
               f"rank {rank}: {what} should be a dict with {', '.join(map(repr, right))}, but is {has}.")
    for key in expected[0]:
        expect_equal([mine[key] for mine in found], [right[key] for right in expected], f"{what} of {key!r}", hint)


def difference(mine: Any, right: np.ndarray, tolerance: float) -> str:
    """Describe where and how two values differ, in a sentence; '' if they do not."""
    if mine is None:
        return "Nothing (None) was returned: is there a return?"
    try:
        mine = np.asarray(mine)
    except ValueError:
        return "The returned value is no array: its rows differ in length."
    if mine.dtype.kind not in "biuf":
        return f"The returned value is no array of numbers, but {mine.dtype}."
    if mine.shape != right.shape:
        return f"Expected an array of shape {list(right.shape)}, got {list(mine.shape)}."
    if right.size == 0:
        return ""
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.abs(np.subtract(mine, right, dtype=float))
    off = np.where((mine == right) | (np.isnan(mine) & np.isnan(right)), 0.0, off)
    wrong = ~(off <= tolerance * max(float(np.abs(right[np.isfinite(right)]).max(initial=0.0)), 1e-300))
    if not wrong.any():
        return ""
    at = np.unravel_index(int(wrong.argmax()), wrong.shape)
    expected = f"Element [{', '.join(map(str, at))}]: expected" if at else "Expected"
    many = f" {wrong.sum():,} of {wrong.size:,} elements differ." if wrong.size > 1 else ""
    ours, found = (str(one[at]) if one.dtype == bool else f"{float(one[at]):.6g}" for one in (right, mine))
    return f"{expected} {ours}, got {found}.{many}"


def expect_sent(outcome: Outcome, least: int | Sequence[int], most: int | Sequence[int], what: str, hint: str = "",
                messages: int | None = None) -> None:
    """Check how many elements each rank has sent: a number for all ranks, or one for each.

    Nor may it have sent more than `messages` arrays (default: four for each rank, and at least eight), since an array
    without elements tells its receiver something, too. All of this is counted outside of the answer's process.
    """
    ranks = len(outcome.sent)
    messages = max(8, 4 * ranks) if messages is None else messages
    for rank, (sent, low, high) in enumerate(zip(outcome.sent, np.broadcast_to(least, ranks),
                                                 np.broadcast_to(most, ranks))):
        expect(sent <= high, f"rank {rank} has sent {sent:,} elements for {what}; {high:,} are enough.", hint)
        expect(sent >= low, f"rank {rank} has sent {sent:,} elements for {what}; it cannot be done with less than "
               f"{low:,}.", "the other ranks need what this rank has.")
        expect(outcome.messages[rank] <= messages, f"rank {rank} has sent {outcome.messages[rank]:,} messages for "
               f"{what}; {messages} are enough.", "send one large array, not many small ones.")


def count_kept(value: Any) -> int:
    """Count what a value of an answer can hold, in numbers of eight bytes, so that nothing is kept in texts, in long
    integers, in the keys of dicts, or in the shapes of what is empty.
    """
    if isinstance(value, str):
        return 1 + len(value.encode(errors="surrogatepass")) // 8
    if isinstance(value, int):
        return 1 + value.bit_length() // 64
    if isinstance(value, np.ndarray):
        return max(value.size, value.nbytes // 8, value.ndim)
    if isinstance(value, dict):
        return 1 + sum(count_kept(key) + count_kept(one) for key, one in value.items())
    return 1 + sum(map(count_kept, value)) if isinstance(value, list | tuple) else 1


def passed(what: str) -> None:
    """Print that the check has passed."""
    print(f"passed: {what}")


def format_hint(hint: str) -> str:
    return f"\nHint: {hint}" if hint else ""
