"""The search for answers that look around: it finds them in answer cells, and nothing in a solution."""
import nbformat
import pytest

from course.grading.answers import answers_of
from course.grading.search import WORDS, main, search
from course.tests import cheats
from course.tests.notebooks import answer_cell, cell, notebook
from course.tests.submissions import LAB_NAMES, solution
from reference.errors import UserError


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
