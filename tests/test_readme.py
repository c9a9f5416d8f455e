"""What the READMEs and CONTRIBUTING.md name is there."""
import re
from functools import partial
from pathlib import Path

import pytest

import mpi_impl.evaluation.options as evaluation
import mpi_impl.generation.options as generation
from mpi_impl import plan
from mpi_impl.experiments import layer_norm_order
from mpi_impl.training.options import parser

ROOT = Path(__file__).parent.parent
TEXTS = {name: (ROOT / name).read_text()
         for name in ("README.md", "CONTRIBUTING.md", "docs/several_hosts.md", "notebooks/README.md",
                      "notebooks/labs/README.md")}


@pytest.mark.parametrize("name", TEXTS)
def test_files_that_are_named_exist(name):
    linked = [(ROOT / name).parent / path for path in re.findall(r"\]\(([\w./]+)\)", TEXTS[name])]
    quoted = re.findall(r"`((?:reference|mpi_impl|grading|notebooks|tests|docs|tools)/[\w./]*)`", TEXTS[name])
    assert linked or quoted
    planned = {"reference/layers/gated_mlp.py", "mpi_impl/layers/gated_mlp.py",     # CONTRIBUTING's example,
               "notebooks/labs/lab8_name.py"}                                       # and the guide's
    missing = [path for path in linked + [ROOT / path for path in quoted if path not in planned] if not path.exists()]
    assert not missing


PROSE = [ROOT / name for name in (*TEXTS, "benchmarks/README.md")] + sorted(ROOT.glob("notebooks/**/*.py"))


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_does_not_count_tests(path):
    """How many there are depends on the day, and how many are skipped on the machine."""
    assert not re.search(r"\d (passed|failed|(unit )?tests?|theorems)\b", path.read_text())


def test_the_picture_is_the_one_its_script_draws(tmp_path):
    """docs/mlp_split.svg is not older than docs/mlp_split.py: every word of the script's labels is in it."""
    svg = (ROOT / "docs/mlp_split.svg").read_text()
    for label in ("cut by columns", "cut by rows", "forward: all-reduce", "backward: all-reduce", "rank 1"):
        assert f"<!-- {label} -->" in svg


PARSERS = {"pretrain_gpt": parser, "pretrain_bert": partial(parser, "bert"), "generate": generation.parser,
           "evaluate": evaluation.parser, "plan": plan.parser,
           "experiments.layer_norm_order": layer_norm_order.parser}


@pytest.mark.parametrize("program", PARSERS)
def test_options_that_are_named_exist(program):
    """Every --option in a fenced block of the README that starts the program."""
    found = []
    for block in re.findall(r"```\n(.*?)```", TEXTS["README.md"], re.DOTALL):
        for command in block.replace("\\\n", " ").splitlines():
            if f"-m mpi_impl.{program}" in command:
                found.append(command.split(program)[1])
    assert found
    for words in found:
        task = [re.search(r"--task (\w+)", words)[1]] if program == "evaluate" else []
        options = {option for action in PARSERS[program](*task)._actions for option in action.option_strings}
        assert set(re.findall(r"--[\w-]+", words)) <= options
