"""An answer may compute, and nothing else; whatever it tries is told in a sentence, and the next run works."""
import os

import numpy as np
import pytest

from grading import checks
from grading.fork_server import ForkServer
from grading.grade import grade
from grading.kernel_limits import ALLOWED, landlock_version
from grading.lab_group import OPERATIONS
from grading.sandbox import AnswerFailed, Each, Sandbox
from tests.labs.hostile import ALONE, function
from tests.labs.notebooks import answer_cell, check_cell, notebook

SECRET = "the hidden test asks for 4711"
FINE = "def f(group): return group.rank"


@pytest.fixture(scope="module")
def sandbox():
    found = Sandbox()
    yield found
    found.close()


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


FORBIDDEN = ALONE | {
    "opens a file": ("open(HIDDEN).read()", "not use files"),
    "opens it by a detour": ("open(sys.prefix + '/../../../../../../../../../../' + HIDDEN).read()", "not use files"),
    "loads it with NumPy": ("np.fromfile(HIDDEN, 'u1')", "not use files"),
    "writes a file": ("open('/tmp/x', 'w')", "not use files"),
    "lists a folder": ("os.listdir(FOLDER)", "not use files"),
    "changes the folder": ("os.chdir('/tmp')", "not use files|not permitted"),
    "removes": ("os.remove(HIDDEN)", "not use files"),
    "imports it": ("sys.path.append(FOLDER)\nimport hidden", "may not be imported"),
    "starts a process": ("import subprocess\nsubprocess.run(['cat', HIDDEN])", "processes|may not be imported"),
    "calls the shell": ("os.system('cat ' + HIDDEN)", "processes"),
    "becomes another": ("os.execv('/bin/cat', ['cat', HIDDEN])", "processes"),
    "spawns": ("os.posix_spawn('/bin/cat', ['cat'], {})", "processes"),
    "imports ctypes": ("import ctypes", "may not be imported"),
    "imports its core": ("import _ctypes", "may not be imported"),
    "takes NumPy's ctypes": ("from numpy._core._internal import ctypes\nctypes.CDLL(None)", "AttributeError"),
    "imports another package": ("import scipy", "scipy may not be imported: an answer has NumPy"),
    "starts a thread below": ("import _thread\n_thread.start_new_thread(print, ())", "thread"),
    "traces": ("sys.settrace(print)", "sys.settrace"),
    "imports the textbook": ("from reference import ops", "may not be imported"),
    "patches what the hook asks": ("import builtins\nos.path.realpath = lambda path, **_: sys.prefix\n"
                                   "builtins.any = lambda _: True\nos.fsdecode = lambda _: sys.prefix\n"
                                   "open(HIDDEN).read()", "not use files"),
    "patches the program": ("import __main__", "may not be imported"),
    "replaces json": ("import json\njson.dumps = lambda *_: '7'\nreturn 7", "died"),
    "changes what it sends": ("import struct\nstruct.pack = lambda *_: b'x' * 4\nreturn 7", "died"),
    "raises when it ends": ("import atexit\natexit.register(print, 'still here')\n1 / 0", "division by zero"),
    "interrupts": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "raises something odd": ("class Odd(BaseException):\n    def __str__(self): raise Odd\nraise Odd", "Odd"),
    "returns a generator": ("return (x for x in [])", "a generator cannot be passed"),
    "returns objects in an array": ("return np.array([object()])", "make it one of numbers"),
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
    assert "grading/" not in said and "mpi_impl/" not in said, "it tells of lines that are not the answer's"
    assert works(sandbox)


FILES = "import struct\nfor file in range(3, 64):\n    try: "
ENDLESS = {
    "loop": ("while True: pass", "rank 0 computes or sleeps, and waits for no rank: is there an endless loop?"),
    "loop that prints": ("while True:\n    try: print('x' * 999)\n    except RuntimeError: pass", "an endless loop?"),
    "native code": ("2 ** (10 ** 11) * 3 ** (10 ** 10)", "did not finish within|MemoryError"),
    "loop that catches": ("while True:\n    try: os._exit\n    except BaseException: pass", "an endless loop?"),
    "loop without exceptions": ("import builtins\nbuiltins.BaseException = KeyError\nwhile True: pass",
                                "an endless loop?"),
    "stack": ("sys.setrecursionlimit(10 ** 9)\ndef g(x): return g([x]) + [x]\ng(1)",
              "SIGSEGV|MemoryError|did not finish within"),
    "closes everything": (f"{FILES}os.close(file)\n    except OSError: pass\nwhile True: pass", "killed"),
    "half a message": (f"{FILES}os.write(file, struct.pack('!i', 9) + b'7')\n    except OSError: pass\nos._exit(0)",
                       "died"),
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


def test_a_server_that_has_ended_says_why():
    server = ForkServer("no.such.module")
    try:
        server._process.wait()
        server.start([])
        with pytest.raises(RuntimeError, match="could not be started(.|\n)*No module named 'no'"):
            server.end()
    finally:
        server.close()


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
    "a count": "tell('all_reduce', [[1.0]] * 9, 'sum', None)", "an operation of nobody": "tell('steal', None, 0, None)",
    "no array": "tell('send', object, 1, None)", "a text as an array": "tell('send', 'x', 1, None)",
    "a long word": "tell('printed', ['x'])", "a result and more": "tell('raised', 'x')\ntell('returned', 2)",
    "a result while it waits": "tell('receive', None, 1, None)\ntell('returned', 7)", "nothing": "tell()",
    "no message": "line.connection.sendall(b'\\0\\0\\0\\5hello')", "half of one": "line.connection.sendall(b'\\0\\0')",
    "an endless one": "line.connection.sendall(b'\\xff' * 8)", "none": "line.connection.close()",
}


@pytest.mark.parametrize("what", FORGED)
def test_whatever_else_comes_over_the_connection_is_no_answer(sandbox, what):
    """Answers can find the connection, and write to it. A result that is forged is only a result."""
    said = failure(sandbox, f"ask = group[0]._ask\nline, tell = ask.__self__, ask.__self__.tell\n{FORGED[what]}\n"
                            "while True: pass", 2, 1.0)
    assert "died" in said or "raised" in said or "did not finish" in said, said
    assert works(sandbox)


def test_nothing_of_an_earlier_run_is_there(sandbox):
    source = "import builtins\ndef f(group):\n    found, builtins.kept = hasattr(builtins, 'kept'), 7\n    return found"
    assert [call(sandbox, source).results for _ in range(2)] == [[False, False]] * 2


# ---- without the audit hook: what the system itself refuses ----

@pytest.fixture(scope="module")
def unhooked_sandbox():
    found = Sandbox("tests.labs.unhooked_rank")
    yield found
    found.close()


FUTEX = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n" \
    f"libc.syscall({ALLOWED.get(os.uname().machine, {}).get('futex')}, libc.syscall, OPERATION, 0, None, None, 0)\n" \
    "if ctypes.get_errno() == 1: raise PermissionError"
REFUSED = {
    "reads": "open(HIDDEN).read()", "looks at itself": "open('/proc/self/mem', 'rb')",
    "writes": "open(FOLDER + '/x', 'w')", "lists": "os.listdir(FOLDER)",
    "asks how many files a process has open": "os.stat('/proc/%d/fd' % os.getpid())",
    "removes": "os.remove(HIDDEN)", "links": "os.link(HIDDEN, sys.prefix + '/x')",
    "makes a pipe": "os.mkfifo(FOLDER + '/x')", "renames": "os.rename(HIDDEN, FOLDER + '/y')",
    "makes a file in memory": "os.memfd_create('x')",
    "forks": "os.fork()", "becomes": "os.execv(sys.executable, [sys.executable])", "kills": "os.kill(1, 0)",
    "kills all": "os.kill(-1, 0)", "kills itself": "os.kill(os.getpid(), 9)",
    "starts a thread": "import _thread\n_thread.start_new_thread(print, ())",
    "calls the system": "import ctypes\nif ctypes.CDLL(None).fork() < 0: raise PermissionError",
    "shares memory": "import ctypes\nif ctypes.CDLL(None).shmget(77, 4096, 0o1666) < 0: raise PermissionError",
    # what a rank can change, and another one could read: so it would be a message that nobody counts
    "its priority": "os.nice(1)", "another's priority": "os.getpriority(os.PRIO_PROCESS, os.getpid())",
    "its cores": "os.sched_setaffinity(0, {0})", "another's cores": "os.sched_getaffinity(os.getpid())",
    "its process group": "os.setpgid(0, 0)", "another's process group": "os.getpgid(os.getpid())",
    "another's session": "os.getsid(os.getpid())", "another's policy": "os.sched_getscheduler(os.getpid())",
    "another's use of the processor": "import time\ntime.clock_gettime((~os.getpid() << 3) | 2)",
    "another's clock": "import time\ntime.clock_getres((~os.getpid() << 3) | 2)",
    "its name": "import ctypes\nif ctypes.CDLL(None).prctl(15, b'x') < 0: raise PermissionError",
    "a lock that others see": FUTEX.replace("OPERATION", "1"),
    "a wait that others see": FUTEX.replace("OPERATION", "0"),
    "a page that others see": "import ctypes\nif ctypes.CDLL(None).madvise(None, 0, 21) < 0: raise PermissionError",
    "a terminal": "os.isatty(2) or os.ttyname(2)", "the load": "os.getloadavg()", "its umask": "os.umask(1)",
}


@pytest.mark.skipif(os.uname().machine not in ALLOWED or os.uname().sysname != "Linux", reason="no seccomp here")
@pytest.mark.parametrize("what", REFUSED)
def test_the_kernel_alone_refuses_all_that_reaches_out_of_the_process(unhooked_sandbox, hidden_file, what):
    said = failure(unhooked_sandbox, with_paths(REFUSED[what], hidden_file), None)
    assert any(word in said for word in ("PermissionError", "OSError", "can't start new thread", "ENOTTY")), said
    assert hidden_file.read_text() == SECRET and sorted(os.listdir(hidden_file.parent)) == ["hidden.py"]


@pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")
def test_landlock_alone_opens_no_file(tmp_path):
    from grading.kernel_limits import landlock
    (tmp_path / "x").write_text(SECRET)
    process = os.fork()
    if not process:
        try:
            landlock()
            os.open(tmp_path / "x", os.O_RDONLY)
        except PermissionError:
            os._exit(3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 3


SPY = f"TERCES = {SECRET[::-1]!r}" + """
def spy(words):
    import gc, os, sys
    def has(x):         # looked for backwards, so that it is not found in this code itself
        return (type(x) is str and TERCES in x[::-1]) or (type(x) is bytes and TERCES.encode() in x[::-1])
    found = []
    for thing in gc.get_objects():
        for inner in gc.get_referents(thing):
            if has(inner):
                found.append("object: " + str(type(thing)))
    found += ["environment" for value in [*os.environ.values(), *sys.argv] if has(value)]
    found += ["module " + name for name in sys.modules if name.split(".")[0] in ("grading", "reference", "mpi_impl")]
    return found
"""


def test_a_hidden_test_is_nowhere_in_what_an_answer_can_see(monkeypatch, unhooked_sandbox):
    """Nor is the seed, though nothing of Python is refused to it. (That it does see what it is handed shows that it
    looks well.)"""
    monkeypatch.setattr(checks, "SANDBOX", unhooked_sandbox)
    source = notebook(answer_cell("spy", SPY), check_cell("check", f"""
# Hidden
from grading import expect, run
secret = "{SECRET}"
expect(run(None, "spy", "nothing").results == [[]], str(run(None, "spy", "nothing").results))
expect(run(None, "spy", [secret]).results != [[]], "it does not look well")
"""))
    mark, = grade(source, source, f"the seed, and {SECRET}")
    assert mark.points == 5, mark.said
