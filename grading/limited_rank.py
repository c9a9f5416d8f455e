"""The program of a limited rank, which runs answers and can do nothing else. `grading/sandbox.py` is the other side."""
import io
import linecache
import os
import sys
import threading
import traceback

import numpy as np

from grading.lab_group import LabGroup
from grading.limits import close_inherited_files, lock_processes, lock_up
from grading.values import LARGEST, PRINTED, from_bytes, to_bytes
from mpi_impl.launching.pool import Answer, Job
from mpi_impl.launching.pool_rank import Rank, main

# MPI passes large messages on one machine by reading the other process's memory, which locked-up processes may not.
NO_SINGLE_COPY = {"MPIR_CVAR_CH4_CMA_ENABLE": "0",                      # MPICH
                  "OMPI_MCA_smsc": "^cma,knem,xpmem",                   # Open MPI 5
                  "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}   # and 4


class Printed(io.StringIO):
    """A stream that keeps what is printed, up to a limit."""

    def write(self, text: str) -> int:
        if self.tell() + len(text) > PRINTED:
            raise RuntimeError(f"the answer has printed more than {PRINTED:,} characters")
        return super().write(text)


class LimitedRank(Rank):
    """A rank of a pool that runs answers, locked up."""

    def __init__(self, connection):
        os.environ.update(NO_SINGLE_COPY)
        super().__init__(connection)
        self.lab_group: LabGroup | None = None
        np.random.default_rng(0).normal(size=2)     # loads parts of NumPy that could not be loaded later
        np.linalg.norm(np.fft.fft(np.ones(2)))

    def serve(self) -> None:
        """Serve like every rank, but locked up. Processes are forbidden only once the listening thread runs."""
        self.locked = False
        lock_up()
        super().serve()

    def call(self, job: Job) -> bytes:
        """Call a function of the answers. The job has their sources, its name and its arguments on this rank.

        Return its result and the number of elements that it sent, encoded.
        """
        __tracebackhide__ = True
        if not self.locked:
            lock_processes()
            self.locked = True
        sys.stdout = sys.stderr = self.printed = Printed()
        request = from_bytes(job.call)
        group = self.group(job.ranks, job.era)
        group.transports.forbid_shared_memory()     # it would be a file, and files are forbidden
        self.lab_group = LabGroup(group, request["allow"])
        function = find_function(request["answers"], request["function"])
        result = function(self.lab_group, *request["args"]) if request["with_group"] else function(*request["args"])
        data = to_bytes({"result": result, "sent": self.lab_group.sent})
        if len(data) > LARGEST:
            raise MemoryError(f"the answer returned {len(data):,} bytes; {LARGEST:,} are the limit")
        return data

    def describe(self, error: BaseException) -> str:
        """Return the traceback, with only the lines of the answer."""
        found = traceback.TracebackException.from_exception(error)
        found.stack = answer_frames(found.stack)
        text = "".join(found.format()) if found.stack else "".join(found.format_exception_only())
        if isinstance(error, NameError):
            text += "Ranks see only %%answer cells: import it, or define it, in one of them.\n"
        if isinstance(error, NotImplementedError):
            text += "This answer is not written yet, or still contains the line that raises this error.\n"
        return text[:PRINTED // 2] + text[PRINTED // 2:][-PRINTED // 2:]

    def where(self) -> Answer:
        """Return the line of the answer that the rank executes, and the rank that it waits for."""
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        stack = answer_frames(traceback.extract_stack(frame))
        waiting = self.lab_group.waiting if self.lab_group else None
        return Answer("stuck", "".join(stack.format()), to_bytes(waiting), self.printed.getvalue())


def answer_frames(stack: traceback.StackSummary) -> traceback.StackSummary:
    """Return the frames of a stack that are in answers."""
    return traceback.StackSummary.from_list([frame for frame in stack if frame.filename.startswith("answer ")])


def find_function(answers: dict[str, str], name: str):
    """Run the answers in order, and return the function of this name. Raises NameError, or the error of an answer.

    An answer that fails does not prevent the others from running.
    """
    __tracebackhide__ = True
    names: dict = {"__name__": "answer"}
    errors: list[BaseException] = []
    for answer, source in answers.items():
        title = f"answer {answer}"
        linecache.cache[title] = len(source), None, source.splitlines(keepends=True), title
        try:
            exec(compile(source, title, "exec"), names)
        except (Exception, SystemExit) as error:
            errors.append(error)
    if callable(names.get(name)):
        return names[name]
    if errors:
        raise errors[0]
    raise NameError(f"there is no function {name}: was it renamed?")


if __name__ == "__main__":
    close_inherited_files()
    main(sys.argv[1], LimitedRank)
