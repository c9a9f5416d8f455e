"""Answers that look for other ranks' data, in place of sending it, have no marks; a search lists who looks around."""
import os
from contextlib import closing

import nbformat
import pytest

from course.grading import checks
from course.grading.answers import answers_of
from course.grading.grade import grade
from course.grading.sandbox import Sandbox
from course.grading.search import WORDS, main, search
from course.tests import cheats
from course.tests.hostile import SUBMISSIONS
from course.tests.notebooks import answer_cell, cell, check_cell, notebook
from course.tests.submissions import LAB1, LAB_NAMES, checks_of, lost_checks, marks_in_a_notebook, marks_of, solution
from reference.errors import UserError

FAST = "one wrong line, on which others build"      # it stands for the rest


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == FAST else [pytest.mark.deep])
                                  for name in SUBMISSIONS])
def test_a_wrong_or_hostile_submission_gets_what_it_should(name, monkeypatch):
    """Some send thousands of messages, so they need time on a busy machine."""
    monkeypatch.setattr(checks, "LIMIT", 60.0)
    assert not SUBMISSIONS[name].fault(SUBMISSIONS[name].marks())


def test_numbers_drawn_again_from_the_public_seed_are_right_in_a_notebook_but_for_the_count():
    """There they pass all checks that do not count messages. In grading they pass none."""
    found = marks_in_a_notebook(LAB1, hidden=True, **cheats.LAB1_FROM_SEED)
    assert lost_checks(found) == checks_of("pass_on all_gather_cost reduce_scatter_cost all_reduce_cost in_order_cost")
    assert any("it cannot be done with less than" in mark.said for mark in found.values())
    found = marks_of(LAB1, **cheats.LAB1_FROM_SEED)
    assert lost_checks(found) == set(found)


SPY = """
def spy(group, text, array):
    '''The numbers of the secrets that are somewhere in the memory of this process.'''
    import re
    words = "rebmun terces eht"[::-1].encode()      # backwards, so that this code itself is not found
    found = set()
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            first, end = (int(address, 16) for address in line.split()[0].split("-"))
            if line.split()[1].startswith("rw"):
                memory.seek(first)
                while first < end and (data := memory.read(min(end - first, 1 << 24))):
                    found |= {int(number) for number in re.findall(words + rb" (\\d+);", data)}
                    first += len(data)
    return sorted(found)
"""
CHECK = """
# The secret number 7; of a hidden test
import numpy as np
from course.grading import each, expect, run

for turn in (10, 20):
    texts = [f"the secret number {turn + rank};" for rank in range(2)]
    found = run(2, "spy", each(texts), each([np.frombuffer(text.encode(), "u1") for text in texts]), limit=20.0).results
    for rank, secrets in enumerate(found):
        expect(turn + rank in secrets and all(secret % 10 == rank and secret >= 10 for secret in secrets), str(found))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="only Linux shows a process its memory")
def test_no_secret_is_anywhere_in_the_memory_of_an_answers_process(monkeypatch):
    """Neither the check's text, nor the seed, nor other ranks' arguments of this run or an earlier one. (That its own
    are found shows that it looks well.)"""
    source = notebook(answer_cell("spy", SPY), check_cell("check", CHECK))
    with closing(Sandbox("course.tests.unlimited_rank")) as sandbox:
        monkeypatch.setattr(checks, "SANDBOX", sandbox)
        mark, = grade(source, source, "the secret number 8;")
    assert mark.points == 5, mark.said


# ---- who looks around ----

@pytest.mark.parametrize("lab", LAB_NAMES)
def test_no_solution_is_suspicious(lab):
    assert [WORDS.findall(source) for source in answers_of(solution(lab)).values() if WORDS.search(source)] == []


@pytest.mark.parametrize("text", [
    cheats.FRAMES, cheats.KEPT, "import gc", "open('/proc/self/mem')", "group._ask", "getattr(f, '__closure__')",
], ids=lambda text: text[-30:])
def test_who_looks_around_is_found(text):
    assert WORDS.search(text)


def test_the_file_the_task_and_the_line_are_listed_of_answer_cells_only(tmp_path, capsys, monkeypatch):
    (tmp_path / "17").mkdir()
    mine = notebook(cell("locked", "tools", "import gc"), answer_cell("one", "\nx = sys._getframe(1).f_back"),
                    answer_cell("two", "framework = gcd(4, 2)"))
    mine.cells.append(nbformat.v4.new_code_cell("sys._getframe()"))
    (tmp_path / "17" / "lab.ipynb").write_text(nbformat.writes(mine))
    (tmp_path / "broken.ipynb").write_text("{")
    monkeypatch.setattr("sys.argv", ["course.grading.search", str(tmp_path)])
    main()
    listed, broken = capsys.readouterr().out.splitlines()
    assert listed == f"{tmp_path}/17/lab.ipynb: one, line 3: _getframe, f_back" and "broken.ipynb is not" in broken
    with pytest.raises(UserError, match="is not there"):
        list(search(tmp_path / "none"))
