"""The conversation of the grader with the ranks of one run: their operations go to the broker, their results come back.

Whatever a rank sends is read as data, and bounded. The run ends when every rank has answered, when a rank has failed,
at the time limit, or as soon as all that have not answered wait for one another.
"""
import contextlib
import os
import re
import select
import signal
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from course.grading.broker import Broker, OperationEnd
from course.grading.fork_server import ForkServer
from course.grading.values import HEAD, LARGEST, PRINTED, from_bytes, to_bytes
from mpi_impl.launch.pool import Answer, interrupted

PATIENCE = 0.5          # seconds that the other ranks have to finish once one has failed
STACK_WAIT = 2.0        # seconds that a rank has to begin to write where it is ...
PAUSE = 0.05            # ... and that it may pause before the next line
PIECE = 1 << 18         # bytes to read at a time
FRAME = re.compile(r'File "answer ([^"]*)", line (\d+) in (.*)')


class Lost(Exception):
    """A connection that was closed, or brought what no limited rank sends."""


class Correspondent:
    """One rank as the grader sees it: its connection, what has come, what is to be sent, and in the end its answer."""

    def __init__(self, number: int, connection: socket.socket, pipe: int):
        self.number, self.connection, self.pipe = number, connection, pipe
        self.incoming, self.outgoing = bytearray(), bytearray()
        self.printed = ""
        self.refused = ""                   # the first error of the group, which ends the run even if it is caught
        self.answer: Answer | None = None
        self.lost = False
        self.result: Any = None
        connection.setblocking(False)
        os.set_blocking(pipe, False)

    def fileno(self) -> int:
        return self.connection.fileno()

    def tell(self, data: bytes) -> None:
        self.outgoing += struct.pack(HEAD, len(data)) + data
        self.send()

    def send(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):     # found out by listening
            del self.outgoing[:self.connection.send(self.outgoing)]

    def hear(self) -> list:
        """Return the messages that have arrived. Raises Lost."""
        try:
            data = self.connection.recv(PIECE)
        except BlockingIOError:
            return []
        except OSError as error:
            raise Lost from error
        self.incoming += data
        messages, head = [], struct.calcsize(HEAD)
        while len(self.incoming) >= head:
            end = head + struct.unpack_from(HEAD, self.incoming)[0]
            if end > head + LARGEST:
                raise Lost
            if len(self.incoming) < end:
                break
            try:
                messages.append(from_bytes(bytes(self.incoming[head:end])))
            except ValueError as error:
                raise Lost from error
            del self.incoming[:end]
        if not data and not messages:
            raise Lost
        return messages

    def finish(self, what: str, detail: str = "") -> None:
        if self.answer is None:
            self.answer = Answer(what, detail, printed=self.printed)

    def read_pipe(self) -> str:
        with contextlib.suppress(OSError):
            return os.read(self.pipe, PIECE).decode(errors="replace")
        return ""

    def close(self) -> None:
        self.connection.close()
        os.close(self.pipe)


class Ending(NamedTuple):
    """The end of a run."""

    answers: list[Answer]       # of all ranks
    results: list               # of ranks that have returned; None for the others
    waited: bool                # whether it ended since all ranks that were left waited for one another


def converse(server: ForkServer, calls: Sequence[bytes], broker: Broker, sources: Mapping[str, str],
             limit: float) -> Ending:
    """Run a call on each rank, for `limit` seconds at most. `sources` are the answers' texts, for stacks.

    Raises Interrupted.
    """
    pairs, pipes = [socket.socketpair() for _ in calls], [os.pipe() for _ in calls]
    ranks = [Correspondent(number, mine, out) for number, ((mine, _), (out, _)) in enumerate(zip(pairs, pipes))]
    try:
        server.start([file for (_, line), (_, into) in zip(pairs, pipes) for file in (line.fileno(), into)])
        for (_, line), (_, into) in zip(pairs, pipes):
            line.close()
            os.close(into)
        for rank, data in zip(ranks, calls):
            rank.tell(data)
        waited, interrupt = False, None
        try:
            waited = Conversation(ranks, broker).hold(limit)
        except KeyboardInterrupt as error:
            interrupt = error
        find_stuck(server, ranks, sources)
        for rank, status in zip(ranks, server.end()):
            rank.finish("died", how_it_ended(status) + answer_lines(rank.read_pipe(), sources))
        answers = [rank.answer for rank in ranks if rank.answer]
        if interrupt:
            raise interrupted(answers) from None
        return Ending(answers, [rank.result for rank in ranks], waited)
    finally:
        for rank in ranks:
            rank.close()


class Conversation:
    """The messages of one run."""

    def __init__(self, ranks: Sequence[Correspondent], broker: Broker):
        self.ranks, self.broker = ranks, broker
        self.deadline = 0.0

    def hold(self, limit: float) -> bool:
        """Handle messages until the run ends. Return whether it ended since all ranks that were left waited."""
        self.deadline = time.monotonic() + limit
        while left := {rank.number for rank in self.ranks if not (rank.answer or rank.lost)}:
            if left <= set(self.broker.waiting):
                return True
            seconds = self.deadline - time.monotonic()
            if seconds <= 0:
                return False
            here = [rank for rank in self.ranks if not rank.lost]
            readable, writable, _ = select.select(here, [rank for rank in here if rank.outgoing], [], seconds)
            for rank in writable:
                rank.send()
            for rank in readable:
                self.listen(rank)
        return False

    def listen(self, rank: Correspondent) -> None:
        """Handle what a rank has sent. If it is lost, or has failed, the others get little more time."""
        try:
            for message in rank.hear():
                self.handle(rank, message)
        except Lost:
            if rank.refused:        # the answer has caught the error that it got, and went on
                rank.finish("raised", rank.refused)
            rank.lost = True
            self.broker.waiting.pop(rank.number, None)
        if (rank.lost and not rank.answer) or (rank.answer and rank.answer.what == "raised"):
            self.deadline = min(self.deadline, time.monotonic() + PATIENCE)

    def handle(self, rank: Correspondent, message: Any) -> None:
        """Handle a message of a rank. Raises Lost for one that no limited rank sends."""
        if rank.answer or rank.number in self.broker.waiting:
            raise Lost
        match message:
            case ["printed", str(text)]:
                rank.printed += text[:PRINTED - len(rank.printed)]
            case ["raised", str(text)]:
                rank.finish("raised", text)
            case ["returned", result]:
                rank.result = result
                rank.finish("raised" if rank.refused else "returned", rank.refused)
            case [operation, x, first, second] if not rank.refused:
                try:
                    replies = self.broker.begin(rank.number, operation, x, first, second)
                except TypeError as error:      # from something that is no array
                    raise Lost from error
                for reply in replies:
                    self.answer(reply)
            case _:
                raise Lost

    def answer(self, reply: OperationEnd) -> None:
        """Send a rank the end of its operation. An error ends the run, even if the answer catches it."""
        rank = self.ranks[reply.rank]
        if reply.error:
            rank.refused = f"{reply.error}: {reply.sentence}\n"
        rank.tell(to_bytes([reply.value, reply.error, reply.sentence]))


def find_stuck(server: ForkServer, ranks: Sequence[Correspondent], sources: Mapping[str, str]) -> None:
    """Let each rank that has not answered say where it is."""
    stuck = [rank for rank in ranks if not (rank.answer or rank.lost)]
    for rank in stuck:
        server.ask_for_stack(rank.number)
    for rank in stuck:
        written = ""
        while len(written) < PRINTED and select.select([rank.pipe], [], [], PAUSE if written else STACK_WAIT)[0]:
            if not (piece := rank.read_pipe()):
                break
            written += piece
        rank.finish("stuck", answer_lines(written, sources))


def answer_lines(stack: str, sources: Mapping[str, str]) -> str:
    """Return the lines of answers in a stack that `faulthandler` has written, the innermost last, as Python shows them.
    """
    found = []
    for name, number, function in FRAME.findall(stack[-PRINTED:]):
        lines = sources.get(name, "").splitlines()
        line = lines[int(number) - 1].strip() if 0 < int(number) <= len(lines) else ""
        found.append(f'  File "answer {name}", line {number}, in {function}\n    {line}\n')
    return "".join(found[::-1])


def how_it_ended(status: int) -> str:
    if status == -signal.SIGKILL:
        return "Its process was killed, as Linux does when memory is short, or has closed its connection.\n"
    if status < 0:
        return f"Its process was killed by {signal.Signals(-status).name}.\n"
    return f"Its process ended by itself, with exit status {status}.\n"
