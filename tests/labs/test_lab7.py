"""Lab 7: each mistake loses the right points, with a message that explains it."""
import pytest

from tests.deep import one_fast_of
from tests.labs.submissions import assert_loses, lost_checks, marks_of, solution

LAB = "lab7_debugging"

MISTAKES = {
    "one rank proves nothing": (
        "diagnose_columns", '"ranks": 2', '"ranks": 1', {"check_diagnose_columns"}, "the broken function is right"),
    "another rule (hidden)": (
        "diagnose_columns", '["conjugate"]', '["once"]', {"check_diagnose_columns"}, "not what this function breaks"),
    "the weight's gradient summed, too": (
        "columns", "x.T @ dy\n", "group.all_reduce(x.T @ dy)\n", {"check_columns"}, "to dw of a column"),
    "a blind gradient that sees": (
        "diagnose_gathered", "np.ones((2, 4))", "random.normal(size=(2, 4))", {"check_diagnose_gathered"},
        "With your blind dy the broken function is wrong"),
    "a blind gradient of zeros": (
        "diagnose_gathered", "np.ones((2, 4))", "np.zeros((2, 4))", {"check_diagnose_gathered"}, "without zeros"),
    "the rank times its own columns (hidden)": (
        "gathered", "np.array_split(dy, group.size, axis=1)[group.rank]",
        "dy[:, group.rank * w.shape[1]:][:, :w.shape[1]]", {"check_gathered"}, "one more than it has"),
    "a vocabulary that divides": (
        "diagnose_lookup", "size=(3, 2)),\n            \"dy\"", "size=(4, 2)),\n            \"dy\"",
        {"check_diagnose_lookup"}, "the broken function is right"),
    "as if it were padded (hidden)": (
        "lookup", "group.rank * (V // group.size) + min(group.rank, V % group.size)",
        "group.rank * -(-V // group.size)", {"check_lookup"}, "the ranks before this one"),
    "no maximum at all (hidden)": (
        "loss", 'shifted = logits - group.all_reduce(logits.max(axis=1), op="max")[:, None]', "shifted = logits",
        {"check_loss"}, "the largest logit"),
    "no samples, no all-reduce (hidden)": (
        "average", "return [", "if samples == 0:\n        return [gradient]\n    return [", {"check_average"},
        "which needs all ranks"),
}


@pytest.mark.parametrize("mistake", one_fast_of(len(MISTAKES), MISTAKES))
def test_a_mistake_loses_its_points(mistake):
    assert_loses(LAB, mistake, *MISTAKES[mistake])


def test_all_logits_gathered_are_right_but_too_dear():
    found = marks_of(LAB, loss="""
import numpy as np
def loss(group, logits, targets, dloss, first):
    z = group.all_gather(logits, axis=1)
    e = np.exp(z - z.max(1, keepdims=True))
    p = e / e.sum(1, keepdims=True)
    at = np.arange(len(z)), targets
    grad = p.copy()
    grad[at] -= 1
    return (np.log(e.sum(1)) - (z - z.max(1, keepdims=True))[at],
            (dloss[:, None] * grad)[:, first:first + logits.shape[1]])
""")
    assert lost_checks(found) == {"check_loss"} and "are enough" in found["check_loss"].said


def test_the_broken_functions_are_no_answers():
    """Each of them, handed in as it is, loses the points of its repair, and those alone."""
    names: dict = {}
    for cell in solution(LAB).cells:
        if "broken_" in cell.metadata.get("nbgrader", {}).get("grade_id", ""):
            exec(cell.source, names)
    broken = {name: names[f"BROKEN_{name.upper()}"] for name in ("columns", "gathered", "lookup", "loss")}
    assert lost_checks(marks_of(LAB, **broken)) == {f"check_{name}" for name in broken}


KINDS = {"diagnose_columns": ("3", "expected a dict"), "loss": ("(None, None)", "None"),
         "diagnose_loss": ("{'ranks': 2, 'logits': [1.0], 'targets': 0, 'dloss': 0, 'breaks': ['weights']}", "2 axes"),
         "diagnose_lookup": ("{'ranks': 9, 'ids': 0, 'table': 0, 'dy': 0, 'breaks': []}", "from 1 to 8"),
         "columns": ("x", "expected y, dx, dw")}


def test_a_result_of_the_wrong_kind_is_reported():
    found = marks_of(LAB, **{answer: f"def {answer}(group=0, x=0, *args):\n    return {value}\n"
                             for answer, (value, _) in KINDS.items()})
    for answer, (_, words) in KINDS.items():
        assert f"check_{answer}" in lost_checks(found) and words in found[f"check_{answer}"].said
