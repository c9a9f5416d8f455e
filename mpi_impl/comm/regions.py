"""f, g and their siblings on one rank: the edges of a layer's tensor-parallel region.

Each forward stands next to its backward, which is its adjoint. The textbook twin is reference/comm/regions.py, over a
list with one array per rank.
"""
import numpy as np

from mpi_impl.comm.group import Group
from reference.comm.regions import SEQUENCE
from reference.config import ParallelConfig


class TensorParallelRegion:
    """The region between f and g (Shoeybi et al. 2019, figure 3), with all-reduces at its edges.

    Outside, every rank holds the same arrays; inside, each has its own. `reason` goes into the ledger.
    """

    def __init__(self, group: Group, experts: Group | None = None, context_ranks: Group | None = None):
        """Take the t ranks that share a layer, the e ranks to which experts are dealt out, and the c ranks that share a
        sequence; None: one.
        """
        self.group, self.rank, self.size = group, group.rank, group.size
        self.experts, self.context_ranks = experts, context_ranks

    def enter(self, x, reason):
        """Return x, which every rank has (f)."""
        return x

    def enter_backward(self, dx, reason):
        """All-reduce dx in place: every rank used x, so its gradient is the sum over the ranks (f backward)."""
        return self.group.all_reduce(dx, reason)

    def leave(self, partial, reason):
        """All-reduce the partial sums in place (g)."""
        return self.group.all_reduce(partial, reason)

    def leave_backward(self, dy, reason):
        """Return dy (g backward)."""
        return dy

    def keep(self, x, entered):
        """Return the part of an input to keep for the backward: what entered, or less."""
        return entered

    def enter_again(self, kept, reason):
        """Return what entered, from the kept part, in the backward."""
        return kept

    def positions(self, x):
        """Return the positions of the sequence that this rank holds in x [b, s, h] outside: all of them."""
        return slice(0, x.shape[SEQUENCE])

    def length(self, x):
        """Return the length of the whole sequence, from x [b, s, h] outside."""
        return x.shape[SEQUENCE]

    def of_first_position(self, y, reason):
        """Return the result y for the first position of the sequence: the same on every rank."""
        return y

    def of_first_position_backward(self, dy):
        """Return the gradient of this rank's y."""
        return dy

    def gather(self, y, reason):
        """Return all columns [..., n], on every rank, from each rank's columns [..., n/t]."""
        return self.group.all_gather(y, -1, reason)

    def gather_backward(self, dy, reason):
        """Return this rank's columns of dy: all ranks compute the same dy, so they are complete."""
        n = dy.shape[-1] // self.size
        return dy[..., self.rank * n:(self.rank + 1) * n]


class SequenceParallelRegion(TensorParallelRegion):
    """The region with an all-gather and a reduce-scatter in place of f and g (Korthikanti et al. 2022, section
    4.2.2, figure 5).

    Outside, every rank has its positions, [b, s/t, h].
    """

    def __init__(self, group: Group, keep_gathered_inputs: bool = False, experts: Group | None = None,
                 context_ranks: Group | None = None):
        """Keep the gathered inputs for the backward, b s h on every rank, or gather them again."""
        super().__init__(group, experts, context_ranks)
        self.keep_gathered_inputs = keep_gathered_inputs

    def enter(self, x, reason):
        """Gather all positions."""
        return self.group.all_gather(x, SEQUENCE, reason)

    def enter_backward(self, dx, reason):
        """Return this rank's positions of the sum over all ranks: each of them used every position."""
        return self.group.reduce_scatter(dx, SEQUENCE, reason)

    def leave(self, partial, reason):
        """Return this rank's positions [b, s/t, h] of the sum of the partial sums [b, s, h]."""
        return self.group.reduce_scatter(partial, SEQUENCE, reason)

    def leave_backward(self, dy, reason):
        """Gather all of dy: every partial sum entered the sum once at every position."""
        return self.group.all_gather(dy, SEQUENCE, reason)

    def keep(self, x, entered):
        return entered if self.keep_gathered_inputs else x

    def enter_again(self, kept, reason):
        return kept if self.keep_gathered_inputs else self.group.all_gather(kept, SEQUENCE, f"{reason}, again")

    def positions(self, x):
        n = x.shape[SEQUENCE]
        return slice(self.rank * n, self.rank * n + n)

    def length(self, x):
        return x.shape[SEQUENCE] * self.size

    def of_first_position(self, y, reason):
        """Broadcast y from rank 0, which holds the first position of the sequence. Overwrite y."""
        return self.group.broadcast(y, reason)

    def of_first_position_backward(self, dy):
        """Return zeros on all ranks but rank 0, whose y alone is used."""
        return dy if self.rank == 0 else np.zeros_like(dy)


class WithinRegion(TensorParallelRegion):
    """No edges: for a layer inside another's region, whose arrays are this rank's own already, or partial sums."""

    def enter_backward(self, dx, reason):
        return dx

    def leave(self, partial, reason):
        return partial


def region_of(group: Group, parallel: ParallelConfig, experts: Group | None = None,
              context_ranks: Group | None = None) -> TensorParallelRegion:
    """Return the region of a tensor-parallel group that the configuration asks for."""
    if parallel.sequence_parallel:
        return SequenceParallelRegion(group, parallel.keep_gathered_inputs, experts, context_ranks)
    return TensorParallelRegion(group, experts, context_ranks)
