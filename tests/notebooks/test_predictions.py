"""Predictions: a reader commits to a number before a cell shows it, in JupyterLab and on the site."""
from math import nan

import jupytext
import pytest

from reference.errors import UserError
from shardlab.notebook.predictions import compare
from tools.notebooks import ANSWER, sources


def is_guess(source: str) -> bool:
    return source.startswith("guess = ...")


@pytest.mark.parametrize("source", sources([]), ids=lambda path: path.stem)
def test_a_number_is_asked_for_before_it_is_shown(source):
    """Each walkthrough asks, twice or more; from the guess to what was measured, outputs are answers."""
    cells = jupytext.read(source).cells
    guesses = [i for i, cell in enumerate(cells) if is_guess(cell.source)]
    assert len(guesses) >= 2
    for i in guesses:
        assert "**Predict.**" in cells[i - 1].source and cells[i].source.count("\n") == 0
        shown = next(j for j in range(i + 1, len(cells)) if "reveal(guess, " in cells[j].source)
        code = [cell for cell in cells[i + 1:shown + 1] if cell.cell_type == "code"]
        assert not any(is_guess(cell.source) for cell in code)
        assert all(ANSWER in cell.metadata.get("tags", []) for cell in code)


@pytest.mark.parametrize("guess, measured, line", [
    (..., 768, "measured: 768 bytes"), (768, 768, "measured: 768 bytes; predicted: exactly that"),
    (1000, 1234.56, "measured: 1,235 bytes; predicted: 1,000, 0.81 times as much"),
    (nan, 0, "measured: 0 bytes; predicted: nan")])
def test_a_guess_stands_beside_what_was_measured(guess, measured, line):
    assert compare(guess, measured, "bytes") == line


def test_indexes_have_no_ratio():
    assert compare(9, 10, "is the step", index=True) == "measured: 10 is the step; predicted: 9"


@pytest.mark.parametrize("guess", ["12", True])
def test_a_guess_that_is_not_a_number_gets_a_sentence(guess):
    with pytest.raises(UserError, match="not a number"):
        compare(guess, 12, "bytes")
