"""An answer may compute, and nothing else; whatever it tries is told in a sentence, and the next run works."""
import os

import numpy as np
import pytest

from grading import checks
from grading.grade import grade
from grading.kernel_limits import REFUSED, landlock_version
from grading.lab_group import OPERATIONS
from grading.sandbox import AnswerFailed, Each, Sandbox, find_cycle
from grading.values import to_bytes
from mpi_impl.launching.pool import Answer, Pool
from tests.labs.notebooks import answer_cell, check_cell, notebook

SECRET = "the hidden test asks for 4711"
FINE = "def f(group): return group.rank"


@pytest.fixture(scope="module")
def sandbox():
    found = Sandbox(2)
    yield found
    found.close()


@pytest.fixture(scope="module")
def hidden_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("course") / "hidden.py"
    path.write_text(SECRET)
    return path


def failure(sandbox, body: str, n: int | None = 2, limit: float = 5.0) -> str:
    """Return the message that the author of this answer gets."""
    source = "def f(*group):\n    import os, sys\n" + "".join(f"    {line}\n" for line in body.strip().splitlines())
    with pytest.raises(AnswerFailed) as failed:
        sandbox.run({"f": source}, "f", (), n, OPERATIONS, limit)
    assert "4711" not in str(failed.value)
    return str(failed.value)


FORBIDDEN = {
    "opens a file": ("open({hidden!r}).read()", "not use files"),
    "opens it as a path": ("import pathlib\npathlib.Path({hidden!r}).read_text()", "not use files"),
    "opens it as bytes": ("open({hidden!r}.encode()).read()", "not use files"),
    "opens it with os": ("os.open({hidden!r}, 0)", "not use files"),
    "opens it by a detour": ("open(sys.prefix + '/../../../../../../../../../../' + {hidden!r}).read()",
                             "not use files"),
    "loads it with NumPy": ("import numpy as np\nnp.fromfile({hidden!r}, 'u1')", "not use files"),
    "maps it": ("import numpy as np\nnp.memmap({hidden!r})", "not use files"),
    "writes a file": ("open('/tmp/x', 'w')", "not use files"),
    "writes among the packages": ("open(sys.prefix + '/x', 'w')", "not use files"),
    "lists a folder": ("os.listdir({folder!r})", "not use files"),
    "lists this folder": ("os.listdir()", "not use files"),
    "scans a folder": ("list(os.scandir({folder!r}))", "not use files"),
    "walks": ("import glob\nassert glob.glob({folder!r} + '/*') == [], 'found'\nos.chdir('/tmp')", "not use files"),
    "removes": ("os.remove({hidden!r})", "not use files"),
    "imports it": ("sys.path.append({folder!r})\nimport hidden", "not use files|No module named"),
    "takes a file for a module": ("import importlib.machinery as m\nm.SourceFileLoader('x', {hidden!r}).load_module()",
                                  "not use files"),
    "starts a process": ("import subprocess\nsubprocess.run(['cat', {hidden!r}])", "processes"),
    "calls the shell": ("os.system('cat ' + {hidden!r})", "processes"),
    "forks": ("os.fork()", "processes"),
    "becomes another": ("os.execv('/bin/cat', ['cat', {hidden!r}])", "processes"),
    "spawns": ("os.posix_spawn('/bin/cat', ['cat'], {{}})", "processes"),
    "kills": ("os.kill(os.getppid(), 9)", "processes"),
    "opens a socket": ("import socket\nsocket.socket()", "network"),
    "asks the web": ("import urllib.request\nurllib.request.urlopen('http://localhost')", "network"),
    "loads a library": ("import ctypes\nctypes.CDLL(None)", "ctypes.dlopen"),
    "starts a thread": ("import threading\nthreading.Thread(target=print).start()", "thread"),
    "starts a thread below": ("import _thread\n_thread.start_new_thread(print, ())", "thread"),
    "lists all objects": ("import gc\ngc.get_objects()", "gc.get_objects"),
    "traces": ("sys.settrace(print)", "sys.settrace"),
    "imports the machine": ("import mpi_impl.layers", "may not be imported"),
    "imports the textbook": ("from reference import ops", "may not be imported"),
    "imports the grader": ("import grading", "may not be imported"),
    "imports MPI": ("from mpi4py import MPI", "may not be imported"),
    "patches what the hook asks": ("import builtins\nos.path.realpath = lambda path, **_: sys.prefix\n"
                                   "builtins.any = lambda _: True\nos.fsdecode = lambda _: sys.prefix\n"
                                   "open({hidden!r}).read()", "not use files"),
    "patches the program": ("import __main__\n__main__.lock_up", "no attribute 'lock_up'"),
    "empties the hook's words": ("import grading.limits", "may not be imported"),
    "sends past the count": ("group[0].sent = 0", "cannot be set"),
    "ends the process": ("os._exit(0)", "exit status 0"),
    "ends the program": ("sys.exit(3)", "SystemExit: 3"),
    "raises SystemExit": ("raise SystemExit", "SystemExit"),
    "interrupts": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "raises something odd": ("class Odd(BaseException):\n    def __str__(self): raise Odd\nraise Odd", "Odd"),
    "returns an object": ("return object()", "a object cannot be passed"),
    "returns a function": ("return f", "a function cannot be passed"),
    "returns a generator": ("return (x for x in [])", "a generator cannot be passed"),
    "returns objects in an array": ("import numpy as np\nreturn np.array([object()])", "make it one of numbers"),
    "returns too much": ("import numpy as np\nreturn np.zeros(10_000_000)", "are the limit"),
    "takes too much memory": ("import numpy as np\nreturn np.ones(1 << 28).sum()", "MemoryError"),
    "grows and grows": ("x = [0]\nwhile True: x += x", "MemoryError"),
    "recurses": ("def g(): g()\ng()", "RecursionError"),
    "prints without end": ("while True: print('x' * 100)", "printed more than 20,000"),
    "raises a long text": ("raise ValueError('x' * 1_000_000)", r"\[\.\.\.\]"),
    "prints what no file can hold": ("print(chr(0xd800), chr(27), chr(0))\nraise ValueError(chr(0xdfff))",
                                     "ValueError: ?"),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_is_forbidden_is_reported_and_the_next_run_works(sandbox, hidden_file, what):
    body, words = FORBIDDEN[what]
    n = 1 if "memory" in what or "grows" in what or "group[0]" in body else None
    said = failure(sandbox, body.format(hidden=str(hidden_file), folder=str(hidden_file.parent)), n)
    assert any(word.replace("\\", "") in said for word in words.split("|")), said
    assert len(said) < 6000 and said.encode() and "\x1b" not in said
    assert "grading/" not in said and "mpi_impl/" not in said, "it tells of lines that are not the answer's"
    assert sandbox.run({"f": FINE}, "f", (), 2, OPERATIONS, 5.0).results == [0, 1]


@pytest.mark.parametrize("body, words", [
    ("while True: pass", "rank 0 computes or sleeps, and waits for no rank: is there an endless loop?"),
    ("while True:\n    try: print('x' * 999)\n    except RuntimeError: pass", "is there an endless loop?"),
    ("2 ** (10 ** 11) * 3 ** (10 ** 10)", "did not finish within|MemoryError|does not answer"),
    ("sys.setrecursionlimit(10 ** 9)\ndef g(x): return g([x]) + [x]\ng(1)",
     "SIGSEGV|MemoryError|did not finish within"),
    ("for file in range(3, 64):\n    try: os.close(file)\n    except OSError: pass\nwhile True: pass",
     "closed|exit|did not finish"),
    ("import struct\nfor file in range(3, 64):\n    try: os.write(file, struct.pack('!i', 9) + b'7')\n"
     "    except OSError: pass\nos._exit(0)", "died"),
    ("import struct\nfor file in range(3, 64):\n    try: os.write(file, struct.pack('!iQ', -1, 1 << 40))\n"
     "    except OSError: pass\nwhile True: pass", "died|did not finish"),
], ids=["loop", "loop that prints", "native code", "stack", "closes everything", "half a message", "endless message"])
def test_an_answer_that_does_not_end_is_ended_and_the_next_run_works(sandbox, body, words):
    said = failure(sandbox, body, None, 0.4)
    assert any(word in said for word in words.split("|")), said
    assert sandbox.run({"f": FINE}, "f", (), 2, OPERATIONS, 5.0).results == [0, 1]


def test_who_waits_for_whom_is_reported(sandbox):
    said = failure(sandbox, "group[0].receive(1 - group[0].rank)", 2, 0.4)
    assert "rank 0 waits to receive from rank 1." in said and "They wait in a cycle: 0 -> 1 -> 0." in said
    assert "rank 0 is in barrier, which needs all ranks." in failure(
        sandbox, "if group[0].rank == 0: group[0].barrier()", 2, 0.4)


@pytest.mark.parametrize("body, words", {
    "group[0].all_reduce([1.0] * (2 + group[0].rank))": "rank 0 has passed float64 [2], rank 1 has passed float64 [3]",
    "group[0].all_reduce([1.0], 'min')": "op is 'min', but must be 'sum' or 'max'",
    "np.ones(3)": "Ranks see only %%answer cells",
    "return [0] * 1_400_000": "too many single values to hand over: put numbers into arrays",
    "raise NotImplementedError": "This answer is not written yet",
    "group[0].exchange(None, 1, 1)": "None cannot be sent, only arrays",
    "vars(group[0])['sent'] = 0": "vars() argument must have __dict__ attribute",
}.items())
def test_a_common_mistake_is_explained(sandbox, body, words):
    assert words in failure(sandbox, body)


def test_a_message_of_millions_of_characters_is_cut(sandbox):
    assert len(failure(sandbox, "raise RuntimeError('x' * 20_000_000)")) < 10_000


def test_a_circle_is_found_wherever_it_is():
    assert find_cycle({0: 1, 1: 2, 2: 3, 3: 1}) == [1, 2, 3]
    assert find_cycle({0: 1, 1: 2}) == [] and find_cycle({}) == []


def test_a_cell_that_fails_is_no_harm_to_the_others(sandbox):
    answers = {"bad": "raise ValueError('this one')", "worse": "exit()", "syntax": "def", "f": FINE, "null": "\0"}
    assert sandbox.run(answers, "f", (), 2, OPERATIONS, 5.0).results == [0, 1]
    with pytest.raises(AnswerFailed, match="ValueError: this one"):
        sandbox.run(answers, "g", (), 1, OPERATIONS, 5.0)
    with pytest.raises(AnswerFailed, match="there is no function g: was it renamed"):
        sandbox.run({"f": FINE}, "g", (), 1, OPERATIONS, 5.0)


def test_arguments_results_and_what_is_printed(sandbox):
    source = "def f(x, y):\n    print('hello', x)\n    return [x, (y, {'a': None})]"
    outcome = sandbox.run({"f": source}, "f", (1, np.arange(3)), None, OPERATIONS, 5.0)
    assert outcome.printed == ["hello 1\n"] and outcome.sent == [0]
    assert outcome.results[0][0] == 1 and np.array_equal(outcome.results[0][1][0], np.arange(3))
    with pytest.raises(ValueError, match="3 values for 2 ranks"):
        sandbox.run({"f": FINE}, "f", (Each([1, 2, 3]),), 2, OPERATIONS, 5.0)


@pytest.mark.parametrize("result", [b"", b"garbage", to_bytes(1), to_bytes({"result": 1}), to_bytes({"sent": 1}),
                                    to_bytes({"result": 1, "sent": "x"}),
                                    to_bytes({"result": 1, "sent": float("nan")})],
                         ids=repr)
def test_a_forged_result_is_reported(sandbox, monkeypatch, result):
    monkeypatch.setattr(Pool, "answers", lambda *_: ([Answer("returned", result=result)], ""))
    with pytest.raises(AnswerFailed, match="f did not end with a return"):
        sandbox.run({"f": FINE}, "f", (), 1, OPERATIONS, 5.0)


@pytest.mark.parametrize("waiting", [b"", b"garbage", to_bytes(("send", "x")), to_bytes(("evil", 1)), to_bytes(3),
                                     to_bytes(([], 1)), to_bytes(("send", None))], ids=repr)
def test_a_forged_word_of_where_a_rank_is_is_no_word(sandbox, monkeypatch, waiting):
    monkeypatch.setattr(Pool, "answers", lambda *_: ([Answer("stuck", "", waiting)], ""))
    with pytest.raises(AnswerFailed, match="is there an endless loop"):
        sandbox.run({"f": FINE}, "f", (), 1, OPERATIONS, 5.0)


# ---- without the audit hook: what the system itself refuses ----

@pytest.fixture(scope="module")
def unhooked_sandbox():
    found = Sandbox(2)
    found.pool.program = "tests.labs.unhooked_rank"
    yield found
    found.close()


FILES = {
    "reads": "open({hidden!r}).read()", "lists": "os.listdir({folder!r})", "lists all": "os.listdir('/')",
    "looks at others": "open('/proc/%d/environ' % os.getppid()).read()",
    "looks at itself": "open('/proc/self/mem', 'rb')",
    "writes": "open({folder!r} + '/x', 'w')", "writes among the packages": "open(sys.prefix + '/x', 'w')",
    "removes": "os.remove({hidden!r})", "links": "os.link({hidden!r}, sys.prefix + '/x')",
    "makes a pipe": "os.mkfifo({folder!r} + '/x')", "renames": "os.rename({hidden!r}, {folder!r} + '/y')",
}
PROCESSES = {
    "forks": "os.fork()", "starts": "import subprocess\nsubprocess.run([sys.executable, '-c', ''])",
    "becomes": "os.execv(sys.executable, [sys.executable])", "kills": "os.kill(os.getppid(), 9)",
    "kills all": "os.kill(-1, 9)", "opens a socket": "import socket\nsocket.socket()",
    "opens a pair": "import socket\nsocket.socketpair()",
    "raises its limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "starts a thread": "import threading\nthreading.Thread(target=print).start()",
    "calls the system": "import ctypes\nif ctypes.CDLL(None).fork() < 0: raise PermissionError",
}


@pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")
@pytest.mark.parametrize("what", FILES)
def test_landlock_alone_keeps_files(unhooked_sandbox, hidden_file, what):
    said = failure(unhooked_sandbox, FILES[what].format(hidden=str(hidden_file), folder=str(hidden_file.parent)), None)
    assert "PermissionError" in said or "OSError" in said, said
    assert hidden_file.read_text() == SECRET and sorted(os.listdir(hidden_file.parent)) == ["hidden.py"]


@pytest.mark.skipif(os.uname().machine not in REFUSED or os.uname().sysname != "Linux", reason="no seccomp here")
@pytest.mark.parametrize("what", PROCESSES)
def test_seccomp_alone_keeps_processes(unhooked_sandbox, what):
    said = failure(unhooked_sandbox, PROCESSES[what], None)
    assert "PermissionError" in said or "not allowed" in said or "can't start new thread" in said, said


def test_mpi_starts_no_program(unhooked_sandbox, tmp_path):
    """Its launcher, which is not locked up, would start any: so the line to it is cut."""
    body = f"group[0]._group.comm.Spawn('/bin/sh', ['-c', 'echo > {tmp_path}/spawned'], 1)"
    failure(unhooked_sandbox, body, 2, 2.0)
    assert not list(tmp_path.iterdir())


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


def test_a_hidden_test_is_nowhere_in_what_an_answer_can_see(monkeypatch):
    """Nor is the seed, though nothing of Python is refused to it. (That it does see what it is handed shows that it
    looks well.)"""
    monkeypatch.setattr(checks.SANDBOX.pool, "program", "tests.labs.unhooked_rank")
    source = notebook(answer_cell("spy", SPY), check_cell("check", f"""
# Hidden
from grading import expect, run
secret = "{SECRET}"
expect(run(None, "spy", "nothing").results == [[]], str(run(None, "spy", "nothing").results))
expect(run(None, "spy", [secret]).results != [[]], "it does not look well")
"""))
    mark, = grade(source, source, f"the seed, and {SECRET}")
    assert mark.points == 5, mark.said


def test_no_lab_and_no_course_lies_where_an_answer_may_read():
    from grading.lab_source import LABS
    from grading.limits import is_inside, packages
    from grading.release import ROOT
    assert not is_inside(str(LABS), packages()) and not is_inside(str(ROOT / "runs" / "course"), packages())
