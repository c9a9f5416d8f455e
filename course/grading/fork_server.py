"""The fork server, which starts each run's limited ranks: `python -m course.grading.fork_server FD` and its other end.

It loads NumPy once, and forks a new process for each rank of each run, which takes milliseconds. So a run finds nothing
that an earlier one has left behind. The server gets no call, no argument and no seed: a rank's process reads its own
call from a connection that the server only hands on.
"""
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence

START, END = b"S", b"E"         # commands; any other is the number of a rank, whose stack is wanted
MOST_FILES = 32                 # of a START: a connection and a pipe for each rank
HUNG_UP = BrokenPipeError, ConnectionResetError     # from a server that has ended; `end` says so


class ForkServer:
    """The grader's end of a fork server."""

    def __init__(self, program: str):
        mine, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()    # noqa: SIM115  closed by `close`
        self._control, self._replies = mine, mine.makefile("rb")
        environment = {"PATH": os.defpath, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
                       "MKL_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._process = subprocess.Popen([sys.executable, "-P", "-m", program, str(theirs.fileno())], env=environment,
                                         pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=self._log,
                                         stderr=self._log, start_new_session=True)     # Ctrl-C is for the grader
        theirs.close()

    def start(self, files: Sequence[int]) -> None:
        """Fork a rank for each two of these open files: its connection, and the end of a pipe for its stack."""
        with contextlib.suppress(*HUNG_UP):
            socket.send_fds(self._control, [START], list(files))

    def ask_for_stack(self, rank: int) -> None:
        """Let a rank write its stack into its pipe."""
        with contextlib.suppress(*HUNG_UP):
            self._control.sendall(str(rank).encode())

    def end(self) -> list[int]:
        """Kill all ranks that still live. Return each one's exit status, negative if a signal has killed it.

        Raises RuntimeError with what the server has printed, if it has ended.
        """
        reply = b""
        with contextlib.suppress(*HUNG_UP):
            self._control.sendall(END)
            reply = self._replies.readline()
        if not reply:
            self._log.seek(0)
            raise RuntimeError(f"The limited ranks could not be started.\n{self._log.read().decode(errors='replace')}")
        return json.loads(reply)

    def close(self) -> None:
        """End the server, and with it all ranks."""
        self._replies.close()
        self._control.close()
        self._process.wait()
        self._log.close()


def serve(control: socket.socket, rank_program: Callable[[socket.socket, int], object]) -> None:
    """Start and end ranks as the grader says, until it hangs up. `rank_program(connection, pipe)` must not return."""
    ranks: list[int] = []       # their process ids; none is reused before `end_all`
    while True:
        command, files, _, _ = socket.recv_fds(control, 1, MOST_FILES)
        if command == START:
            ranks = [fork(rank, files, control, rank_program) for rank in range(len(files) // 2)]
            for file in files:
                os.close(file)
        elif command in (END, b""):
            statuses, ranks = end_all(ranks), []
            if not command:
                return
            control.sendall(json.dumps(statuses).encode() + b"\n")
        else:
            with contextlib.suppress(OSError):
                os.kill(ranks[int(command)], signal.SIGUSR1)


def fork(rank: int, files: Sequence[int], control: socket.socket, rank_program: Callable) -> int:
    """Fork a rank, which keeps its own files only. Return its process id."""
    process = os.fork()
    if process:
        return process
    try:
        control.close()
        for file in {*files} - {*files[2 * rank:2 * rank + 2]}:
            os.close(file)
        rank_program(socket.socket(fileno=files[2 * rank]), files[2 * rank + 1])
    finally:
        os._exit(1)


def end_all(ranks: Sequence[int]) -> list[int]:
    """Kill processes of this one. Return their exit statuses."""
    for process in ranks:
        os.kill(process, signal.SIGKILL)        # does nothing to one that has ended, and kept its status
    return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks]


if __name__ == "__main__":
    from course.grading.limited_rank import prepare, run_call

    prepare()
    serve(socket.socket(fileno=int(sys.argv[1])), run_call)
