"""Lab 8: each mistake loses the right points, with a message that explains it."""
from copy import deepcopy
from functools import cache

import pytest

from tests.deep import one_fast_of
from tests.labs import submissions
from tests.labs.submissions import assert_loses, lost_checks, marks_of, plant, solution

LAB = "lab8_all_of_it"

MISTAKES = {
    "as many replicas as stages (hidden)": (
        "places", "rank // (t * d)", "rank // (t * p)", {"check_places"}, "do all ranks"),
    "whole arrays around the ring": (
        "sum_among", "chunks = [chunk.copy() for chunk in np.array_split(np.asarray(x).reshape(-1), k)]",
        "chunks = None\n    whole = sent = np.array(x)\n    for _ in range(k - 1):\n"
        "        sent = group.exchange(sent, after, before)\n        whole = whole + sent\n    return whole",
        {"check_sum_among_cost"}, "are enough"),
    "f does not sum": (
        "step", 'sum_among(group, da @ shard["A"][l].T, tensor)', 'da @ shard["A"][l].T', {"check_step"}, "missing"),
    "the input's gradient lost beside the layer": (
        "step", "dx = dx + sum_among", "dx = sum_among", {"check_step"}, "the gradient|'A'|'E'"),
    "the mean of a microbatch": (
        "step", "dz /= samples", "dz /= len(z)", {"check_step"}, "gradient"),
    "the loss of the last stage alone": (
        "step", "sum_among(group, parts.pop(), pipeline)[0]", "parts.pop()[0]", {"check_step"}, "the loss|sent"),
    "GPipe's caches": (
        "predict", "min(m, p - stage)", "m", {"check_held"}, "in flight"),
    "the bubble against the useful time": (
        "predict", "(p - 1) / (m + p - 1)", "(p - 1) / m", {"check_bubble"}, "does nothing"),
    "two sums forgotten": (
        "predict", "m * 2 * (L // p) * ring", "m * (L // p) * ring", {"check_sent"}, "what was counted"),
    "one microbatch": ("train", '"m": 4', '"m": 1', {"check_train"}, "larger than a fifth"),
    "the slowest bucket": ("measured", '"chosen": 1024', '"chosen": 16384', {"check_measured"}, "You chose 16384"),
    "one run repeated": ("measured", "[14.55, 4.18, 2.57]", "[3, 3, 3]", {"check_measured"}, "were they measured"),
}

@pytest.fixture
def three_steps(monkeypatch):
    """Train for three steps, in which nobody learns much, since forty take seconds."""
    monkeypatch.setattr(submissions, "solution", shortened)


@cache
def shortened(lab: str):
    """Return the instructor's notebook, with a short training run."""
    notebook = deepcopy(solution(lab))
    tools = next(cell for cell in notebook.cells if "STEPS = 40 " in cell.source)
    tools.source = tools.source.replace("STEPS = 40 ", "STEPS = 3 ").replace("ABOVE = 0.35 ", "ABOVE = 9.0 ")
    return notebook


@pytest.mark.deep
def test_a_run_that_does_not_learn_is_told_the_goal():
    assert_loses(LAB, "a small step", "train", '"learning_rate": 0.3', '"learning_rate": 0.001', {"check_train"},
                 "is the goal")


@pytest.mark.usefixtures("three_steps")
@pytest.mark.parametrize("mistake", one_fast_of(len(MISTAKES), MISTAKES))
def test_a_mistake_loses_its_points(mistake):
    assert_loses(LAB, mistake, *MISTAKES[mistake])


KINDS = {"places": ("7", {"check_places"}, "should return 3 values"),
         "sum_among": ("'a'", {"check_sum_among", "check_sum_among_cost"}, "no array of numbers"),
         "predict": ("[1]", {"check_sent", "check_held", "check_bubble"}, "a dict with sent"),
         "measured": ("{'exposed': {'1024': [1]}, 'chosen': 1024}", {"check_measured"}, "at least five bucket sizes")}


@pytest.mark.usefixtures("three_steps")
@pytest.mark.parametrize("answer", one_fast_of(len(KINDS), KINDS))
def test_a_result_of_the_wrong_kind_is_reported(answer):
    value, checks, words = KINDS[answer]
    found = marks_of(LAB, **{answer: f"def {answer}(*args):\n    return {value}\n"})
    assert checks <= lost_checks(found) and all(words in found[check].said for check in checks)


WASTE = {**plant(LAB, "step", "    names = sorted(grads)\n", "    ranks = t * p * d\n    group.exchange(np.zeros(900), "
                 "(group.rank + 1) % ranks, (group.rank - 1) % ranks)\n    names = sorted(grads)\n"),
         **plant(LAB, "predict", "sent.append(", "sent.append(900 + ")}
FEW = "{2**k: [1.0 + k, 2.0, 3.0] for k in range(0, 14, 2)}"
HOSTILE = {
    "more than is needed, as predicted": (WASTE, {"check_step", "check_sent"}, "are enough"),
    "a loss that nobody has computed": (
        plant(LAB, "step", "return float(loss), {", "return 0.0, {"), {"check_step"}, "the loss is not right"),
    "a rate that is no number": (
        plant(LAB, "train", '"learning_rate": 0.3', '"learning_rate": float("nan")'), {"check_train"},
        "a positive number"),
    "microbatches that are a truth": (plant(LAB, "train", '"m": 4', '"m": True'), {"check_train"}, "a whole number"),
    "a prediction that is no number": (
        plant(LAB, "predict", '"bubble": (p - 1) / (m + p - 1)', '"bubble": float("nan")'), {"check_bubble"},
        "expected"),
    "every size chosen": (
        {"measured": f"def measured():\n    return {{'exposed': {FEW}, 'chosen': [1, 4]}}\n"}, {"check_measured"},
        "one of the sizes"),
    "times that are below zero": (
        plant(LAB, "measured", "[14.55, 4.18, 2.57]", "[-9e9, -1.0, -1.0]"), {"check_measured"},
        "times in milliseconds"),
}


@pytest.mark.usefixtures("three_steps")
@pytest.mark.parametrize("name", one_fast_of(7, HOSTILE))
def test_a_hostile_answer_gets_nothing(name):
    answers, checks, words = HOSTILE[name]
    found = marks_of(LAB, **answers)
    assert lost_checks(found) == checks and all(words in found[check].said for check in checks)
