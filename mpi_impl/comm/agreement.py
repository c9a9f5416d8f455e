"""Agreement: the ranks of a group compare their calls, since MPI computes garbage from calls that do not fit together.

Each call has a record of two texts: what must be the same on all ranks, and the same with its line and its reason.
Records travel next to the arrays, and are not in the ledger. The record of a posted call is posted, too, and waited for
first.
"""
import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from mpi_impl.comm.transports.transport import Request
from mpi_impl.comm.watchdog import listed
from mpi_impl.runtime.arrays import is_half
from reference.errors import UserError

if TYPE_CHECKING:
    from mpi_impl.comm.group import Group

TEXT = "S400"       # bytes of each text; a longer one is cut
NOT_CALLERS = os.path.dirname(__file__), contextlib.__file__


def require_array(x) -> None:
    """Raise UserError unless x is an array of numbers, which a group can overwrite and send."""
    kind = "f" if is_half(x) else getattr(getattr(x, "dtype", None), "kind", "O")
    if isinstance(x, np.generic) or kind not in "biufc":
        form = f"an array of dtype {x.dtype}" if isinstance(x, np.ndarray) else f"of type {type(x).__name__}"
        raise UserError(f"{caller()} passes {str(x):.60}, which is {form}, to other ranks. They exchange arrays of "
                        "numbers: pass np.array([1.0, 2.0]), for example.")


def compare(group: "Group", call: str, reason: str, to: Sequence[int] | None = None,
            sources: Sequence[int] | None = None, tag: int | None = None) -> Request:
    """Begin to send a call to the ranks `to`, and to compare it with the calls of `sources`; both: all other ranks.

    The request, or this function, raises UserError if some of these calls differ. Records have MPI's odd tags, as the
    later stamps of virtual clocks have; records of collectives have the last odd tag.
    """
    others, tag = [i for i in range(group.size) if i != group.rank], 1 + 2 * (group.largest_tag if tag is None else tag)
    mine = np.array([call.encode(), f"{caller()}: {call} for {reason!r}".encode()], TEXT).view(np.uint8)
    records = {i: np.empty_like(mine) for i in (others if sources is None else sources)}
    requests = [group.comm.Irecv(record, i, tag) for i, record in records.items()]
    requests += [group.comm.Isend(mine, i, tag) for i in (others if to is None else to)]
    request = Request(lambda: MPI.Request.Testall(requests), lambda: MPI.Request.Waitall(requests),
                      lambda: require_agreement(group, records | {group.rank: mine}))
    request.done()      # at once, if possible: an MPI may end the job itself when arrays of other sizes are posted, too
    return request


def caller() -> str:
    """Return the line, as 'lab.py:12', that called a function of this package."""
    frame = sys._getframe()
    while frame.f_back and frame.f_code.co_filename.startswith(NOT_CALLERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.removeprefix(os.getcwd() + os.sep)}:{frame.f_lineno}"


def require_agreement(group: "Group", records: dict[int, np.ndarray]) -> None:
    """Raise UserError if the calls of some ranks differ."""
    calls = defaultdict[bytes, list](list)
    for rank in sorted(records):
        call, words = records[rank].view(TEXT)
        calls[call].append((group.ranks[rank], words.decode(errors="replace")))
    if len(calls) > 1:
        different = (f"{listed([rank for rank, _ in same])} at {same[0][1]}" for same in calls.values())
        raise UserError(f"Calls in the {group.name} group do not fit together: {'; '.join(different)}. All ranks of a "
                        "group make the same calls in the same order, with arrays of one shape and dtype.")


def require_rows(group: "Group", sent: Sequence[int], received: Sequence[int]) -> None:
    """Raise UserError, on all ranks, unless each expects the rows that the others send."""
    lines, sends, expects = zip(*group.comm.allgather((caller(), sent, received)))
    for i, j in np.argwhere(np.array(sends) != np.array(expects).T):
        raise UserError(f"all_to_all_rows in the {group.name} group does not fit: rank {group.ranks[i]} at {lines[i]} "
                        f"sends {sends[i][j]} rows to rank {group.ranks[j]}, which at {lines[j]} expects "
                        f"{expects[j][i]}. Each rank must receive as many rows as the other sends.")
