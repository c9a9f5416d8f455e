"""The walkthroughs: each notebook is what its source says, runs from top to bottom, and shows again what is stored."""
import json
import re

import nbformat
import pytest

from tools.notebooks import (ASKED, FOLDER, answering, execute, from_source, notebook_of, printed_outputs, read_stored,
                             sources)

SOURCES = sources([])
FAST = (3, 5)       # without ranks, and on them; CI runs all


def test_they_are_numbered():
    assert [int(source.stem[:2]) for source in SOURCES] == list(range(1, len(SOURCES) + 1))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_notebook_is_that_of_its_source(source):
    """Cell by cell; and nothing in it tells of the run that made it."""
    mine, theirs = read_stored(source.stem), from_source(source)
    assert [(cell.cell_type, cell.source, cell.id) for cell in mine.cells] == [
        (cell.cell_type, cell.source, cell.id) for cell in theirs.cells], "Run `python tools/notebooks.py`."
    assert mine.metadata == theirs.metadata and not any("execution" in cell.metadata for cell in mine.cells)
    text = json.dumps(mine)
    assert "widget-view" not in text and str(FOLDER.parent) not in text and not re.search(r"0x[0-9a-f]{8}", text)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_answer_is_stored_below_its_question(source):
    """Whoever opens the notebook, in JupyterLab or on GitHub, sees it when the cell has run."""
    cells = answering(nbformat.read(notebook_of(source.stem), as_version=4))
    assert [cell.id for cell in cells] == [cell.id for cell in answering(read_stored(source.stem))]
    assert all([output.text for output in cell.outputs] == [ASKED] for cell in cells)


@pytest.mark.parametrize("source", [
    pytest.param(source, marks=[] if int(source.stem[:2]) in FAST else [pytest.mark.deep]) for source in SOURCES],
                         ids=lambda path: path.stem)
def test_it_runs_and_shows_what_is_stored(source):
    """Every text, and as many pictures, cell by cell. A cell may fail only where it is tagged to."""
    if "\nimport torch" in source.read_text():
        pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.15.0")
    again = execute(from_source(source))
    assert printed_outputs(again) == printed_outputs(read_stored(source.stem)), "Run `python tools/notebooks.py`."
    for cell in again.cells:
        fails = cell.cell_type == "code" and any(output.output_type == "error" for output in cell.outputs)
        assert fails == ("raises-exception" in cell.metadata.get("tags", []))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_links_lead_somewhere(source):
    for cell in from_source(source).cells:
        for link in re.findall(r"\]\(([^)]+)\)", cell.source) if cell.cell_type == "markdown" else ():
            assert link.startswith("https://") or (FOLDER / link).exists(), f"{source.name} links to {link}"
