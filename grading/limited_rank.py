"""One limited rank: it runs answers, and can do nothing else. `grading/sandbox.py` is the other side."""
import io
import linecache
import os
import sys
import threading
import traceback

import numpy as np

from grading.lab_group import LabGroup
from grading.limits import close_inherited_files, lock_processes, lock_up
from grading.values import LARGEST, from_bytes, to_bytes
from mpi_impl.launching.pool import Answer, Job
from mpi_impl.launching.pool_rank import Rank, main

PRINTED = 20_000    # characters that an answer may print

# Locked-up processes may not read one another's memory, which is how MPI hands over large messages on one machine.
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
    def __init__(self, connection):
        os.environ.update(NO_SINGLE_COPY)
        super().__init__(connection)
        self.lab_group: LabGroup | None = None
        np.random.default_rng(0).normal(size=2)     # loaded, as are the other parts that come late
        np.linalg.norm(np.fft.fft(np.ones(2)))

    def serve(self) -> None:
        """Serve as every rank does, but locked up: processes are locked once the thread that listens is there."""
        self.locked = False
        lock_up()
        super().serve()

    def call(self, job: Job) -> bytes:
        """The answers' sources, the name of a function in them, and its arguments on this rank -> its result, and what
        it sent."""
        __tracebackhide__ = True
        if not self.locked:
            lock_processes()
            self.locked = True
        sys.stdout = sys.stderr = self.printed = Printed()
        asked = from_bytes(job.call)
        group = self.group(job.ranks, job.era)
        group.transports.forbid_shared_memory()     # memory with other ranks would be a file, and those are locked away
        self.lab_group = LabGroup(group, asked["allow"])
        function = defined(asked["answers"], asked["function"])
        result = function(self.lab_group, *asked["args"]) if asked["with_group"] else function(*asked["args"])
        data = to_bytes({"result": result, "sent": self.lab_group.sent})
        if len(data) > LARGEST:
            raise MemoryError(f"the answer returned {len(data):,} bytes; {LARGEST:,} are the limit")
        return data

    def describe(self, error: BaseException) -> str:
        """Return the traceback, with lines of the answer alone."""
        found = traceback.TracebackException.from_exception(error)
        found.stack = of_answers(found.stack)
        text = "".join(found.format()) if found.stack else "".join(found.format_exception_only())
        if isinstance(error, NameError):
            text += "On ranks there is only what stands in %%answer cells: import it, or define it, there.\n"
        if isinstance(error, NotImplementedError):
            text += "This answer is not written yet, or the line that says so still stands in it.\n"
        return text[:PRINTED // 2] + text[PRINTED // 2:][-PRINTED // 2:]

    def where(self) -> Answer:
        """Return the lines of the answer that the rank is in, and the rank that it waits for."""
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        stack = of_answers(traceback.extract_stack(frame))
        waiting = self.lab_group.waiting if self.lab_group else None
        return Answer("stuck", "".join(stack.format()), to_bytes(waiting), self.printed.getvalue())


def of_answers(stack: traceback.StackSummary) -> traceback.StackSummary:
    return traceback.StackSummary.from_list([frame for frame in stack if frame.filename.startswith("answer ")])


def defined(answers: dict[str, str], name: str):
    """Return the function of that name, from cells that are run in order. Raises NameError, or what its own cell
    raised.
    """
    __tracebackhide__ = True
    names: dict = {"__name__": "answer"}
    errors: list[BaseException] = []    # a cell that fails is no harm to the others
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
