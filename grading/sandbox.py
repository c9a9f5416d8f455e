"""The sandbox: runs answers on limited ranks (`grading/limited_rank.py`), in separate processes, and reports errors."""
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from grading.lab_group import OPERATIONS
from grading.values import LARGEST, from_bytes, to_bytes
from mpi_impl.launching.pool import Answer, Pool, stories

RANKS = 8
SHOWN = 500         # characters of what an answer has printed, where it failed
TOLD = 4000         # characters of a traceback
PRINTED = 20_000    # characters that a rank may have printed
PAST = {"send": "to send to", "receive": "to receive from", "exchange": "to exchange with"}


class AnswerFailed(Exception):
    """An answer that did not finish on every rank. The message is for its author."""

    hangs = False       # whether that is all: no rank has failed, but some were not done in time


class Each:
    """An argument of which every rank gets its own: `each([a, b, c])` on three ranks."""

    def __init__(self, values: Sequence):
        self.values = list(values)


class Outcome(NamedTuple):
    """The result of an answer on each rank, how many elements each has sent, and what it has printed."""

    results: list
    sent: list[int]
    printed: list[str]


class Sandbox:
    """Limited ranks. They start at the first run, and again after one that hung."""

    def __init__(self, size: int = RANKS):
        self.pool = Pool(size, program="grading.limited_rank", largest=LARGEST + (1 << 20))

    def run(self, answers: Mapping[str, str], function: str, args: Sequence, n: int | None, allow: Collection[str],
            limit: float) -> Outcome:
        """Call `function(group, *args)` on n ranks, or `function(*args)` on one if n is None, within `limit` seconds.

        `answers` are the sources of all cells that are handed in, by name. Raises AnswerFailed.
        """
        ranks = n or 1
        for value in args:
            if isinstance(value, Each) and len(value.values) != ranks:
                raise ValueError(f"each(...) has {len(value.values)} values for {ranks} ranks")
        common = {"answers": dict(answers), "function": function, "with_group": n is not None, "allow": list(allow)}
        # A rank is sent its own arguments alone: an answer can find whatever is in its process.
        calls = [to_bytes({**common, "args": [value.values[rank] if isinstance(value, Each) else value
                                              for value in args]}) for rank in range(ranks)]
        found = [shortened(answer) for answer in self.pool.answers(calls, limit)[0]]
        if any(answer.what != "returned" for answer in found):
            failed = AnswerFailed(what_failed(function, found, limit))
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


def shortened(answer: Answer) -> Answer:
    """Shorten a long traceback in the middle, and replace characters that some files cannot hold."""
    detail = answer.detail
    if len(detail) > TOLD:
        detail = f"{detail[:TOLD // 2]}\n[...]\n{detail[-TOLD // 2:]}"
    detail, printed = presentable(detail), presentable(answer.printed[:PRINTED])
    if answer.what != "returned" and len(printed) > SHOWN:
        printed = f"{printed[:SHOWN]} ...\n"
    return answer._replace(detail=detail, printed=printed)


def presentable(text: str) -> str:
    """Return a text without lone surrogates, which no file can hold, and without control characters, which move a
    cursor.
    """
    text = str(text).encode(errors="replace").decode()
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def what_failed(function: str, found: list[Answer], limit: float) -> str:
    """Describe for the answer's author what each rank did, and which waits for which."""
    ranks, stuck = len(found), [rank for rank, answer in enumerate(found) if answer.what == "stuck"]
    where = f" on {ranks} ranks" if ranks > 1 else ""
    head = f"{function} did not come to an end{where}."
    if stuck and all(answer.what in ("stuck", "returned") for answer in found):
        head = f"{function} was not done within {limit:g} seconds{where}."
    lines = [head, *waits({rank: waiting(found[rank].result) for rank in stuck})]
    return "\n".join(lines) + "\n" + "".join(stories(found)).rstrip()


def waiting(result: bytes) -> tuple | None:
    """Return the operation in which a stuck rank is, and the rank for which it waits; None if the report does not say.
    """
    try:
        operation, other = from_bytes(result)
        known = operation in OPERATIONS and (other is None if operation not in PAST else type(other) is int)
        return (operation, other) if known else None
    except (ValueError, TypeError):
        return None


def waits(waiting: Mapping[int, Any]) -> list[str]:
    """Describe what each stuck rank waits for, and the cycle, if they wait in one."""
    lines = []
    for rank, what in waiting.items():
        if what is None:
            lines.append(f"rank {rank} computes, or sleeps, and waits for no rank: does a loop never end?")
        elif what[1] is None:
            lines.append(f"rank {rank} is in {what[0]}, which needs all ranks.")
        else:
            lines.append(f"rank {rank} waits {PAST[what[0]]} rank {what[1]}.")
    circle = circle_of({rank: what[1] for rank, what in waiting.items() if what and what[1] is not None})
    if circle:
        lines.append(f"They wait in a circle: {' -> '.join(map(str, [*circle, circle[0]]))}. Somebody must go first.")
    return lines


def circle_of(waits_for: Mapping[int, int]) -> list[int]:
    """Return ranks of which each waits for the next, and the last for the first; [] if there is no such cycle."""
    for start in waits_for:
        path = [start]
        while (following := waits_for.get(path[-1])) is not None:
            if following in path:
                return path[path.index(following):]
            path.append(following)
    return []
