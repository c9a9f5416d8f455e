"""f, g and their siblings on one rank: what a layer does at the edges of its tensor-parallel region.

Each forward stands beside its backward, which is its adjoint. Its textbook twin is reference/comm/mappings.py,
over a list with one array per rank.
"""
import numpy as np

from mpi_impl.comm.group import Group
from reference.comm.mappings import SEQUENCE
from reference.config import ParallelConfig


class TensorParallelRegion:
    """The region between f and g (Shoeybi et al. 2019, figure 3): all-reduces at its edges.

    Outside, every rank holds the same arrays; inside, each has its own. `reason` goes into the ledger.
    """

    def __init__(self, group: Group):
        self.group, self.rank, self.size = group, group.rank, group.size

    def enter(self, x, reason):
        """f: identity."""
        return x

    def enter_backward(self, dx, reason):
        """f: all-reduce. Every rank used x, so its gradient is the sum. Overwrites dx."""
        return self.group.all_reduce(dx, reason)

    def leave(self, partial, reason):
        """g: all-reduce of the partial sums. Overwrites them."""
        return self.group.all_reduce(partial, reason)

    def leave_backward(self, dy, reason):
        """g: identity."""
        return dy

    def keep(self, x, entered):
        """What of an input is held until the backward: what entered, or less."""
        return entered

    def enter_again(self, kept, reason):
        """In the backward, from what was held: what had entered."""
        return kept

    def positions(self, x):
        """Which positions of the sequence this rank holds outside, from what it holds, [b, s, h]: all of them."""
        return slice(0, x.shape[SEQUENCE])

    def length(self, x):
        """Positions of the whole sequence, from x [b, s, h] outside."""
        return x.shape[SEQUENCE]

    def of_first_position(self, y, reason):
        """What this rank has made of the first position that it holds outside: all have made the same."""
        return y

    def of_first_position_backward(self, dy):
        return dy

    def gather(self, y, reason):
        """Each rank's columns [..., n/t] -> all columns [..., n], on every rank."""
        return self.group.all_gather(y, -1, reason)

    def gather_backward(self, dy, reason):
        """What follows is computed alike by all, so each rank's own columns of dy are already complete."""
        n = dy.shape[-1] // self.size
        return dy[..., self.rank * n:(self.rank + 1) * n]


class SequenceParallelRegion(TensorParallelRegion):
    """An all-gather and a reduce-scatter in the place of f and g (Korthikanti et al. 2022, section 4.2.2, figure 5).

    Outside, every rank has its positions, [b, s/t, h].
    """

    def __init__(self, group: Group, keep_gathered_inputs: bool = False):
        """The inputs that were gathered can be kept for the backward, b s h on every rank, or be gathered again."""
        super().__init__(group)
        self.keep_gathered_inputs = keep_gathered_inputs

    def enter(self, x, reason):
        """This rank's positions -> all positions."""
        return self.group.all_gather(x, SEQUENCE, reason)

    def enter_backward(self, dx, reason):
        """Every rank used every position, so its gradient is the sum, of which this rank needs its own positions."""
        return self.group.reduce_scatter(dx, SEQUENCE, reason)

    def leave(self, partial, reason):
        """Of the sum of the partial sums [b, s, h] this rank's positions, [b, s/t, h]."""
        return self.group.reduce_scatter(partial, SEQUENCE, reason)

    def leave_backward(self, dy, reason):
        """Every partial sum entered every position's sum once, so each rank needs all of dy."""
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
        """That of the sequence's first position, which rank 0 holds. Overwrites y."""
        return self.group.broadcast(y, reason)

    def of_first_position_backward(self, dy):
        """What others than rank 0 made of theirs is of no use to anyone."""
        return dy if self.rank == 0 else np.zeros_like(dy)


def region_of(group: Group, parallel: ParallelConfig) -> TensorParallelRegion:
    """The region of a tensor-parallel group, as the configuration asks for it."""
    if parallel.sequence_parallel:
        return SequenceParallelRegion(group, parallel.keep_gathered_inputs)
    return TensorParallelRegion(group)
