"""A limited rank: a process that runs one call of an answer, and can do nothing else.

`course/grading/fork_server.py` forks it, `course/grading/conversation.py` is its only correspondent.
"""
import builtins
import faulthandler
import gc
import importlib
import io
import linecache
import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np

from course.grading.lab_group import LabGroup
from course.grading.limits import forbid_imports, limit_memory, lock_up
from course.grading.values import HEAD, LARGEST, PRINTED, from_bytes, to_bytes

# The modules that answers may import, and those that these, or messages about errors, load later.
COMPUTING = ("__future__", "abc", "array", "bisect", "builtins", "cmath", "collections", "collections.abc",
             "contextlib", "copy", "dataclasses", "decimal", "enum", "fractions", "functools", "heapq", "inspect",
             "io", "itertools", "json", "math", "numbers", "operator", "pprint", "queue", "random", "re", "statistics",
             "string", "struct", "textwrap", "time", "timeit", "types", "typing", "warnings", "weakref", "numpy",
             "numpy.fft", "numpy.lib.stride_tricks", "numpy.linalg", "numpy.ma", "numpy.polynomial", "numpy.random",
             "numpy.testing", "numpy.typing")
NEEDED = ("ast", "codeop", "encodings.idna", "encodings.latin_1", "tokenize", "unicodedata")


class Printed(io.TextIOBase):
    """A stream that sends the broker's process what is printed, up to a limit."""

    def __init__(self, tell):
        self.tell_broker, self.characters = tell, 0

    def write(self, text: str) -> int:
        self.characters += len(text)
        if self.characters > PRINTED:
            raise RuntimeError(f"the answer has printed more than {PRINTED:,} characters")
        self.tell_broker("printed", text)
        return len(text)


class BrokerLine:
    """The connection to the broker's process."""

    def __init__(self, connection: socket.socket):
        self.connection, self.incoming = connection, connection.makefile("rb")

    def tell(self, *message) -> None:
        data = to_bytes(list(message))
        if len(data) > LARGEST:
            raise MemoryError(f"{len(data):,} bytes are too many to hand over; {LARGEST:,} are the limit")
        self.connection.sendall(struct.pack(HEAD, len(data)) + data)

    def hear(self) -> Any:
        head = self.incoming.read(struct.calcsize(HEAD)) or os._exit(0)
        return from_bytes(self.incoming.read(struct.unpack(HEAD, head)[0]))

    def ask(self, *operation) -> Any:
        """Ask the broker for an operation of the group. Return its result, or raise the exception that it names."""
        self.tell(*operation)
        value, error, sentence = self.hear()
        if error:
            raise getattr(builtins, error)(sentence)
        return value


def prepare() -> None:
    """Load everything that answers may use, since they can load nothing later."""
    for name in COMPUTING + NEEDED:
        importlib.import_module(name)
    np.linalg.norm(np.fft.fft(np.random.default_rng(0).normal(size=2)))      # loads parts that NumPy loads when needed
    "".join(traceback.format_exception(ValueError()))
    os.chdir("/")
    os.environ.clear()
    forbid_imports()
    gc.freeze()     # so that a fork copies less


def run_call(connection: socket.socket, pipe: int) -> None:
    """Lock this process up, run the call that the connection brings, and end."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for file, kept in ((nowhere, 0), (nowhere, 1), (pipe, 2)):
        os.dup2(file, kept)
    os.close(nowhere)
    os.close(pipe)
    faulthandler.enable(2, all_threads=False)
    faulthandler.register(signal.SIGUSR1, 2, all_threads=False)
    limit_memory()
    lock_up()
    line = BrokerLine(connection)
    sys.stdout = sys.stderr = Printed(line.tell)
    try:
        line.tell("returned", call(line, **line.hear()))
    except BaseException as error:      # a SystemExit too is an answer
        line.tell("raised", describe(error))
    os._exit(0)


def call(line: BrokerLine, answers: list, function: str, args: list, rank: int, size: int, with_group: bool) -> Any:
    """Call a function of the answers with this rank's arguments, and the group if it has one. Return its result."""
    found = find_function(answers, function)
    return found(LabGroup(rank, size, line.ask), *args) if with_group else found(*args)


def describe(error: BaseException) -> str:
    """Return the traceback, with only the lines of the answer."""
    found = traceback.TracebackException.from_exception(error)
    found.stack = traceback.StackSummary.from_list(
        [frame for frame in found.stack if frame.filename.startswith("answer ")])
    text = "".join(found.format()) if found.stack else "".join(found.format_exception_only())
    if isinstance(error, NameError):
        text += "Ranks see only %%answer cells: import it, or define it, in one of them.\n"
    if isinstance(error, NotImplementedError):
        text += "This answer is not written yet, or still contains the line that raises this error.\n"
    return text[:PRINTED // 2] + text[PRINTED // 2:][-PRINTED // 2:]


def find_function(answers: Sequence, name: str):
    """Run the answers in order, and return the function of this name. Raises NameError, or the error of an answer.

    An answer is its name, its source, and with the course's own functions in place of some of its, their names and
    their source. An answer that fails does not prevent the others from running.
    """
    names, course = {"__name__": "answer"}, {"__name__": "course"}
    errors: list[BaseException] = []
    for answer, source, replaced, by in answers:
        title = f"answer {answer}"
        linecache.cache[title] = len(source), None, source.splitlines(keepends=True), title
        try:
            exec(compile(source, title, "exec"), names)
        except (Exception, SystemExit) as error:
            errors.append(error)
        if replaced:
            exec(compile(by, "course", "exec"), course)
            names |= {function: course[function] for function in replaced}
    if callable(names.get(name)):
        return names[name]
    if errors:
        raise errors[0]
    raise NameError(f"there is no function {name}: was it renamed?")
