"""The bugs that benchmarks/their_bugs.py plants in a program of PyTorch, and that the program has none of its own."""
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.zoo import BY_NAME

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
their_bugs, torch_bugs = map(import_module, ("their_bugs", "torch_bugs"))
BUGS = {bug.name: bug for bug in torch_bugs.BUGS}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return recordings that are made when they are asked for."""
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.15.0")
    return their_bugs.Runs(tmp_path_factory.mktemp("runs"))


def test_every_bug_can_be_planted_and_is_the_zoos_where_it_says_so():
    for bug in torch_bugs.BUGS:
        compile(their_bugs.text_with(bug), bug.name, "exec")
        assert bug.name in BY_NAME if "zoo" in bug.source else bug.name not in BY_NAME, bug.name
    assert len(BUGS) == len(torch_bugs.BUGS)


@pytest.mark.deep
@pytest.mark.parametrize("layout", torch_bugs.CONTROLS, ids=str)
def test_a_program_without_a_bug_agrees_however_it_is_divided(runs, layout):
    found = runs.found(layout)
    assert found.place == their_bugs.AGREE and found.relative < 1e-12, found


@pytest.mark.deep
@pytest.mark.parametrize("name", ["g all-reduces backward too", "gathered keys without the reduce-scatter",
                                  "the loss over a rank's own positions, then clipping"])
def test_the_first_tensor_that_is_wrong_is_named(runs, name):
    found = runs.found(BUGS[name].layout, BUGS[name])
    assert found.place == BUGS[name].place
    assert their_bugs.judged(BUGS[name], found) == "yes"
