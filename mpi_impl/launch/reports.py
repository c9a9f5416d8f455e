"""What ranks on the launcher's machine report: where they are, and whether they have ended (begin.py writes it).

Each rank has a file in a folder, into which Python's faulthandler writes its stack every other second, even while the
rank waits in MPI.
"""
import linecache
import os
import re
import shutil
import tempfile
from pathlib import Path

from mpi_impl.comm.watchdog import listed
from mpi_impl.launch import begin

FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
PACKAGE = os.path.join(begin.ROOT, "mpi_impl", "")
LOOKS = 6               # that find the ranks at the same place, before they count as waiting
MOST_REPORTED = 1 << 16     # bytes of stacks, after which a file begins again

# The names by which mpi4py's methods wait for other ranks.
WAITS_IN_MPI = re.compile(
    r"\.(barrier|s?send|recv|m?probe|sendrecv(_replace)?|bcast|(all)?reduce(_scatter(_block)?)?|(all)?gatherv?|scatterv?|"
    r"alltoall[vw]?|scan|exscan|wait(all|any|some)?|fence|split|split_type|dup|create(_group)?)\(", re.I)


class Reports:
    """The reports of one job."""

    def __init__(self) -> None:
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="shardlab-"))
        except OSError:     # there is no room, so there are no reports
            self.folder = Path(os.devnull, "reports")
        self.settings = {begin.REPORTS: str(self.folder)}   # from which ranks learn of it
        self.told = False

    def close(self) -> int | None:
        """Remove the folder. Return the status of the first rank that told of its failure, if any did."""
        failed = self.folder / begin.FAILED
        status = int(failed.read_text() or 1) if failed.exists() else None
        shutil.rmtree(self.folder, ignore_errors=True)
        return status

    def stacks(self) -> dict[int, list[str]]:
        """Return the last stacks of each rank that is at work: of its main thread, the innermost frame first."""
        stacks = {}
        for path in sorted(self.folder.glob("*[0-9]")):
            if not path.with_suffix(".end").exists():
                dumps = path.read_text(errors="replace").split("Timeout (")[1:]
                stacks[int(path.name)] = [dump.rpartition("first):\n")[2] for dump in dumps[-LOOKS:]]
                if path.stat().st_size > MOST_REPORTED:
                    os.truncate(path, 0)
        return stacks

    def places(self) -> str:
        """Describe where each rank was last seen; ranks at the same line share theirs."""
        together = {"it has ended": sorted(int(path.stem) for path in self.folder.glob("*.end"))}
        for rank, stacks in sorted(self.stacks().items()):
            together.setdefault(place(stacks), []).append(rank)
        return "\n".join(f"  {listed(ranks)}: {where}" for where, ranks in together.items() if ranks)

    def waits(self) -> str:
        """Return a note, once, if several looks found the ranks that are at work in the same calls of MPI.

        They may wait for one another, or for a rank that has ended.
        """
        stacks = self.stacks()
        if self.told or not stacks or not all(map(stands_in_mpi, stacks.values())):
            return ""
        self.told = True
        return (f"note: {LOOKS} looks in {LOOKS * begin.SECONDS_TO_REPORT} seconds found ranks at the same places:\n"
                f"{self.places()}\nIf they wait for one another, or for a rank that has ended, the job never ends: "
                "Ctrl-C ends it, and --timeout SECONDS sets a limit.")


def stands_in_mpi(stacks: list[str]) -> bool:
    """Report whether these are as many as are needed, and alike, and their innermost line waits in mpi4py.

    Our own programs, which begin in our package, have limits for their waits.
    """
    frames = FRAME.findall(stacks[-1]) if stacks and stacks.count(stacks[-1]) == LOOKS else []
    theirs = [file for file, _, _ in frames if file != begin.__file__ and "runpy" not in file]
    return bool(theirs) and not theirs[-1].startswith(PACKAGE) and bool(WAITS_IN_MPI.search(line_of(*frames[0])))


def place(stacks: list[str]) -> str:
    frames = FRAME.findall(stacks[-1]) if stacks else []
    return "{}, line {} in {}: ".format(*frames[0]) + line_of(*frames[0]) if frames else "it has not been seen yet"


def line_of(file: str, line: str, name: str) -> str:
    return linecache.getline(file, int(line)).strip()
