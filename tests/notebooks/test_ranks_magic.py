"""`%%ranks`: state lives between cells, errors show the rank, hangs end, and what is asked wrongly gets a sentence."""
import os
import signal

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from mpi_impl.comm.group import Group, Instruments
from shardlab.demos import one_block
from shardlab.notebook import cell
from shardlab.notebook.ranks import CellFailed, Ranks, lead, parse_line, show
from tests.fake_cuda import fake_cuda
from tests.spy import SpyArray


@pytest.fixture(scope="module")
def shell():
    """Return a notebook's shell with the magic loaded."""
    shell = InteractiveShell()
    shell.run_line_magic("load_ext", "shardlab.notebook")
    yield shell
    shell.user_ns["ranks"].pool.close()


def run(shell, cell):
    """Run a cell. Return its printed text, and the exception that ended it, or None."""
    with capture_output() as found:
        result = shell.run_cell(cell, store_history=True)
    return found.stdout, result.error_before_exec or result.error_in_exec


def test_what_a_cell_binds_is_there_for_the_next_one_on_each_rank_apart(shell):
    assert run(shell, "%%ranks 3\nx = np.full(2, float(rank))\ndef double(x): return 2 * x") == ("", None)
    text, error = run(shell, "%%ranks 3\nprint(rank, size, group.all_reduce(double(x), 'sum'))")
    assert error is None and text.splitlines() == [f"rank {i} | {i} 3 [6. 6.]" for i in range(3)]
    run(shell, "%%ranks 3\ny = x + 1")
    np.testing.assert_array_equal(shell.ev("ranks['y']"), [[1, 1], [2, 2], [3, 3]])


def test_on_gpus_a_cell_computes_with_their_arrays(ranks):
    """Before and after it they are on the host; collectives go by NCCL, and their results are those on cores."""
    found = ranks.run(2, cells_on_gpus)
    for own, given, y, dx in found:
        assert own == given == [1.0, 1.0, 1.0]
        whole_y, whole_dx, _ = one_block.in_one_process(*one_block.inputs())
        assert type(y) is type(dx) is np.ndarray
        assert one_block.off(y, whole_y) < 1e-12 and one_block.off(dx, whole_dx) < 1e-12


def cells_on_gpus(group):
    """Return what two cells have computed: a sum, and a block of the walkthroughs."""
    cell.set_variable(group, "given", {"x": [np.full(3, float(group.rank))]})
    cell.run_cell(group, "from shardlab.demos.one_block import inputs\nx, dy = inputs()", "In [1]")
    with fake_cuda(gpus=1, nccl=23007) as cupy:
        cell.run_cell(group, SUM, "In [2]", "cuda")
        assert cell.NAMES["library"] is cupy and cell.NAMES["kind"] is SpyArray and cell.NAMES["np"] is np
        block = Group(group.comm, "world", Instruments())
        cell.run_cell(block, BLOCK, "In [3]", "cuda")
        assert cupy.cuda.nccl.begun == 2 and cupy.cuda.nccl.alive == 0
        assert block.ledger.calls(operation="all_reduce") == 4
    names = cell.NAMES
    return names["own"].tolist(), names["given"]["x"][0].tolist(), names["y"], names["dx"]


SUM = """
own, = given["x"]
group.all_reduce(own, "sum")
kind, library = type(own), np
"""
BLOCK = """
from mpi_impl.comm.regions import TensorParallelRegion
from shardlab.demos.one_block import shard, through
y, cache, dx, grads = through(TensorParallelRegion(group), shard(group), x, dy)
"""


def test_a_value_travels_the_other_way(shell):
    run(shell, "ranks['given'] = {'a': [1, 2]}")
    text, _ = run(shell, "%%ranks 4\ngiven['a']")
    assert text == "all 4 ranks | [1, 2]\n"


def test_the_last_line_is_shown_if_it_has_a_value(shell):
    assert run(shell, "%%ranks 2\nrank + 1")[0] == "rank 0 | 1\nrank 1 | 2\n"
    assert run(shell, "%%ranks 2\nNone")[0] == ""
    assert run(shell, "%%ranks 2\nz = 3")[0] == ""


def test_a_failing_rank_is_shown_with_its_line_and_where_the_others_wait(shell):
    run(shell, "%%ranks 3\nkept = 1")
    text, error = run(shell, "%%ranks 3\nif rank == 1:\n    1 / 0\ngroup.all_reduce(np.ones(1), 'sum')")
    assert isinstance(error, CellFailed)
    said = str(error)
    assert said.index("--- rank 1: raised") < said.index("--- ranks 0, 2: stuck")
    assert "line 3, in <module>\n    1 / 0" in said and "ZeroDivisionError" in said
    assert "line 4, in <module>\n    group.all_reduce" in said and "run the cells above again" in said
    assert "run_cell" not in said and "/mpi_impl" not in said, "a frame or a path that is no business of the reader"
    assert "rank_environment" not in text
    assert "NameError" in str(run(shell, "%%ranks 3\nkept")[1])


@pytest.mark.parametrize("cell", ["%%ranks 1\nx = 1\ndef f(:", "\n \n%%ranks 1\n1 / 0"])
def test_an_error_names_its_cell_and_line_as_the_reader_sees_them(shell, cell):
    """The cell by the number before it; lines counted from the cell's first, empty ones included."""
    with capture_output():
        result = shell.run_cell(cell, store_history=True)
    assert f'File "In [{result.execution_count}]", line {cell.count(chr(10)) + 1}' in str(result.error_in_exec)


@pytest.fixture
def interruptible():
    """Listen to SIGINT, as a kernel does: tests that run in the background inherit that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_shows_where_each_rank_was(shell, interruptible):
    """Rank 0 sends it, and computes without end. Rank 1 waits for it."""
    shell.push({"caller": os.getpid()})
    run(shell, "ranks['caller'] = caller")
    text, error = run(shell, "%%ranks 2\nimport os, signal, time\nif rank == 0:\n"
                             "    time.sleep(1); os.kill(caller, signal.SIGINT)\n"
                             "    while True: pass\ngroup.all_reduce(np.ones(1), 'sum')")
    said = str(error)
    assert isinstance(error, KeyboardInterrupt) and error._render_traceback_() == said.splitlines()
    assert said.startswith("You interrupted the cell while it was running on 2 ranks.\n\n--- rank 0: interrupted\n")
    assert "line 5, in <module>\n    while True: pass\n" in said and "line 6, in <module>\n    group.all_reduce" in said
    assert "run the cells above again" in said and "pool" not in said and "/mpi_impl" not in said
    assert run(shell, "%%ranks 2\nrank + 1")[0] == "rank 0 | 1\nrank 1 | 2\n", "new ranks start"


def test_if_all_ranks_raise_they_stay_up(shell):
    run(shell, "%%ranks 2\nkept = rank")
    assert "--- ranks 0, 1: raised" in str(run(shell, "%%ranks 2\nraise ValueError('no')")[1])
    assert run(shell, "%%ranks 2\nkept, group.all_reduce(np.ones(1), 'sum')[0] == 2")[1] is None


def test_a_hang_ends_by_itself(shell):
    _, error = run(shell, "%%ranks 2 --timeout 0.5\nif rank == 0:\n    group.all_reduce(np.ones(1), 'sum')")
    assert "time limit of 0.5 s" in str(error) and "--- rank 0: stuck" in str(error)


@pytest.mark.parametrize("cell, sentence", [
    ("%%ranks\nx", "Write `%%ranks 4`"), ("%%ranks 0\nx", "cannot use '0'"),
    ("%%ranks 2 --timeout=--\nx", "cannot use"), ("%%ranks 2 --timeout 1e10\nx", "cannot wait"),
    ("%%ranks 9\nx", "`ranks.restart(9)`"), ("%%ranks 2\ndef f(\n", "was never closed"),
    ("ranks['nothing']", "there is no 'nothing'"), ("ranks['double'] = lambda x: x", "cannot travel")])
def test_a_mistake_is_reported_in_a_sentence(shell, cell, sentence):
    _, error = run(shell, cell)
    assert isinstance(error, CellFailed) and sentence in str(error)
    assert error._render_traceback_() == str(error).splitlines(), "the notebook shows no more than the sentence"


def test_a_value_that_cannot_leave_a_rank_is_reported(shell):
    run(shell, "%%ranks 2\nf = lambda: 1")
    assert "'f' cannot leave the rank" in str(run(shell, "ranks['f']")[1])


def test_restart_starts_as_many_new_ranks_as_asked(shell):
    run(shell, "%%ranks 2\nkept = 1")
    run(shell, "ranks.restart()")
    assert "NameError" in str(run(shell, "%%ranks 2\nkept")[1])
    assert Ranks(3).size == 3


def test_identical_output_is_shown_once_and_with_the_numbers_of_its_ranks(capsys):
    show(["a\nb\n", "c\n", "a\nb\n", ""])
    assert capsys.readouterr().out.splitlines() == ["ranks 0, 2 | a", "           | b", "    rank 1 | c"]
    assert [lead(ranks, 8) for ranks in ([3], [0, 1, 2, 5], list(range(8)))] == ["rank 3", "ranks 0-2, 5",
                                                                                 "all 8 ranks"]
    assert lead([0], 1) == "rank 0" and parse_line("4 --timeout 2.5") == (4, 2.5, "cpu")
