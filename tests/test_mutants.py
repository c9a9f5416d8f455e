"""Mutation testing makes the mistakes that it says it makes, on ranks too, and reports those that no test sees."""
import ast
import shutil
import textwrap

import pytest

from tools.mutants.__main__ import equivalents, latest, report, work
from tools.mutants.operators import OPERATORS, ROOT, mutants, mutated

MISTAKES = [
    ("drop call", "gradients.flush()", "pass"),
    ("drop call", "y = sorted(x)", "y = x"),
    ("drop cast", "y = x.astype(f)", "y = x"),
    ("drop communication", "y = group.all_reduce(x, 'sum')", "y = x"),
    ("drop communication", "y = region.leave(a + b, 'sum')", "y = (a + b)"),
    ("alias", "y = x.copy()", "y = x"),
    ("alias", "y = np.array(x)", "y = x"),
    ("alias", "x[...] = y", "x = y"),
    ("alias", "x += y * z", "x = x + (y * z)"),
    ("swap arguments", "y = linear(x, w, b)", "y = linear(w, x, b)"),
    ("swap operands", "y = a - b", "y = (b - a)"),
    ("swap operands", "y = a @ b", "y = (b @ a)"),
    ("rescale", "y = (a + b) / t", "y = (a + b)"),
    ("rescale", "y = a * b", "y = a"),
    ("sign", "y = a + b", "y = (a - b)"),
    ("sign", "y = -a", "y = a"),
    ("group", "y = topology.tensor", "y = topology.data"),
    ("group", "y = self.topology.world.rank", "y = self.topology.model.rank"),
    ("axis", "y = x.sum(axis=-1)", "y = x.sum(axis=-2)"),
    ("axis", "y = np.split(x, n, 2)", "y = np.split(x, n, 1)"),
    ("off by one", "y = x[a:b]", "y = x[a:b + 1]"),
    ("off by one", "y = range(n)", "y = range(n - 1)"),
    ("off by one", "y = x[0]", "y = x[1]"),
    ("wait too late", "sent.wait()\nx[0] = 1", "x[0] = 1\nsent.wait()"),
    ("comparison", "y = a < b", "y = a <= b"),
    ("comparison", "y = max(a, b)", "y = min(a, b)"),
    ("condition", "y = a if b else c", "y = a if not b else c"),
    ("condition", "y = a and b", "y = (a or b)"),
    ("constant", "y = 0.5", "y = 1.0"),
    ("constant", "y = True", "y = False"),
    ("+= to =", "x[0] += y", "x[0] = y"),
    ("drop update", "x[0] = y", "pass"),
]


def function_with(body: str) -> str:
    return "def f():\n    'Say nothing.'\n" + textwrap.indent(body, "    ") + "\n    return 7\n"


@pytest.mark.parametrize("operator, right, wrong", MISTAKES)
def test_an_operator_makes_the_mistake_of_its_name(operator, right, wrong):
    source = function_with(right)
    made = [mutated(mutant, source) for mutant in mutants("f.py", source) if mutant.operator == operator]
    assert ast.dump(ast.parse(function_with(wrong))) in [ast.dump(ast.parse(text)) for text in made]


def test_every_operator_is_shown_above():
    source = "\n".join((ROOT / path).read_text() for path in ("mpi_impl/parallel/zero.py", "reference/ops.py"))
    assert {mutant.operator for mutant in mutants("f.py", source)} <= {operator for operator, _, _ in MISTAKES}
    assert all(operators for operators in OPERATORS.values())


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
