"""The cells that are handed in: the magic `%%answer`, and the same cells read from a notebook."""
from IPython.core.magic import register_cell_magic

MAGIC = "%%answer"

# The sources of the answers that checks are about, by name: those of this notebook, or of the submission in hand.
CURRENT: dict[str, str] = {}


def source_of(cell: str) -> str:
    """A cell's code without the magic, in whose place there is an empty line: so lines keep their numbers."""
    first, _, rest = cell.partition("\n")
    return "\n" + rest if first.startswith(MAGIC) else cell


def answers_of(notebook) -> dict[str, str]:
    """The answers of a notebook that nbgrader has made: its solution cells, by their grade_id."""
    found: dict[str, str] = {}
    for cell in notebook.cells:
        about = cell.metadata.get("nbgrader", {})
        if cell.cell_type == "code" and about.get("solution") and not about.get("task"):
            found.setdefault(about["grade_id"], source_of(cell.source))
    return found


def load_ipython_extension(shell) -> None:
    """`%load_ext grading`: the magic, for whoever works on a lab."""
    CURRENT.clear()

    @register_cell_magic
    def answer(line: str, cell: str) -> None:
        """%%answer NAME: this cell is handed in. It runs here as any cell does, and checks run it on ranks."""
        name = line.strip()
        if not name.isidentifier():
            print(f"{MAGIC} needs the name of the task, as it stood in the first line of this cell.")
            return
        CURRENT[name] = "\n" + cell
        shell.run_cell(cell).raise_error()
