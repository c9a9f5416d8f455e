"""The conversation of the grader with the ranks of one run: their operations go to the broker, their results come back.

Whatever a rank sends is read as data, and bounded. The run ends when every rank has answered, when a rank has failed,
at the time limit, or as soon as all that have not answered wait for one another.
"""
import contextlib
import os
import re
import select
import selectors
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

    def __init__(self, connection: socket.socket, pipe: int):
        self.connection, self.pipe = connection, pipe
        self.incoming, self.outgoing = bytearray(), bytearray()
        self.printed = ""
        self.refused = ""                   # the first error of the group, which ends the run even if it is caught
        self.answer: Answer | None = None
        self.lost = False
        self.result: Any = None
        connection.setblocking(False)
        os.set_blocking(pipe, False)

    def interest(self) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self.outgoing else 0)

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
    ranks = [Correspondent(mine, out) for (mine, _), (out, _) in zip(pairs, pipes)]
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
        with selectors.DefaultSelector() as selector:
            for number, rank in enumerate(self.ranks):
                selector.register(rank.connection, rank.interest(), number)
            while left := {number for number, rank in enumerate(self.ranks) if not (rank.answer or rank.lost)}:
                if left <= set(self.broker.waiting):
                    return True
                seconds = self.deadline - time.monotonic()
                if seconds <= 0:
                    return False
                for key, events in selector.select(seconds):
                    self.attend(key.data, events)
                for key in [key for key in selector.get_map().values() if self.ranks[key.data].lost]:
                    selector.unregister(key.fileobj)
                for key in list(selector.get_map().values()):
                    if key.events != (wanted := self.ranks[key.data].interest()):
                        selector.modify(key.fileobj, wanted, key.data)
        return False

    def attend(self, number: int, events: int) -> None:
        """Send and receive what a rank's connection is ready for."""
        rank = self.ranks[number]
        if events & selectors.EVENT_WRITE:
            rank.send()
        if events & selectors.EVENT_READ:
            try:
                for message in rank.hear():
                    self.handle(number, message)
            except Lost:
                if rank.refused:        # the answer has caught the error that it got, and went on
                    rank.finish("raised", rank.refused)
                rank.lost = True
                self.broker.waiting.pop(number, None)
        if (rank.lost and not rank.answer) or (rank.answer and rank.answer.what == "raised"):
            self.deadline = min(self.deadline, time.monotonic() + PATIENCE)

    def handle(self, number: int, message: Any) -> None:
        """Handle a message of a rank. Raises Lost for one that no limited rank sends."""
        rank = self.ranks[number]
        if rank.answer or number in self.broker.waiting or not isinstance(message, list) or not message:
            raise Lost
        kind, *content = message
        if kind == "printed" and len(content) == 1 and isinstance(content[0], str):
            rank.printed += content[0][:PRINTED - len(rank.printed)]
        elif kind == "raised" and len(content) == 1 and isinstance(content[0], str):
            rank.finish("raised", content[0])
        elif kind == "returned" and len(content) == 1:
            rank.result = content[0]
            rank.finish("raised" if rank.refused else "returned", rank.refused)
        elif len(content) == 3 and not rank.refused:
            try:
                replies = self.broker.begin(number, kind, *content)
            except TypeError as error:      # from something that is no array
                raise Lost from error
            for reply in replies:
                self.answer(reply)
        else:
            raise Lost

    def answer(self, reply: OperationEnd) -> None:
        """Send a rank the end of its operation. An error ends the run, even if the answer catches it."""
        rank = self.ranks[reply.rank]
        if reply.error:
            rank.refused = f"{reply.error}: {reply.sentence}\n"
        rank.tell(to_bytes([reply.value, reply.error, reply.sentence]))


def find_stuck(server: ForkServer, ranks: Sequence[Correspondent], sources: Mapping[str, str]) -> None:
    """Let each rank that has not answered say where it is."""
    stuck = [number for number, rank in enumerate(ranks) if not (rank.answer or rank.lost)]
    for number in stuck:
        server.ask_for_stack(number)
    for number in stuck:
        written, pipe = "", ranks[number].pipe
        while len(written) < PRINTED and select.select([pipe], [], [], PAUSE if written else STACK_WAIT)[0]:
            if not (piece := ranks[number].read_pipe()):
                break
            written += piece
        ranks[number].finish("stuck", answer_lines(written, sources))


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
