"""Answers that look for other ranks' data, in place of sending it, have no marks."""
import os

import numpy as np
import pytest

from grading.lab_group import OPERATIONS
from grading.sandbox import Each, Sandbox
from tests.labs import cheats
from tests.labs.submissions import lost_checks, marks_in_a_notebook, marks_of

LAB1, LAB4 = "lab1_collectives", "lab4_smoothed_cross_entropy"


@pytest.mark.parametrize("lab, answers", [(LAB1, cheats.LAB1_FROM_FRAMES), (LAB4, cheats.LAB4_FROM_FRAMES)])
def test_frames_hold_no_other_ranks_arguments(lab, answers):
    found = marks_of(lab, **answers)
    assert lost_checks(found) == set(found)


@pytest.mark.parametrize("lab, answers, unclear", [
    (LAB1, cheats.LAB1_FROM_SEED, set()),
    (LAB4, cheats.LAB4_FROM_SEED, {"check_predict", "check_extreme"})])     # a rank without words has no clue
def test_numbers_drawn_again_from_the_public_seed_have_marks_in_a_notebook_and_none_in_grading(lab, answers, unclear):
    assert lost_checks(marks_in_a_notebook(lab, hidden=True, **answers)) == unclear
    found = marks_of(lab, **answers)
    assert lost_checks(found) == set(found)


@pytest.mark.parametrize("lab, answers, dear", [
    (LAB1, cheats.LAB1_KEPT, {"check_reduce_scatter_cost", "check_all_reduce_cost"}),
    (LAB4, cheats.LAB4_KEPT, {"check_cost"})])
def test_results_kept_from_one_run_save_nothing_in_another(lab, answers, dear):
    """They are right, so the other checks pass."""
    found = marks_of(lab, **answers)
    assert lost_checks(found) == dear and all("has sent" in found[check].said for check in dear)


def test_an_answer_cannot_change_what_a_given_function_does():
    found = marks_of("lab7_debugging", **cheats.LAB7_CHANGED_PROGRAM)["check_diagnose_columns"]
    assert found.points == 0 and "With your inputs the broken function is right" in found.said


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
    sandbox = Sandbox(2)
    sandbox.pool.program = "tests.labs.unlimited_rank"
    try:
        for run in (0, 10):
            texts = [f"the secret of rank {run + rank};" for rank in range(2)]
            arrays = [np.frombuffer(text.encode(), "u1") for text in texts]
            found = sandbox.run({"spy": MEMORY}, "spy", (Each(texts), Each(arrays)), 2, OPERATIONS, 20.0).results
            for rank, secrets in enumerate(found):
                assert run + rank in secrets and all(secret % 10 == rank for secret in secrets), found
    finally:
        sandbox.close()
