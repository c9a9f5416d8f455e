"""One rank of a pool (`mpi_impl/launch/pool.py`), and its guard.

The guard is the process that mpiexec starts. It forks the rank and stays next to it, for two things that a process
cannot do itself: tell how it died, and end when it is stuck in native code and the pool has gone. As long as the
guard lives, mpiexec notices nothing and lets the other ranks report where they are.
"""
import faulthandler
import io
import os
import pickle
import queue
import select
import signal
import socket
import sys
import threading
import traceback
from contextlib import redirect_stderr, redirect_stdout, suppress
from multiprocessing.connection import Connection

from mpi_impl.launch.pool import Answer, Job


def main(address: str, kind: "type[Rank] | None" = None) -> None:
    """Connect to the pool, fork the rank (of this kind, or a plain one), and guard it."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(address)
    connection = Connection(line.detach())
    lifeline, held_by_rank = os.pipe()      # reading from it ends when the rank does
    rank = os.fork()
    if rank == 0:
        faulthandler.enable(all_threads=False)
        (kind or Rank)(connection).serve()
    os.close(held_by_rank)
    guard(connection, rank, lifeline)


def guard(connection: Connection, rank: int, lifeline: int) -> None:
    """Wait until the pool hangs up, and then end the rank; or until the rank ends, and then tell the pool."""
    events = select.poll()
    events.register(connection.fileno(), 0)     # a hang-up alone: the messages are for the rank
    events.register(lifeline, select.POLLIN)
    if any(fd == connection.fileno() for fd, _ in events.poll()):
        os.kill(rank, signal.SIGKILL)
    _, status = os.waitpid(rank, 0)
    with suppress(EOFError, OSError):           # the pool hangs up
        connection.send_bytes(Answer("died", how_it_ended(os.waitstatus_to_exitcode(status))).to_bytes())
        while True:
            connection.recv_bytes()


def how_it_ended(code: int) -> str:
    if code < 0:
        return f"Its process was killed by {signal.Signals(-code).name}.\n"
    return f"Its process ended, by itself or by MPI, with exit status {code}.\n"


class Rank:
    """The rank: one thread works, and a second one listens to the pool, even while the first one is stuck in MPI."""

    def __init__(self, connection: Connection):
        from mpi_impl.comm import group  # starts MPI, which must happen in the rank and not in its guard
        from mpi_impl.runtime.rank_environment import forget_shared_memory

        self.connection, self.sending = connection, threading.Lock()
        self.jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.printed = io.StringIO()
        self.comm, self.world = group, group.world()
        self.world.allgather_objects(None)   # every rank is there, with all that it shares
        forget_shared_memory()
        self.groups: dict = {}      # by number of ranks and era
        self.wreckage: list[BaseException] = []     # what failed, with all that it held: messages may still be under
                                                    # way, and write into arrays that must not be freed

    def serve(self) -> None:
        """Do the jobs as they arrive. Ends with the process."""
        threading.Thread(target=self.listen, daemon=True).start()
        self.send(Answer("up", f"{self.world.rank} {self.world.size}"))
        while True:
            self.send(self.do(self.jobs.get()))

    def listen(self) -> None:
        """Queue the jobs, and answer the question where the rank is, until the pool hangs up."""
        with suppress(EOFError, OSError):
            while True:
                message = self.connection.recv()
                if isinstance(message, tuple):
                    self.jobs.put(Job(*message))
                else:
                    self.send(self.where())
        os._exit(0)

    def describe(self, error: BaseException) -> str:
        """Return the traceback, without the frames that are not the job's own."""
        trace = error.__traceback__
        while trace and trace.tb_next and is_machinery(trace.tb_frame):
            trace = trace.tb_next
        return "".join(traceback.format_exception(type(error), error, trace))

    def where(self) -> Answer:
        """Return the stack of the working thread at this moment."""
        return Answer("stuck", stack_of_main_thread(), printed=self.printed.getvalue())

    def send(self, answer: Answer) -> None:
        with self.sending, suppress(OSError):
            self.connection.send_bytes(answer.to_bytes())

    def do(self, job: Job) -> Answer:
        """Run the job, and return how it ended."""
        self.printed = io.StringIO()
        with redirect_stdout(self.printed), redirect_stderr(self.printed):
            try:
                return Answer("returned", result=self.call(job), printed=self.printed.getvalue())
            except BaseException as error:      # a SystemExit too is an answer
                self.wreckage.append(error)
                return Answer("raised", self.describe(error), printed=self.printed.getvalue(),
                              assertion=isinstance(error, AssertionError))

    def call(self, job: Job) -> bytes:
        """Call the pickled function with its arguments, and return the pickled result."""
        sys.path[:] = job.path
        function, args = pickle.loads(job.call)
        return pickle.dumps(function(self.group(job.ranks, job.era), *args))

    def group(self, n: int, era: int):
        """Return the group of the first n ranks, with a ledger and a trace of its own for this job."""
        if (n, era) not in self.groups:
            self.groups[n, era] = self.world.subgroup(range(n), "world")
        return self.comm.Group(self.groups[n, era].comm, "world", self.comm.Instruments())


def stack_of_main_thread() -> str:
    """Return the Python stack of the job, without the frames above it."""
    frames = list(traceback.walk_stack(sys._current_frames()[threading.main_thread().ident or 0]))[::-1]
    own = max(i for i, (frame, _) in enumerate(frames) if is_machinery(frame))
    return "".join(traceback.format_list(traceback.StackSummary.extract(frames[own + 1:] or frames)))


def is_machinery(frame) -> bool:
    """Report whether a frame is the pool's, or of a function that marks itself as one that only calls other code."""
    return frame.f_code.co_filename == __file__ or "__tracebackhide__" in frame.f_locals


if __name__ == "__main__":
    main(sys.argv[1])
