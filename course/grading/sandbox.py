"""The sandbox, which runs answers on limited ranks (`course/grading/limited_rank.py`) and reports their errors."""
import ast
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from course.grading.broker import Broker
from course.grading.conversation import Ending, converse
from course.grading.fork_server import ForkServer
from course.grading.values import PRINTED, to_bytes
from mpi_impl.launch.pool import Answer, Interrupted, interrupted, stories

RANKS = 8                   # at most
LONGEST_OUTPUT = 500        # characters of a failed answer's output
LONGEST_TRACEBACK = 4000    # characters


class AnswerFailed(Exception):
    """An answer that did not finish on every rank. The message is for its author."""

    hangs = False       # True if no rank has failed, but some have not ended


class Each:
    """An argument that is different on each rank: `each([a, b, c])` on three ranks."""

    def __init__(self, values: Sequence):
        self.values = list(values)


class Outcome(NamedTuple):
    """The result of an answer on each rank, and what the rank has sent and printed, as counted outside its process."""

    results: list
    sent: list[int]         # elements
    messages: list[int]     # arrays sent to one rank, and collectives
    printed: list[str]


class Sandbox:
    """Limited ranks, new ones for each run. Their fork server starts with the first run."""

    def __init__(self, program: str = "course.grading.fork_server"):
        self.program = program
        self.server: ForkServer | None = None

    def run(self, answers: Mapping[str, str], function: str, args: Sequence, n: int | None, allow: Collection[str],
            limit: float, given: Mapping[str, str] | None = None) -> Outcome:
        """Call `function(group, *args)` on n ranks, or `function(*args)` on one if n is None, within `limit` seconds.

        `answers` has the sources of all submitted cells, by name; `given` those of the course's own that replace the
        functions of some. Raises AnswerFailed.
        """
        ranks, given = n or 1, given or {}
        if not 1 <= ranks <= RANKS:
            raise ValueError(f"A run on {ranks} ranks was asked for: 1 to {RANKS} are possible.")
        for value in args:
            if isinstance(value, Each) and len(value.values) != ranks:
                raise ValueError(f"each(...) has {len(value.values)} values for {ranks} ranks")
        sources = [[name, source, functions_of(given.get(name, "")), given.get(name, "")]
                   for name, source in answers.items()]
        common = {"answers": sources, "function": function, "with_group": n is not None, "size": ranks}
        # A rank gets only its own arguments: an answer can find everything in its process.
        calls = [to_bytes({**common, "rank": rank, "args": [value.values[rank] if isinstance(value, Each) else value
                                                            for value in args]}) for rank in range(ranks)]
        broker = Broker(ranks, allow if n is not None else ())
        try:
            ending = self.converse(calls, broker, answers, limit)
        except Interrupted as interrupt:
            raise interrupted([shorten(answer) for answer in interrupt.answers],
                              f"You interrupted {function} while it was running on {ranks} rank(s).") from None
        found = [shorten(answer) for answer in ending.answers]
        if any(answer.what != "returned" for answer in found):
            failed = AnswerFailed(describe_failure(function, found, broker, limit, ending.waited))
            failed.hangs = all(answer.what in ("returned", "stuck") for answer in found)
            raise failed
        return Outcome(ending.results, broker.sent, broker.messages, [answer.printed for answer in found])

    def converse(self, calls: Sequence[bytes], broker: Broker, answers: Mapping[str, str], limit: float) -> Ending:
        """Run the calls, and start the fork server first if it is not there."""
        self.server = self.server or ForkServer(self.program)
        try:
            return converse(self.server, calls, broker, answers, limit)
        except BaseException:       # Ctrl-C, above all: the ranks are left in the middle of a run
            self.close()
            raise

    def close(self) -> None:
        """End the fork server. The next run starts another one."""
        if self.server:
            self.server.close()
            self.server = None


def functions_of(source: str) -> list[str]:
    """Return the functions that a task asks for: those in its answer, but for the solution's own helpers."""
    hidden = {number for region in re.finditer(r"### BEGIN SOLUTION.*?### END SOLUTION", source, re.DOTALL)
              for number in range(source.count("\n", 0, region.start()) + 1, source.count("\n", 0, region.end()) + 2)}
    return [node.name for node in ast.parse(source).body
            if isinstance(node, ast.FunctionDef) and node.lineno not in hidden]


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


def describe_failure(function: str, found: list[Answer], broker: Broker, limit: float, waited: bool) -> str:
    """Describe for the answer's author what each rank did, and which rank it waits for."""
    ranks, stuck = len(found), [rank for rank, answer in enumerate(found) if answer.what == "stuck"]
    where = f" on {ranks} ranks" if ranks > 1 else ""
    head = f"{function} did not finish{where}."
    if stuck and all(answer.what in ("stuck", "returned") for answer in found):
        head = f"{function} never ends{where}: every rank that has not returned waits for another." if waited else \
            f"{function} did not finish within {limit:g} seconds{where}."
    lines = [head, *broker.describe_waits()]
    lines += [f"rank {rank} computes or sleeps, and waits for no rank: is there an endless loop?"
              for rank in stuck if rank not in broker.waiting]
    return "\n".join(lines) + "\n" + "".join(stories(found)).rstrip()
