"""An entry of the leaderboard: a file in TOML."""
import msgspec

from mpi_impl.runtime.formats import read_toml


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a file: its task, its author, and the last three, of which each task uses one."""

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
