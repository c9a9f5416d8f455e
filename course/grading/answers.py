"""The cells that students submit: the magic `%%answer`, and the same cells read from a notebook."""
MAGIC = "%%answer"

# The sources of the answers that are being checked, by name: those of this notebook, or of one submission.
CURRENT: dict[str, str] = {}


class AnswerCellFailed(Exception):
    """The failure of an answer's own cell, whose error has been shown. It ends `Run All`, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def source_of(cell: str) -> str:
    """Return a cell's code with an empty line instead of the magic, so that lines keep their numbers."""
    first, _, rest = cell.lstrip("\n").partition("\n")
    return cell[:len(cell) - len(cell.lstrip("\n"))] + "\n" + rest if first.startswith(MAGIC) else cell


def about(cell) -> dict:
    """Return what nbgrader knows of a cell."""
    return cell.metadata.get("nbgrader", {})


def name_of(cell) -> str | None:
    """Return the name of the answer in a cell: that in its first line, else nbgrader's name; None if it is no answer.

    The first line decides, as it does in the notebook: a copied cell keeps nbgrader's name.
    """
    if cell.cell_type != "code":
        return None
    first, _, _ = cell.source.lstrip("\n").partition("\n")
    written = first[len(MAGIC):].strip() if first.startswith(MAGIC) else ""
    if written.isidentifier():
        return written
    return about(cell).get("grade_id") if about(cell).get("solution") and not about(cell).get("task") else None


def answers_of(notebook) -> dict[str, str]:
    """Return the answers of a notebook by name. Of two with one name the last counts, as when all cells are run."""
    return {name: source_of(cell.source) for cell in notebook.cells if (name := name_of(cell))}


def load_ipython_extension(shell) -> None:
    """Load the magic: `%load_ext course.grading`."""
    from shardlab.notebook.running_cell import RunningCell  # needs IPython, which limited ranks do not load

    CURRENT.clear()

    def answer(line: str, cell: str) -> None:
        """Mark this cell as an answer to submit, and run it: %%answer NAME. Checks run it on ranks."""
        name = line.strip()
        if not name.isidentifier():
            print(f"{MAGIC} needs the name of the task, as in the first line of this cell.")
            return
        here = RunningCell.of(shell, MAGIC)
        CURRENT[name] = "\n" * here.lines_before + cell
        # IPython drops empty first lines: comments in their place keep the line numbers right.
        following, shell.execution_count = shell.execution_count, here.number
        try:
            success = shell.run_cell(f"# {name}\n" * here.lines_before + cell).success
        finally:
            shell.execution_count = following
        if not success:
            raise AnswerCellFailed(f"The answer {name} has failed: see the error above.")

    shell.register_magic_function(answer, "cell")
