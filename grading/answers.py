"""The cells that students submit: the magic `%%answer`, and the same cells read from a notebook."""
MAGIC = "%%answer"

# The sources of the answers that checks are about, by name: those of this notebook, or of the submission in hand.
CURRENT: dict[str, str] = {}


class AnswerCellFailed(Exception):
    """An answer whose own cell has failed, after the error has been shown. It ends `Run All`, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def source_of(cell: str) -> str:
    """Return a cell's code with an empty line instead of the magic, so that lines keep their numbers."""
    first, _, rest = cell.lstrip("\n").partition("\n")
    return cell[:len(cell) - len(cell.lstrip("\n"))] + "\n" + rest if first.startswith(MAGIC) else cell


def name_of(cell) -> str | None:
    """Return which answer a cell is, by its first line, else by nbgrader's mark; None if it is none.

    The first line comes first, since it is what counts in the notebook: a cell that was copied keeps nbgrader's name.
    """
    if cell.cell_type != "code":
        return None
    first, _, _ = cell.source.lstrip("\n").partition("\n")
    about = cell.metadata.get("nbgrader", {})
    said = first[len(MAGIC):].strip() if first.startswith(MAGIC) else ""
    if said.isidentifier():
        return said
    return about.get("grade_id") if about.get("solution") and not about.get("task") else None


def answers_of(notebook) -> dict[str, str]:
    """Return the answers of a notebook by name. If two have one name, the last counts, as when all cells are run."""
    return {name: source_of(cell.source) for cell in notebook.cells if (name := name_of(cell))}


def load_ipython_extension(shell) -> None:
    """Load the magic: `%load_ext grading`."""
    CURRENT.clear()

    def answer(line: str, cell: str) -> None:
        """%%answer NAME: this cell is handed in. It runs here as any cell does, and checks run it on ranks."""
        name = line.strip()
        if not name.isidentifier():
            print(f"{MAGIC} needs the name of the task, as in the first line of this cell.")
            return
        CURRENT[name] = "\n" + cell
        # IPython drops an empty first line: with a comment in place of the magic, errors name the lines that one sees.
        if not shell.run_cell(f"# {name}\n{cell}").success:
            raise AnswerCellFailed(f"The answer {name} has failed, as is shown above.")

    shell.register_magic_function(answer, "cell")
