"""Mutation testing plants mistakes, on ranks too, and reports those that no test sees."""
import shutil

import pytest

from tests.launching import ROOT
from tools.mutants.__main__ import equivalents, latest, report, work
from tools.mutants.operators import mutants


def test_equivalent_mutants_are_mutants_of_today_with_a_reason():
    files = {name.split(" | ")[0] for name in equivalents()}
    everything = {mutant.name for file in files for mutant in mutants(file)}
    assert files and [name for name in equivalents() if name not in everything] == []
    assert all(reason and " -> " not in reason for reason in equivalents().values())


VICTIM = "mpi_impl/layers/mlp.py"
SMALL = """
from reference.config import ModelConfig
from tests.cases import Case
from tests.rank_theorems import mlp_equals_whole


def test_on_ranks(ranks):
    ranks.run(2, mlp_equals_whole, Case(2, ModelConfig(1, 8, 2, 10, 4), 2, 4, seed=1))
"""


@pytest.fixture
def small_test(tmp_path):
    """Write a file with one test on two ranks, beside the fixtures that it needs."""
    shutil.copy(ROOT / "conftest.py", tmp_path)
    path = tmp_path / "test_small.py"
    path.write_text(SMALL)
    return str(path)


def of(operator: str, start: str):
    return next(mutant for mutant in mutants(VICTIM) if mutant.operator == operator and mutant.before.startswith(start))


@pytest.mark.deep
def test_survivors_are_reported_and_results_are_kept(small_test, tmp_path):
    """A dropped communication dies on the ranks; what is kept of two names for one array does not."""
    dies = of("drop communication", "y = region.leave")
    lives = next(mutant for mutant in mutants(VICTIM) if "region.keep(entered, x)" in mutant.after)
    unseen = next(iter(mutants("mpi_impl/layers/embedding.py")))
    chosen = [dies, lives, unseen]
    work(chosen, tmp_path, [small_test], minutes=2, budget=20)
    found = latest(tmp_path, chosen)
    assert [found[mutant.name]["result"] for mutant in chosen] == ["killed", "survived", "not run"]
    text = report(chosen, found)
    assert f"{VICTIM}:{lives.line}  survived, swap arguments\n    {lives.before}\n    {lives.after}" in text
    assert "drop communication" not in text and "33.3 %" in text.split("\n\n")[0]
