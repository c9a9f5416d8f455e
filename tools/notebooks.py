"""Make the walkthroughs from their sources: `python tools/notebooks.py [01_splitting_matrices ...]`.

Each `notebooks/*.py` is run from top to bottom in a Jupyter kernel, and stored with its outputs as the `.ipynb` beside
it. What would differ from run to run is left out: numbers of cells, times, widgets (their picture stays).
`tests/notebooks/test_walkthroughs.py` runs them again and compares.
"""
import argparse
import re
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
SECONDS = 120       # for a cell, at most
METADATA = {"jupytext": {"formats": "ipynb,py:percent"}, "language_info": {"name": "python"},
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the walkthroughs, and store them with their outputs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="as 01_splitting_matrices (default: all of them)")
    for source in sources(parser.parse_args().names):
        print(f"{source.stem} ...", flush=True)
        nbformat.write(execute(from_source(source)), source.with_suffix(".ipynb"))


def sources(names: list[str]) -> list[Path]:
    """Return the sources of the named walkthroughs, or of all. End the program with a sentence if a name is unknown."""
    found = sorted(FOLDER.glob("[0-9]*.py"))
    if unknown := set(names) - {path.stem for path in found}:
        sys.exit(f"error: there is no walkthrough {', '.join(sorted(unknown))} in {FOLDER.relative_to(ROOT)}.")
    return [path for path in found if not names or path.stem in names]


def from_source(source: Path):
    """Return the notebook that a source describes, without outputs."""
    notebook = jupytext.read(source)
    notebook.metadata = nbformat.from_dict(METADATA)
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
    return notebook


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
