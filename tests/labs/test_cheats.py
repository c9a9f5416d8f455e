"""Answers that look for other ranks' data, in place of sending it, have no marks."""
import os

import numpy as np
import pytest

from grading import checks
from grading.lab_group import OPERATIONS
from grading.sandbox import Each, Sandbox
from tests.labs import cheats
from tests.labs.hostile import SUBMISSIONS
from tests.labs.submissions import LAB1, LAB4, lost_checks, marks_in_a_notebook, marks_of

FAST = "one wrong line, on which others build"      # it stands for the rest
ENDLESS = ("loops", "sleeps", "recurses", "from open files")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == FAST else [pytest.mark.deep])
                                  for name in SUBMISSIONS])
def test_a_wrong_or_hostile_submission_gets_what_it_should(name, monkeypatch):
    """Some send thousands of messages, so they need time on a busy machine."""
    monkeypatch.setattr(checks, "LIMIT", 2.0 if name in ENDLESS else 60.0)
    found = SUBMISSIONS[name].marks()
    assert not SUBMISSIONS[name].fault(found)


COUNTED = {LAB1: {"check_pass_on", "check_all_gather_cost", "check_reduce_scatter_cost", "check_all_reduce_cost",
                  "check_in_order_cost"},
           LAB4: {"check_log_sum_exp", "check_predict", "check_cost", "check_mean"}}


@pytest.mark.parametrize("lab, answers, unclear", [
    (LAB1, cheats.LAB1_FROM_SEED, set()),
    (LAB4, cheats.LAB4_FROM_SEED, {"check_extreme"})])      # a rank without words has no clue
def test_numbers_drawn_again_from_the_public_seed_are_right_in_a_notebook_but_for_the_count(lab, answers, unclear):
    """There they pass all checks that do not count messages. In grading they pass none."""
    found = marks_in_a_notebook(lab, hidden=True, **answers)
    assert lost_checks(found) == COUNTED[lab] | unclear
    assert any("it cannot be done with less than" in found[check].said for check in COUNTED[lab])
    found = marks_of(lab, **answers)
    assert lost_checks(found) == set(found)


MEMORY = """
def spy(group, text, array):
    '''The ranks whose secret is somewhere in the memory of this process.'''
    import re
    words = "knar fo terces eht"[::-1].encode()     # backwards, so that this code itself is not found
    found = set()
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            first, end = (int(address, 16) for address in line.split()[0].split("-"))
            if line.split()[1].startswith("rw"):
                memory.seek(first)
                while first < end and (data := memory.read(min(end - first, 1 << 24))):
                    found |= {int(rank) for rank in re.findall(words + rb" (\\d+);", data)}
                    first += len(data)
    return sorted(found)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="only Linux shows a process its memory")
def test_no_other_ranks_arguments_are_anywhere_in_the_memory_of_an_answers_process():
    """Neither those of this run nor those of earlier ones. (That its own are found shows that it looks well.)"""
    sandbox = Sandbox("tests.labs.unlimited_rank")
    try:
        for run in (0, 10):
            texts = [f"the secret of rank {run + rank};" for rank in range(2)]
            arrays = [np.frombuffer(text.encode(), "u1") for text in texts]
            found = sandbox.run({"spy": MEMORY}, "spy", (Each(texts), Each(arrays)), 2, OPERATIONS, 20.0).results
            for rank, secrets in enumerate(found):
                assert run + rank in secrets and all(secret % 10 == rank for secret in secrets), found
    finally:
        sandbox.close()
