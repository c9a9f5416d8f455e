"""Make the walkthroughs from their sources: `python tools/notebooks.py [01_splitting_matrices ...]`.

Each `notebooks/sources/*.py` is run from top to bottom in a Jupyter kernel, and stored with its outputs as a notebook.
What answers a question is stored apart, in `notebooks/sources/*.answers.json`: whoever opens the notebook predicts
first, and the site folds it. What would differ from run to run is left out: numbers of cells, times, widgets (their
picture stays). `tests/notebooks/test_walkthroughs.py` runs all of them again and compares.
"""
import argparse
import json
import re
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
SOURCES = FOLDER / "sources"
SECONDS = 120       # for a cell, at most
METADATA = {"jupytext": {"formats": "ipynb,sources//py:percent"}, "language_info": {"name": "python"},
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
ANSWER = "hide-output"      # the tag of a cell whose output answers a question: MyST-NB folds it on the site
ASKED = "Make your prediction, then run this cell.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the walkthroughs, and store them with their outputs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="as 01_splitting_matrices (default: all of them)")
    for source in sources(parser.parse_args().names):
        print(f"{source.stem} ...", flush=True)
        store(execute(from_source(source)), source.stem)


def sources(names: list[str]) -> list[Path]:
    """Return the sources of the named walkthroughs, or of all. End the program with a sentence if a name is unknown."""
    found = sorted(SOURCES.glob("[0-9]*.py"))
    if unknown := set(names) - {path.stem for path in found}:
        sys.exit(f"error: there is no walkthrough {', '.join(sorted(unknown))} in {SOURCES.relative_to(ROOT)}.")
    return [path for path in found if not names or path.stem in names]


def from_source(source: Path):
    """Return the notebook that a source describes, without outputs."""
    notebook = jupytext.read(source)
    notebook.metadata = nbformat.from_dict(METADATA)
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
    return notebook


# ---- outputs --------------------------------------------------------------------------------------------------------


def store(notebook, name: str) -> None:
    """Write a notebook that has run, and the outputs that answer its questions next to its source."""
    answers = {}
    for cell in answering(notebook):
        answers[cell.id], cell.outputs = cell.outputs, [nbformat.v4.new_output("stream", name="stdout", text=ASKED)]
    nbformat.write(notebook, notebook_of(name))
    answers_of(name).write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n")


def read_stored(name: str):
    """Return a walkthrough as it was when it had run: the stored notebook, with the answers."""
    notebook, answers = nbformat.read(notebook_of(name), as_version=4), json.loads(answers_of(name).read_text())
    for cell in notebook.cells:
        if cell.id in answers:
            cell.outputs = [nbformat.from_dict(output) for output in answers[cell.id]]
    return notebook


def answering(notebook) -> list:
    """Return the cells whose outputs answer a question."""
    return [cell for cell in notebook.cells if ANSWER in cell.metadata.get("tags", []) and cell.outputs]


def notebook_of(name: str) -> Path:
    return FOLDER / f"{name}.ipynb"


def answers_of(name: str) -> Path:
    return SOURCES / f"{name}.answers.json"


def execute(notebook):
    """Run a notebook and return it with outputs. Raises CellExecutionError if a cell fails that is not tagged
    raises-exception.
    """
    client = NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", store_widget_state=False,
                            coalesce_streams=True, resources={"metadata": {"path": str(FOLDER)}})
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [stable(output) for output in cell.outputs]
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def stable(output):
    """Return an output without what cannot be shown again: a widget, which lives only as long as its kernel."""
    if "data" in output:
        output.data.pop("application/vnd.jupyter.widget-view+json", None)
    return output


def printed_outputs(notebook) -> list[list[str]]:
    """Return the output of each code cell as text, to compare two runs; a picture is only its kind.

    Lines of the packages move with every change to them, so a traceback keeps those of cells alone.
    """
    return [[re.sub(r'(File "(?!In \[)[^"]+", line) \d+', r"\1 N", text_of(output)) for output in cell.outputs]
            for cell in notebook.cells if cell.cell_type == "code"]


def text_of(output) -> str:
    if output.output_type == "stream":
        return f"{output.name}: {output.text}"
    if output.output_type == "error":
        return "\n".join(output.traceback)
    return "\n".join(f"{kind}: {value if kind.startswith('text/') else '...'}" for kind, value in
                     sorted(output.data.items()))


if __name__ == "__main__":
    main()
