"""Reports of a user's ranks on the launcher's machine, which begin.py writes: where each is, and that it has ended."""
import linecache
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from mpi_impl.comm.watchdog import listed
from mpi_impl.launch import begin

LOOKS = 6               # in a row at the same place, after which a rank counts as waiting
FRESH = 2.5 * begin.SECONDS_TO_REPORT   # seconds: a rank with an older report computes outside of Python

# The names by which mpi4py's methods wait for other ranks.
WAITS_IN_MPI = re.compile(
    r"\.(barrier|s?send|recv|m?probe|sendrecv(_replace)?|bcast|(all)?reduce(_scatter(_block)?)?|(all)?gatherv?|scatterv?|"
    r"alltoall[vw]?|scan|exscan|wait(all|any|some)?|fence)\(", re.I)


class Place(NamedTuple):
    """The line of a program where a rank is, and for how many looks in a row: 0 if the line is not known."""

    looks: int = 0
    line: str = "not seen lately"

    @classmethod
    def read(cls, report: Path) -> "Place":
        """Read a rank's report, unless it is an old one."""
        looks, file, line, name = (report.read_text("utf-8").split("\n") + ["", "", "", ""])[:4]
        if not looks or time.time() - report.stat().st_mtime > FRESH:
            return cls()
        return cls(int(looks), f"{file}, line {line} in {name}: {linecache.getline(file, int(line)).strip()}")

    def waits(self) -> bool:
        """Report whether the rank has been there for long, in a method by which mpi4py waits for other ranks."""
        return self.looks >= LOOKS and bool(WAITS_IN_MPI.search(self.line))


class Reports:
    """The reports of one job."""

    def __init__(self) -> None:
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="shardlab-"))
        except OSError:     # without room there are no reports
            self.folder = Path(os.devnull, "reports")
        self.settings = {begin.REPORTS: str(self.folder)}   # variables for the ranks
        self.told = False

    def close(self) -> int | None:
        """Remove the folder. Return the status of the first rank that failed, if one has reported a failure."""
        failed = self.folder / begin.FAILED
        status = int(failed.read_text() or 1) if failed.exists() else None
        shutil.rmtree(self.folder, ignore_errors=True)
        return status

    def at_work(self) -> dict[int, Place]:
        """Return the place of each rank that has not ended."""
        return {int(path.name): Place.read(path) for path in self.folder.glob("*[0-9]")
                if not path.with_suffix(".end").exists()}

    def places(self) -> str:
        """Describe where each rank is, in one line for all ranks at the same place."""
        together = {"it has ended": sorted(int(path.stem) for path in self.folder.glob("*.end"))}
        for rank, place in sorted(self.at_work().items()):
            together.setdefault(place.line, []).append(rank)
        return "\n".join(f"  {listed(ranks)}: {line}" for line, ranks in together.items() if ranks)

    def waits(self) -> str:
        """Return a note, once, if all ranks that have not ended have long been in calls of MPI.

        They may wait for one another, or for a rank that has ended.
        """
        at_work = self.at_work()
        if self.told or not at_work or not all(place.waits() for place in at_work.values()):
            return ""
        self.told = True
        return (f"note: {LOOKS} looks in {LOOKS * begin.SECONDS_TO_REPORT} seconds found ranks at the same places:\n"
                f"{self.places()}\nIf they wait for one another, or for a rank that has ended, the job never ends: "
                "Ctrl-C ends it, and --timeout SECONDS sets a limit.")
