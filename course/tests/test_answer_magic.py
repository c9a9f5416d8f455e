"""`%%answer` in a notebook: it notes a cell, and errors name the line that students see."""
import re

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from course.grading.answers import CURRENT


@pytest.fixture
def shell():
    """Return a notebook's shell with the magic loaded, whose first two cells have run."""
    shell = InteractiveShell(colors="nocolor")
    shell.run_cell("%load_ext course.grading", store_history=True)
    shell.run_cell("x = 1", store_history=True)
    yield shell
    CURRENT.clear()


def run(shell, cell: str) -> str:
    with capture_output() as found:
        shell.run_cell(cell, store_history=True)
    return found.stdout


def names(said: str, cell: int, line: int) -> bool:
    """Report whether an error names this place. (JupyterLab writes 'Cell In[3], line 4' for it.)"""
    return re.search(rf'<ipython-input-{cell}-\w+>("|:)(, line )?{line}\b', said) is not None


def test_the_magic_runs_a_cell_and_notes_it(shell):
    run(shell, "%%answer one\nx = 3")
    assert shell.user_ns["x"] == 3 and CURRENT == {"one": "\nx = 3\n"}
    assert "needs the name of the task" in run(shell, "%%answer 1+1\nx = 4") and "x = 3" in CURRENT["one"]


@pytest.mark.parametrize("above, wrong", [("", "def f(:"), ("\n  \n\n", "1 / 0")])
def test_an_error_names_its_cell_and_line_and_is_shown_once(shell, above, wrong):
    said = run(shell, f"{above}%%answer f\ny = 2\n{wrong}")
    assert names(said, cell=3, line=above.count("\n") + 3) and said.count("Error: ") == 1
    assert said.endswith("The answer f has failed: see the error above.\n") and wrong in CURRENT["f"]
    assert names(run(shell, "1 / 0"), cell=4, line=1), "the next cell is the fourth"


def test_an_error_of_a_called_answer_names_the_cell_that_defined_it(shell):
    run(shell, "\n\n%%answer f\ndef f():\n    return 1 / 0")
    said = run(shell, "f()")
    assert names(said, cell=4, line=1) and names(said, cell=3, line=5)
    assert CURRENT["f"].splitlines()[4] == "    return 1 / 0", "ranks count in the same way"
