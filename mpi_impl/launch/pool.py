"""A persistent pool of real ranks, for tests, notebooks and graders.

    with Pool(8) as pool:
        sums = pool.run(4, add_up, numbers)       # add_up(group, numbers) on each of the first 4 ranks

The caller is an ordinary process without MPI: it may draw random examples, use a debugger or be interrupted.
The ranks start once, through mpiexec, and each talks to the caller over a Unix socket of its own
(`mpi_impl/launch/pool_rank.py` is their side). A run costs a millisecond or so, where a launch costs half a second.

Every run ends. If a rank raises, dies, or is still at work at the time limit, the caller gets a
`RankFailure` that holds every failed rank's traceback and the Python stack of every rank that was left waiting.
"""
import json
import os
import pickle
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from mpi_impl.launch.launcher import launch_environment, launcher, mpi_vendor, own_program, stop

PATIENCE = 0.5          # seconds that the other ranks have to finish once one has failed, and to say where they are
START_LIMIT = 60.0      # seconds within which all ranks must be up
MUTE = 5                # seconds that a rank may pause in the middle of a message
FAILURES_A_WORLD = 40   # each failed run strands its communicators, of which an MPI may have only 2,048


class RankFailure(Exception):
    """A run in which not every rank returned. The message tells of each rank that did not."""

    answers: "list[Answer]"     # of all ranks, in rank order
    output: str                 # what their processes wrote past Python, as MPI does when it ends them


class Interrupted(KeyboardInterrupt):
    """A run that its caller interrupted (Ctrl-C). The message says where each rank was; a notebook shows only that."""

    answers: "list[Answer]"     # of all ranks, in rank order

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class RankAssertion(RankFailure, AssertionError):
    """A run in which a rank raised AssertionError: to pytest and to hypothesis, a test that failed."""


class Job(NamedTuple):
    """A request of the caller to one rank."""

    ranks: int        # how many of the pool's ranks take part
    era: int          # failed runs so far: communicators are not shared across a failure
    path: list[str]   # the caller's sys.path
    call: bytes       # the pickled function and arguments


class Answer(NamedTuple):
    """The outcome of a job on one rank. It travels as JSON and bytes, so the receiver unpickles nothing."""

    what: str                 # returned, raised, died, stuck; and up, from a rank that has started
    detail: str = ""          # the traceback, the stack, or how the process ended
    result: bytes = b""       # the pickled result
    printed: str = ""         # what the rank wrote to stdout and stderr
    assertion: bool = False   # whether it raised an AssertionError

    def to_bytes(self) -> bytes:
        head = json.dumps([self.what, self.detail, self.printed, self.assertion]).encode()
        return b"%d\n" % len(head) + head + self.result

    @classmethod
    def from_bytes(cls, data: bytes) -> "Answer":
        length, _, rest = data.partition(b"\n")
        what, detail, printed, assertion = json.loads(rest[:int(length)])
        return cls(what, detail, rest[int(length):], printed, assertion)


def print_in_order(printed: list[str]) -> None:
    """Print what each rank has printed, one after the other."""
    print(*printed, sep="", end="")


class Pool:
    """Up to `size` ranks that stay up between runs. They start at the first run, and again after a failure."""

    def __init__(self, size: int = 8, show: Callable[[list[str]], object] = print_in_order,
                 program: str = "mpi_impl.launch.pool_rank", largest: int | None = None):
        """Describe a pool. `show` is called with the ranks' output; `program` is the module that each of them runs.

        A rank that sends more than `largest` bytes at a time counts as dead.
        """
        self.size, self.show, self.program, self.largest = size, show, program, largest
        self._world: World | None = None
        self._failures = 0

    def run(self, n: int, function: Callable, *args, timeout: float = 30.0) -> list:
        """Call `function(group, *args)` on the first n ranks, where `group` is those n. Return results in rank order.

        The function travels by reference, so it must stand at the top level of a module that the ranks can import.
        The ranks' output is printed here, in rank order. `timeout` is in seconds.
        """
        answers, output = self.answers([pickle_call(function, args)] * n, timeout)
        if any(answer.what != "returned" for answer in answers):
            raise failure(title(function), answers, output, timeout)
        self.show([answer.printed for answer in answers])
        return [pickle.loads(answer.result) for answer in answers]

    def answers(self, calls: Sequence[bytes], timeout: float) -> "tuple[list[Answer], str]":
        """Send each of the first ranks its own call. Return their answers, and the output that bypassed Python.

        No rank is sent another rank's call.
        """
        n = len(calls)
        if not 1 <= n <= self.size:
            raise ValueError(f"A run on {n} ranks was asked of a pool of {self.size}. Ask for 1 to {self.size}.")
        if self._world is None:
            self._world = World(self.size, self.program, self.largest)
        try:
            answers = self._world.run([Job(n, self._failures, sys.path, call) for call in calls], timeout)
            output = self._world.output()
        except BaseException:       # Ctrl-C, above all: the ranks are left in the middle of a job
            self.close()
            raise
        failed = any(answer.what != "returned" for answer in answers)
        self._failures += failed
        if self._world.disturbed or (failed and self._failures % FAILURES_A_WORLD == 0):
            self.close()
        return answers, output

    @property
    def up(self) -> bool:
        """Report whether the ranks are there, with all that earlier runs have left in them."""
        return self._world is not None

    def close(self) -> None:
        """End the ranks. A later run starts new ones."""
        if self._world is not None:
            self._world.end()
            self._world = None

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def pickle_call(function: Callable, args: tuple) -> bytes:
    """Return the call as bytes. Raises TypeError with the reason if it cannot be sent."""
    if getattr(function, "__module__", None) == "__main__":
        raise TypeError(f"The ranks cannot import {title(function)}, since it is defined in the main program or in "
                        "a notebook's cell. Move it to a module.")
    try:
        return pickle.dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"{title(function)} and its arguments cannot travel to the ranks: {error}. The function must "
                        "stand at the top level of a module, and the arguments must pickle.") from error


class World:
    """The processes of one launch, and the caller's end of their sockets."""

    def __init__(self, size: int, program: str, largest: int | None = None):
        self._largest = largest
        self.disturbed = False                  # whether a rank may still be busy with an old job
        self._log = tempfile.TemporaryFile()    # noqa: SIM115  output that bypasses Python: of mpiexec, of dying ranks
        self._log_read = 0
        with folder_for_socket() as folder, socket.socket(socket.AF_UNIX) as listener:
            address = os.path.join(folder, "socket")
            listener.bind(address)
            listener.listen(size)
            self._process = start(size, program, address, self._log)
            self._connections: list[Connection] = []
            try:
                self._connections = self._welcome(listener, size)
            except BaseException:
                self.end()
                raise

    def run(self, jobs: Sequence[Job], timeout: float) -> list[Answer]:
        """Return the answer of each rank that has a job, in rank order, within the timeout and a second.

        Raises Interrupted.
        """
        for rank, job in enumerate(jobs):
            self._tell(rank, tuple(job))     # which needs no import to be unpickled
        answers: dict[int, Answer] = {}
        try:
            self._hear(range(len(jobs)), timeout, answers)
        except KeyboardInterrupt:
            raise interrupted(self._complete(answers, len(jobs))) from None
        return self._complete(answers, len(jobs))

    def _complete(self, answers: dict[int, Answer], n: int) -> list[Answer]:
        """Ask the ranks that have not answered where they are. Return the answers of all n ranks."""
        late = [rank for rank in range(n) if rank not in answers]
        for rank in late:
            self._tell(rank, "Where are you?")
        self._hear(late, PATIENCE, answers)
        self.disturbed = bool(late) or any(answer.what == "died" for answer in answers.values())
        mute = Answer("stuck", "It does not answer: it is in native code that holds the interpreter lock.\n")
        return [answers.get(rank, mute) for rank in range(n)]

    def output(self) -> str:
        """Return the processes' output that bypassed Python since the last call."""
        text = os.pread(self._log.fileno(), 1 << 20, self._log_read)
        self._log_read += len(text)
        return text.decode(errors="replace")

    def end(self) -> None:
        """End all processes, whatever they are doing. A rank ends when its socket is closed."""
        for connection in self._connections:
            connection.close()
        try:
            self._process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            stop(self._process)
        self._log.close()

    def _welcome(self, listener: socket.socket, size: int) -> list[Connection]:
        """Accept the connections of all ranks, and return them in rank order."""
        deadline = time.monotonic() + START_LIMIT
        listener.settimeout(0.2)
        while len(self._connections) < size:
            with suppress(TimeoutError):
                line = listener.accept()[0]
                line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", MUTE, 0))
                self._connections.append(Connection(line.detach()))
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise self._no_start(f"{len(self._connections)} of {size} ranks came up.")
        by_rank = {}
        for connection in self._connections:
            in_time = connection.poll(max(0.0, deadline - time.monotonic()))
            hello = Answer.from_bytes(connection.recv_bytes()) if in_time else Answer("stuck")
            if hello.what != "up":
                raise self._no_start("One of them did not get as far as MPI.")
            rank, ranks = map(int, hello.detail.split())
            if ranks != size:
                raise self._no_start(f"They see a world of {ranks}: is mpiexec of another MPI than mpi4py?")
            by_rank[rank] = connection
        return [by_rank[rank] for rank in range(size)]

    def _no_start(self, why: str) -> RuntimeError:
        return RuntimeError(f"The pool could not start its ranks. {why}\n{self._process.args!r}\n{self.output()}")

    def _tell(self, rank: int, message) -> None:
        with suppress(OSError):     # a closed socket is found out by listening to it
            self._connections[rank].send_bytes(pickle.dumps(message))

    def _hear(self, ranks: Iterable[int], seconds: float, answers: dict[int, Answer]) -> None:
        """Add the answers that arrive in time: once a rank has failed, the others have PATIENCE left."""
        deadline = time.monotonic() + seconds
        waiting: dict[Any, int] = {self._connections[rank]: rank for rank in ranks}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(waiting, left):
                rank = waiting.pop(connection)
                try:
                    answer = Answer.from_bytes(self._connections[rank].recv_bytes(self._largest))
                except (EOFError, OSError, ValueError):
                    answer = Answer("died", "Its connection closed.\n")
                answers[rank] = answer
                if answer.what in ("raised", "died"):
                    deadline = min(deadline, time.monotonic() + PATIENCE)


def folder_for_socket() -> tempfile.TemporaryDirectory:
    """Make a folder with a short name, whatever TMPDIR is: the address of a socket has at most 104 bytes."""
    usual = tempfile.gettempdir()
    return tempfile.TemporaryDirectory(prefix="ranks-", dir=usual if len(os.fsencode(usual)) < 80 else "/tmp")


def start(size: int, program: str, address: str, log) -> subprocess.Popen:
    """Start the launcher in a session of its own: only the caller gets a Ctrl-C, and then ends the ranks."""
    vendor = mpi_vendor()
    return subprocess.Popen([*launcher(vendor, size), *own_program(program, address)],
                            env=launch_environment(vendor, size), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                            start_new_session=True)


def failure(title: str, answers: list[Answer], output: str, timeout: float) -> RankFailure:
    """Return the exception that describes what every rank did."""
    lines = [f"{title} failed on {len(answers)} rank(s), with a time limit of {timeout:g} s.\n",
             *stories(answers, output)]
    kind = RankAssertion if any(answer.assertion for answer in answers) else RankFailure
    error = kind("".join(line if line.endswith("\n") else line + "\n" for line in lines))
    error.answers, error.output = answers, output
    return error


def interrupted(answers: list[Answer], head: str = "", tail: str = "") -> Interrupted:
    """Return the exception that says where each rank was when its caller interrupted it."""
    head = head or f"The run on {len(answers)} rank(s) was interrupted."
    error = Interrupted("".join([head, "\n", *stories(answers, unfinished="interrupted"), tail]))
    error.answers = answers
    return error


def stories(answers: list[Answer], output: str = "", unfinished: str = "stuck") -> list[str]:
    """Describe the outcome of each rank that did not return, or that printed. Ranks with the same story share it.

    The output that bypassed Python comes last.
    """
    groups: dict[tuple[str, str, str], list[int]] = {}
    for what in ("died", "raised", "stuck", "returned"):     # the cause before its consequences
        for rank, answer in enumerate(answers):
            if answer.what == what and (what != "returned" or answer.printed):
                groups.setdefault((what, answer.detail, answer.printed), []).append(rank)
    lines = []
    for (what, detail, printed), ranks in groups.items():
        who = f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
        lines.append(f"\n--- {who}: {unfinished if what == 'stuck' else what}\n{detail}")
        if printed:
            lines.append(f"... and had printed:\n{printed}")
    return lines + [f"\n--- written by the processes themselves\n{output}"] * bool(output)


def title(function: Callable) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
