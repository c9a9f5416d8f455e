"""The sandbox, which runs answers on limited ranks (`grading/limited_rank.py`) and reports their errors."""
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from grading.lab_group import OPERATIONS
from grading.values import LARGEST, PRINTED, from_bytes, to_bytes
from mpi_impl.launching.pool import Answer, Interrupted, Pool, interrupted, stories

RANKS = 8
LONGEST_OUTPUT = 500        # characters of a failed answer's output
LONGEST_TRACEBACK = 4000    # characters
WAITS_FOR = {"send": "to send to", "receive": "to receive from", "exchange": "to exchange with"}


class AnswerFailed(Exception):
    """An answer that did not finish on every rank. The message is for its author."""

    hangs = False       # True if no rank has failed, but some have reached the time limit


class Each:
    """An argument that is different on each rank: `each([a, b, c])` on three ranks."""

    def __init__(self, values: Sequence):
        self.values = list(values)


class Outcome(NamedTuple):
    """The result of an answer on each rank, the number of elements that it has sent, and its output."""

    results: list
    sent: list[int]
    printed: list[str]


class Sandbox:
    """Limited ranks. They start with the first run, and again after a run that hung."""

    def __init__(self, size: int = RANKS):
        self.pool = Pool(size, program="grading.limited_rank", largest=LARGEST + (1 << 20))

    def run(self, answers: Mapping[str, str], function: str, args: Sequence, n: int | None, allow: Collection[str],
            limit: float) -> Outcome:
        """Call `function(group, *args)` on n ranks, or `function(*args)` on one if n is None, within `limit` seconds.

        `answers` has the sources of all submitted cells, by name. Raises AnswerFailed.
        """
        ranks = n or 1
        for value in args:
            if isinstance(value, Each) and len(value.values) != ranks:
                raise ValueError(f"each(...) has {len(value.values)} values for {ranks} ranks")
        common = {"answers": dict(answers), "function": function, "with_group": n is not None, "allow": list(allow)}
        # A rank gets only its own arguments: an answer can find everything in its process.
        calls = [to_bytes({**common, "args": [value.values[rank] if isinstance(value, Each) else value
                                              for value in args]}) for rank in range(ranks)]
        try:
            found = [shorten(answer) for answer in self.pool.answers(calls, limit)[0]]
        except Interrupted as interrupt:
            raise interrupted([shorten(answer) for answer in interrupt.answers],
                              f"You interrupted {function} while it was running on {ranks} rank(s).") from None
        if any(answer.what != "returned" for answer in found):
            failed = AnswerFailed(describe_failure(function, found, limit))
            failed.hangs = all(answer.what in ("returned", "stuck") for answer in found)
            raise failed
        try:
            returned = [from_bytes(answer.result) for answer in found]
            return Outcome([one["result"] for one in returned], [int(one["sent"]) for one in returned],
                           [answer.printed for answer in found])
        except (ValueError, TypeError, KeyError):
            raise AnswerFailed(f"{function} did not end with a return.") from None

    def close(self) -> None:
        self.pool.close()


def shorten(answer: Answer) -> Answer:
    """Shorten a long traceback in the middle and a failed answer's output at its end, and sanitize both."""
    detail = answer.detail
    if len(detail) > LONGEST_TRACEBACK:
        detail = f"{detail[:LONGEST_TRACEBACK // 2]}\n[...]\n{detail[-LONGEST_TRACEBACK // 2:]}"
    printed = sanitize(answer.printed[:PRINTED])
    if answer.what != "returned" and len(printed) > LONGEST_OUTPUT:
        printed = f"{printed[:LONGEST_OUTPUT]} ...\n"
    return answer._replace(detail=sanitize(detail), printed=printed)


def sanitize(text: str) -> str:
    """Replace lone surrogates, which no file can hold, and control characters, which move a cursor."""
    text = str(text).encode(errors="replace").decode()
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def describe_failure(function: str, found: list[Answer], limit: float) -> str:
    """Describe for the answer's author what each rank did, and which rank it waits for."""
    ranks, stuck = len(found), [rank for rank, answer in enumerate(found) if answer.what == "stuck"]
    where = f" on {ranks} ranks" if ranks > 1 else ""
    head = f"{function} did not finish{where}."
    if stuck and all(answer.what in ("stuck", "returned") for answer in found):
        head = f"{function} did not finish within {limit:g} seconds{where}."
    lines = [head, *describe_waits({rank: read_waiting(found[rank].result) for rank in stuck})]
    return "\n".join(lines) + "\n" + "".join(stories(found)).rstrip()


def read_waiting(result: bytes) -> tuple | None:
    """Return the operation of a stuck rank and the rank that it waits for, or None if its report names none."""
    try:
        operation, other = from_bytes(result)
        known = operation in OPERATIONS and (other is None if operation not in WAITS_FOR else type(other) is int)
        return (operation, other) if known else None
    except (ValueError, TypeError):
        return None


def describe_waits(waiting: Mapping[int, Any]) -> list[str]:
    """Describe what each stuck rank waits for, and the cycle if there is one."""
    lines = []
    for rank, what in waiting.items():
        if what is None:
            lines.append(f"rank {rank} computes or sleeps, and waits for no rank: is there an endless loop?")
        elif what[1] is None:
            lines.append(f"rank {rank} is in {what[0]}, which needs all ranks.")
        else:
            lines.append(f"rank {rank} waits {WAITS_FOR[what[0]]} rank {what[1]}.")
    cycle = find_cycle({rank: what[1] for rank, what in waiting.items() if what and what[1] is not None})
    if cycle:
        lines.append(f"They wait in a cycle: {' -> '.join(map(str, [*cycle, cycle[0]]))}. One rank must go first.")
    return lines


def find_cycle(waits_for: Mapping[int, int]) -> list[int]:
    """Return the ranks of a cycle, in which each waits for the next and the last for the first; [] if there is none."""
    for start in waits_for:
        path = [start]
        while (following := waits_for.get(path[-1])) is not None:
            if following in path:
                return path[path.index(following):]
            path.append(following)
    return []
