"""Bugs in a parallel GPT of PyTorch: `shardlab compare` names the first tensor that each makes wrong."""
import sys
from importlib import import_module
from pathlib import Path

import pytest

from reference.errors import UserError
from shardlab.compare.their_runs import read_run
from shardlab.compare.their_runs.differences import Comparison
from tests.torch_programs import TorchPrograms
from tests.zoo import BY_NAME

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PROGRAM = (BENCHMARKS / "contenders" / "parallel_gpt.py").read_text()
sys.path.append(str(BENCHMARKS))
torch_bugs = import_module("torch_bugs")
BUGS = {bug.name: bug for bug in torch_bugs.BUGS}
RIGHT = torch_bugs.TorchBug("right", "", "", torch_bugs.Layout(), "", "", "")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return a function that compares a run of the program with one rank's run without a bug."""
    programs = TorchPrograms(tmp_path_factory.mktemp("runs"))

    def record(layout, bug):
        name = bug.name.replace(" ", "_")
        (programs.folder / f"{name}.py").write_text(PROGRAM.replace(bug.right, bug.wrong))
        return read_run(programs.run(name, layout.ranks, *map(str, layout[:3]), *layout.options))

    def compare(layout, bug):
        alone = torch_bugs.Layout(options=tuple(option for option in layout.options if option in torch_bugs.CLIP))
        return Comparison(record(alone, RIGHT), record(layout, bug)).findings()

    return compare


def test_every_bug_can_be_planted_and_is_the_zoos_where_it_says_so():
    for bug in torch_bugs.BUGS:
        assert PROGRAM.count(bug.right) == 1, bug.name
        compile(PROGRAM.replace(bug.right, bug.wrong), bug.name, "exec")
        assert bug.name in BY_NAME if "zoo" in bug.source else bug.name not in BY_NAME, bug.name
    assert len(BUGS) == len(torch_bugs.BUGS)


@pytest.mark.deep
@pytest.mark.parametrize("layout", torch_bugs.CONTROLS, ids=str)
def test_a_program_without_a_bug_agrees_however_it_is_divided(found, layout):
    findings = found(layout, RIGHT)
    assert not findings.differences and findings.worst.relative < 1e-12, findings


@pytest.mark.deep
@pytest.mark.parametrize("name", BUGS)
def test_the_first_tensor_that_is_wrong_is_named(found, name):
    """A tensor of another shape is named by the error that ends the comparison."""
    bug = BUGS[name]
    try:
        assert str(found(bug.layout, bug).differences[0].key) == bug.place
    except UserError as error:
        assert str(error).startswith(bug.place)
