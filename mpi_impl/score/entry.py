"""An entry of the leaderboard: a file in TOML."""
import msgspec

from mpi_impl.runtime.formats import read_toml


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    """What a file may have: the task, who sends it, and one of the last three, as the task says."""

    task: str
    author: str
    score: int | None = None        # as the author, or the board, has it
    about: str = ""
    schedule: str = ""
    layout: dict[str, dict[str, str]] = {}
    options: str = ""


def read(path: str) -> Entry:
    """Read a file. Raises UserError if it is not an entry."""
    return read_toml(path, Entry)
