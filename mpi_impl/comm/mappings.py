"""f, g and their siblings on one rank: what a layer does at the edges of its tensor-parallel region.

Each forward stands beside its backward, which is its adjoint. The textbook's versions are in
reference/collectives.py, over a list with one array per rank.
"""
from mpi_impl.comm.group import Group


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

    def gather(self, y, reason):
        """Each rank's columns [..., n/t] -> all columns [..., n], on every rank."""
        return self.group.all_gather(y, -1, reason)

    def gather_backward(self, dy, reason):
        """What follows is computed alike by all, so each rank's own columns of dy are already complete."""
        n = dy.shape[-1] // self.size
        return dy[..., self.rank * n:(self.rank + 1) * n]
