"""f and g, and their siblings: what happens at the edges of a tensor-parallel region. A list has one array per rank.

As linear maps f and g are adjoint: f copies and its backward sums, g sums and its backward copies. Backpropagation
through any linear map is its adjoint, so f's backward *is* g, and g's backward *is* f. The same holds for the pair that
sequence parallelism puts in their place, an all-gather and a reduce-scatter.

Inside a region every rank has heads and columns of its own. Outside, all hold the same, or each has its positions. The
layers are the same for both: they enter and leave, and what that means is the region's business.
"""
import numpy as np

from reference.comm.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from reference.params import tree_map

SEQUENCE = 1    # the axis of positions in [b, s, h]


class TensorParallelRegion:
    """f and g (Shoeybi et al. 2019, section 3, figure 3). Outside, all ranks hold the same arrays."""

    def enter(self, xs):
        """f: every rank has x already. Costs nothing."""
        return xs

    def enter_backward(self, dxs):
        """f: every rank used x, so its gradient is the sum of what they all say: an all-reduce."""
        return all_reduce(dxs)

    def leave(self, partial):
        """g: the ranks' partial sums become one sum, alike on all ranks: an all-reduce."""
        return all_reduce(partial)

    def leave_backward(self, dys):
        """g: each partial sum entered the sum once, so each gets dy as it is. Costs nothing."""
        return dys

    def keep(self, xs, entered):
        """What of an input is held until the backward: what entered, or less."""
        return entered

    def enter_again(self, kept):
        """In the backward, from what was held: what had entered."""
        return kept

    def positions(self, xs):
        """Which positions of the sequence each rank holds outside, from what it holds, [b, s, h]: all of them."""
        return [slice(0, x.shape[SEQUENCE]) for x in xs]

    def of_first_position(self, ys):
        """What each rank has made of the first position that it holds outside: all have made the same."""
        return ys

    def of_first_position_backward(self, dys):
        return dys

    def complete(self, grads, tensors):
        """Each rank's gradients. Those of replicated tensors are whole already: every rank saw all positions."""
        return grads


class SequenceParallelRegion:
    """An all-gather and a reduce-scatter in the place of f and g (Korthikanti et al. 2022, section 4.2.2, figure 5).

    Outside, each of t ranks has s/t positions of every sequence: norms, dropout and residual sums are not done t times
    over, and what they keep for the backward is not kept t times. An all-reduce is a reduce-scatter and an all-gather,
    so as much is sent as before.
    """

    def __init__(self, keep_gathered_inputs=False):
        """The inputs that were gathered can be kept for the backward, b s h on every rank, or be gathered again."""
        self.keep_gathered_inputs = keep_gathered_inputs

    def enter(self, xs):
        """Each rank's positions [b, s/t, h] -> all positions [b, s, h], on every rank."""
        return all_gather(xs, SEQUENCE)

    def enter_backward(self, dxs):
        """Every rank used every position, so its gradient is the sum, of which each needs its own positions."""
        return reduce_scatter(dxs, SEQUENCE)

    def leave(self, partial):
        """The sum of the ranks' partial sums [b, s, h], of which each gets its own positions [b, s/t, h]."""
        return reduce_scatter(partial, SEQUENCE)

    def leave_backward(self, dys):
        """Every partial sum entered every position's sum once, so each rank needs all of dy."""
        return all_gather(dys, SEQUENCE)

    def keep(self, xs, entered):
        """What of an input is held until the backward: what entered, or less."""
        return entered if self.keep_gathered_inputs else xs

    def enter_again(self, kept):
        """In the backward, from what was held: what had entered."""
        return kept if self.keep_gathered_inputs else all_gather(kept, SEQUENCE)

    def positions(self, xs):
        """Which positions of the sequence each rank holds outside, from what it holds, [b, s/t, h]."""
        n = xs[0].shape[SEQUENCE]
        return [slice(rank * n, rank * n + n) for rank in range(len(xs))]

    def of_first_position(self, ys):
        """What each rank has made of the first position that it holds: that of the sequence's first, on every rank."""
        return broadcast(ys, 0)

    def of_first_position_backward(self, dys):
        """What the others made of theirs is of no use to anyone."""
        return [dys[0], *map(np.zeros_like, dys[1:])]

    def complete(self, grads, tensors):
        """Each rank's gradients, those of replicated tensors whole on every rank.

        Norms, the biases of row-parallel layers and the table of positions are on every rank, but each rank has
        applied them to its own positions only. So their gradients are partial sums: an all-reduce.
        """
        return [tree_map(lambda tensor, *parts, rank=rank: parts[rank] if tensor.split is not None
                         else all_reduce(parts)[rank], tensors, *grads) for rank in range(len(grads))]


TENSOR_PARALLEL = TensorParallelRegion()
