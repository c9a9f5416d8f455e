"""The cell that a notebook is running, with the number and the lines that its reader sees."""
from typing import NamedTuple


class RunningCell(NamedTuple):
    """The place of the code that a cell magic gets."""

    number: int             # the 3 of In [3]
    lines_before: int       # the magic's own, and empty ones above it, which IPython drops

    @classmethod
    def of(cls, shell, magic: str) -> "RunningCell":
        """Find the cell that the shell is running, which begins with this magic."""
        if shell is None:
            return cls(0, 1)
        number = shell.displayhook.prompt_count     # in some versions of IPython the shell's count is the next cell's
        typed = shell.history_manager.input_hist_raw
        source = typed[number] if number < len(typed) else ""
        code = source.lstrip()
        blank = source[:len(source) - len(code)].count("\n") if code.startswith(magic) else 0
        return cls(number, blank + 1)
