"""Programs that are timed in turn: each waits, without spinning, until it is told to take a few steps.

On a machine that others use, too, two timings taken minutes apart cannot be compared. So all contenders are started
first, each with a process for each of its ranks, and then they take turns: one takes a few steps while the others sleep
in a system call. The program side is `serve(step)`; it needs nothing but the standard library, so that any Python can
take part.
"""
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import IO

HERE = Path(__file__).parent
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parent)))}     # of every contender's processes
PLACE = "BENCHMARK_SOCKET"      # the variables that tell a process where the referee listens
PROCESS = "BENCHMARK_PROCESS"   # and the number of its command
START_LIMIT = 120.0             # seconds until all processes of a contender must be there
STEPS_LIMIT = 600.0             # and until a turn must be over; the first one compiles, where there is a compiler


class Contender:
    """A program with some processes, all of which call `serve`."""

    def __init__(self, name: str, commands: Sequence[Sequence[str]], environment: Mapping[str, str], processes: int,
                 limit: float = START_LIMIT, log: IO[str] | None = None):
        """Start `commands`: one launcher for all processes, or one command for each of them. All of them must be there
        after `limit` seconds. A `log` receives all that they print.
        """
        self.name, self.folder = name, tempfile.TemporaryDirectory()
        path = str(Path(self.folder.name, "socket"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(processes)
            listener.settimeout(1.0)
            variables = {**os.environ, **ENVIRONMENT, **environment, PLACE: path}
            self.started = [subprocess.Popen(command, env={**variables, PROCESS: str(i)}, stdout=log, stderr=log)
                            for i, command in enumerate(commands)]
            self.connections: list[socket.socket] = []
            deadline = time.monotonic() + limit
            while len(self.connections) < processes:
                try:
                    self.connections.append(listener.accept()[0])
                except TimeoutError:
                    self.check_start(deadline, limit)

    def check_start(self, deadline: float, limit: float) -> None:
        """Raise SystemExit if a process has died, or the time is up."""
        died = any(process.poll() is not None for process in self.started)
        if died or time.monotonic() > deadline:
            self.stop()
            raise SystemExit(f"error: {self.name} did not start: " + (
                "a process of it has died." if died else f"not all of it was there after {limit:g} s."))

    def turn(self, steps: int, limit: float = STEPS_LIMIT) -> list[float]:
        """Let all processes take this many steps. Return the seconds of each, of the slowest process. Raise SystemExit
        if that takes more than `limit` seconds.
        """
        for connection in self.connections:
            connection.sendall(struct.pack("!i", steps))
        found = [self.answer(connection, limit) for connection in self.connections]
        return [max(times) for times in zip(*found, strict=True)]

    def answer(self, connection: socket.socket, limit: float) -> list[float]:
        connection.settimeout(limit)
        data = b""
        while not data.endswith(b"\n"):
            try:
                part = connection.recv(1 << 16)
            except TimeoutError:
                raise SystemExit(f"error: {self.name} has not ended its turn in {limit:g} s.") from None
            if not part:
                raise SystemExit(f"error: a process of {self.name} has died.")
            data += part
        return json.loads(data)

    def stop(self, grace: float = 0.0) -> None:
        """End all processes, whatever they do; those that end by themselves have `grace` seconds."""
        for process in self.started:
            try:
                process.wait(grace)
            except subprocess.TimeoutExpired:
                process.kill()
        self.close()

    def close(self) -> None:
        for connection in self.connections:
            connection.close()                          # which ends `serve`
        for process in self.started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.folder.cleanup()


def median_times(contenders: Iterable[Contender], turns: int, steps: Callable[[Contender], int]) -> dict[str, float]:
    """Return the median seconds of a step of each contender, by name. All are started first, and end with this call.

    `steps` warms a contender up, and returns the number of its steps in a turn.
    """
    with ExitStack() as stack:
        started = [stack.enter_context(closing(one)) for one in contenders]
        each = {one: steps(one) for one in started}
        times: dict[str, list[float]] = {one.name: [] for one in started}
        for _ in range(turns):
            for one in started:
                times[one.name] += one.turn(each[one])
        return {name: median(found) for name, found in times.items()}


def output_of(command: Sequence[str], **variables: str) -> str:
    """Run a contender's program to its end, and return what it prints. Raises CalledProcessError if it fails."""
    return subprocess.run(command, env={**os.environ, **ENVIRONMENT, **variables}, stdout=subprocess.PIPE, text=True,
                          check=True).stdout


def program(name: str) -> list[str]:
    """Return the command that runs a contender's program."""
    return [sys.executable, str(HERE / "contenders" / f"{name}.py")]


def launched(ranks: int, name: str, *arguments: str) -> list[str]:
    """Return the command that runs a contender's program on ranks."""
    python, script = program(name)
    return [python, "-m", "mpi_impl.launch", "-n", str(ranks), script, *arguments]


def serve(step: Callable[[], object]) -> None:
    """Take steps on request, and report the seconds of each; return when there is nobody to report to."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[PLACE])
        while told := connection.recv(4):
            times = []
            for _ in range(struct.unpack("!i", told)[0]):
                began = time.perf_counter()
                step()
                times.append(time.perf_counter() - began)
            connection.sendall(json.dumps(times).encode() + b"\n")
