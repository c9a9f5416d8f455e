"""An answer may compute, and nothing else; whatever it tries is told in a sentence, and the next run works."""
import os
from contextlib import closing

import numpy as np
import pytest

from course.grading.kernel_limits import ALLOWED
from course.grading.lab_group import OPERATIONS
from course.grading.sandbox import AnswerFailed, Each, Sandbox
from course.tests.hostile import function

SECRET = "the hidden test asks for 4711"
FINE = "def f(group): return group.rank"


@pytest.fixture(scope="module")
def sandbox():
    with closing(Sandbox()) as found:
        yield found


@pytest.fixture(scope="module")
def hidden_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("course") / "hidden.py"
    path.write_text(SECRET)
    return path


def failure(sandbox, body: str, n: int | None = 2, limit: float = 5.0) -> str:
    """Return the message that the author of this answer gets."""
    with pytest.raises(AnswerFailed) as failed:
        call(sandbox, function("f(*group)", body), n=n, limit=limit)
    assert "4711" not in str(failed.value)
    return str(failed.value)


def call(sandbox, source: str, *args, n: int | None = 2, limit: float = 5.0):
    """Call the answer f, and return its outcome."""
    return sandbox.run({"f": source}, "f", args, n, OPERATIONS, limit)


def works(sandbox) -> bool:
    """Report whether the next run works."""
    return call(sandbox, FINE).results == [0, 1]


# What no answer may do: the body, and what its author is told ("a|b").
FORBIDDEN = {
    "from all objects": ("import gc\nreturn gc.get_objects()", "gc.get_objects"),
    "from its memory": ("return open('/proc/self/mem', 'rb').read()", "not use files"),
    "from the environment": ("return float(os.environ['SEED'])", "KeyError: 'SEED'"),
    "shared memory": ("from multiprocessing import shared_memory", "may not be imported"),
    "a socket": ("import socket\nsocket.socket()", "processes or the network"),
    "imports the grader": ("from course.grading import checks", "may not be imported"),
    "forks": ("while True: os.fork()", "processes"),
    "a thread left behind": ("import threading\nthreading.Thread(target=print).start()", "thread|may not be"),
    "kills the grader": ("os.kill(os.getppid(), 9)", "processes"),
    "ends": ("os._exit(0)", "exit status 0"),
    "prints without end": ("while True: print('x' * 100)", "printed more than 20,000"),
    "takes memory": ("return np.ones(1 << 28)", "MemoryError"),
    "returns too much": ("return np.zeros(10_000_000)", "are the limit"),
    "moves the cursor": ("raise ValueError('\\x1b[2J<script>')", "?[2J<script>"),
    "opens a file by a detour": ("open(sys.prefix + '/../../../../../../../../../../' + HIDDEN).read()",
                                 "not use files"),
    "loads it with NumPy": ("np.fromfile(HIDDEN, 'u1')", "not use files"),
    "imports it": ("sys.path.append(FOLDER)\nimport hidden", "may not be imported"),
    "calls the shell": ("os.system('cat ' + HIDDEN)", "processes"),
    "takes NumPy's ctypes": ("from numpy._core._internal import ctypes\nctypes.CDLL(None)", "AttributeError"),
    "imports another package": ("import scipy", "scipy may not be imported: an answer has NumPy"),
    "traces": ("sys.settrace(print)", "sys.settrace"),
    "patches what the hook asks": ("import builtins\nos.path.realpath = lambda path, **_: sys.prefix\n"
                                   "builtins.any = lambda _: True\nos.fsdecode = lambda _: sys.prefix\n"
                                   "open(HIDDEN).read()", "not use files"),
    "patches the program": ("import __main__", "may not be imported"),
    "replaces json": ("import json\njson.dumps = lambda *_: '7'\nreturn 7", "died"),
    "raises when it ends": ("import atexit\natexit.register(print, 'still here')\n1 / 0", "division by zero"),
    "raises something odd": ("class Odd(BaseException):\n    def __str__(self): raise Odd\nraise Odd", "Odd"),
    "returns a generator": ("return (x for x in [])", "a generator cannot be passed"),
    "returns single values": ("return [0] * 1_400_000", "too many single values to hand over: put numbers into arrays"),
    "recurses": ("def g(): g()\ng()", "RecursionError"),
    "raises a long text": ("raise ValueError('x' * 1_000_000)", "[...]"),
    "prints what no file can hold": ("print(chr(0xd800), chr(27), chr(0))\nraise ValueError(chr(0xdfff))",
                                     "ValueError: ?"),
    "is not written": ("raise NotImplementedError", "This answer is not written yet"),
    "calls what is in another cell": ("helper(3)", "Ranks see only %%answer cells"),
}


def with_paths(body: str, hidden_file) -> str:
    return body.replace("HIDDEN", repr(str(hidden_file))).replace("FOLDER", repr(str(hidden_file.parent)))


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_is_forbidden_is_reported_and_the_next_run_works(sandbox, hidden_file, what):
    body, words = FORBIDDEN[what]
    said = failure(sandbox, with_paths(body, hidden_file), None)
    assert any(word in said for word in words.split("|")), said
    assert len(said) < 6000 and said.encode() and "\x1b" not in said
    assert "course/grading/" not in said and "mpi_impl/" not in said, "it tells of lines that are not the answer's"
    assert works(sandbox)


FILES = "import struct\nfor file in range(3, 64):\n    try: "
ENDLESS = {
    "loop": ("while True: pass", "rank 0 computes or sleeps, and waits for no rank: is there an endless loop?"),
    "loop that prints": ("while True:\n    try: print('x' * 999)\n    except RuntimeError: pass", "an endless loop?"),
    "native code": ("2 ** (10 ** 11) * 3 ** (10 ** 10)", "did not finish within|MemoryError"),
    "stack": ("sys.setrecursionlimit(10 ** 9)\ndef g(x): return g([x]) + [x]\ng(1)",
              "SIGSEGV|MemoryError|did not finish within"),
    "closes everything": (f"{FILES}os.close(file)\n    except OSError: pass\nwhile True: pass", "killed"),
    "endless message": (f"{FILES}os.write(file, struct.pack('!iQ', -1, 1 << 40))\n    except OSError: pass\n"
                        "while True: pass", "died"),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_an_answer_that_does_not_end_is_ended_and_the_next_run_works(sandbox, what):
    body, words = ENDLESS[what]
    said = failure(sandbox, body, None, 0.4)
    assert any(word in said for word in words.split("|")) and works(sandbox), said


def test_ranks_that_wait_for_one_another_are_reported_with_their_lines_long_before_the_limit(sandbox):
    said = failure(sandbox, "group[0].receive(1 - group[0].rank)", 2, 500.0)
    assert "rank 0 waits to receive from rank 1." in said and "They wait in a cycle: 0 -> 1 -> 0." in said
    assert 'File "answer f", line 5, in f\n    group[0].receive(1 - group[0].rank)' in said
    said = failure(sandbox, "if group[0].rank == 0: group[0].barrier()", 2, 500.0)
    assert "f never ends on 2 ranks" in said and "rank 0 is in barrier, which needs all ranks." in said


def test_an_error_of_the_group_ends_the_run_even_if_it_is_caught(sandbox):
    """Else the sentence, which names what other ranks have passed, would be a message that costs nothing."""
    said = failure(sandbox, "try: group[0].all_reduce([1.0] * (1 + group[0].rank))\nexcept ValueError: return 7", 2)
    assert "ValueError: only arrays of the same shape and dtype" in said
    said = failure(sandbox, "try: group[0].all_reduce([1.0], 'min')\nexcept ValueError: group[0].barrier()", 2)
    assert "op is 'min', but must be 'sum' or 'max'" in said, "the next call does not hide it"


def test_a_server_that_does_not_start_says_why():
    with closing(Sandbox("no.such.module")) as sandbox, pytest.raises(RuntimeError, match="No module named 'no'"):
        call(sandbox, FINE)


def test_a_cell_that_fails_is_no_harm_to_the_others(sandbox):
    answers = {"bad": "raise ValueError('this one')", "worse": "exit()", "syntax": "def", "f": FINE, "null": "\0"}
    assert sandbox.run(answers, "f", (), 2, OPERATIONS, 5.0).results == [0, 1]
    with pytest.raises(AnswerFailed, match="ValueError: this one"):
        sandbox.run(answers, "g", (), 1, OPERATIONS, 5.0)
    with pytest.raises(AnswerFailed, match="there is no function g: was it renamed"):
        sandbox.run({"f": FINE}, "g", (), 1, OPERATIONS, 5.0)


def test_arguments_results_and_what_is_printed(sandbox):
    source = "def f(x, y):\n    print('hello', x)\n    return [x, (y, {'a': None})]"
    outcome = call(sandbox, source, 1, np.arange(3), n=None)
    assert outcome.printed == ["hello 1\n"] and outcome.sent == [0]
    assert outcome.results[0][0] == 1 and np.array_equal(outcome.results[0][1][0], np.arange(3))
    with pytest.raises(ValueError, match="3 values for 2 ranks"):
        call(sandbox, FINE, Each([1, 2, 3]))


FORGED = {
    "an operation of nobody": "tell('steal', None, 0, None)", "no array": "tell('send', object, 1, None)",
    "a long word": "tell('printed', ['x'])", "nothing": "tell()",
    "a result while it waits": "group[0].rank or (tell('receive', None, 1, None), tell('returned', 7))",
    "no message": "line.connection.sendall(b'\\0\\0\\0\\5hello')",
    "half of one": "line.connection.sendall(b'\\0\\0')", "none": "line.connection.close()",
}


@pytest.mark.parametrize("what", FORGED)
def test_whatever_else_comes_over_the_connection_is_no_answer(sandbox, what):
    """Answers can find the connection, and write to it. A result that is forged is only a result."""
    said = failure(sandbox, f"ask = group[0]._ask\nline, tell = ask.__self__, ask.__self__.tell\n{FORGED[what]}\n"
                            "while True: pass", 2, 1.0)
    assert any(words in said for words in ("died", "raised", "did not finish", "never ends")), said
    assert works(sandbox)


def test_nothing_of_an_earlier_run_is_there(sandbox):
    source = "import builtins\ndef f(group):\n    found, builtins.kept = hasattr(builtins, 'kept'), 7\n    return found"
    assert [call(sandbox, source).results for _ in range(2)] == [[False, False]] * 2


# ---- without the audit hook: what the system itself refuses ----

@pytest.fixture(scope="module")
def unhooked_sandbox():
    with closing(Sandbox("course.tests.unhooked_rank")) as found:
        yield found


LIBC = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
REFUSED = {
    "reads": "open(HIDDEN).read()", "writes": "open(FOLDER + '/x', 'w')",
    "asks how many files a process has open": "os.stat('/proc/%d/fd' % os.getpid())",
    "makes a file in memory": "os.memfd_create('x')", "forks": "os.fork()", "kills": "os.kill(1, 0)",
    "becomes another": "os.execv(sys.executable, [sys.executable])",
    "starts a thread": "import _thread\n_thread.start_new_thread(print, ())",
    "shares memory": f"{LIBC}if libc.shmget(77, 4096, 0o1666) < 0: raise PermissionError",
    # what a rank can change, and another one could read: so it would be a message that nobody counts
    "its priority": "os.nice(1)", "another's cores": "os.sched_getaffinity(os.getpid())",
    "another's use of the processor": "import time\ntime.clock_gettime((~os.getpid() << 3) | 2)",
    "a lock that others see":
        f"{LIBC}libc.syscall({ALLOWED.get(os.uname().machine, {}).get('futex')}, libc.syscall, 1, 0, None, None, 0)\n"
        "if ctypes.get_errno() == 1: raise PermissionError",
    "a page that others see": f"{LIBC}if libc.madvise(None, 0, 21) < 0: raise PermissionError",
}


@pytest.mark.skipif(os.uname().machine not in ALLOWED or os.uname().sysname != "Linux", reason="no seccomp here")
@pytest.mark.parametrize("what", REFUSED)
def test_the_kernel_alone_refuses_all_that_reaches_out_of_the_process(unhooked_sandbox, hidden_file, what):
    said = failure(unhooked_sandbox, with_paths(REFUSED[what], hidden_file), None)
    assert any(word in said for word in ("PermissionError", "OSError", "can't start new thread", "ENOTTY")), said
    assert hidden_file.read_text() == SECRET and sorted(os.listdir(hidden_file.parent)) == ["hidden.py"]
