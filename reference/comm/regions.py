"""f and g and their siblings: the operators at the edges of a tensor-parallel region. A list has one array per rank.

As linear maps f and g are adjoint: f copies and its backward sums, g sums and its backward copies. Backpropagation
through any linear map is its adjoint, so f's backward *is* g, and g's backward *is* f. The same holds for the pair that
replaces them in sequence parallelism, an all-gather and a reduce-scatter.

Inside a region every rank has its own heads and columns. Outside, activations are replicated, or sharded by positions.
The layers are the same for both: they enter and leave, and the region decides what that means.
"""
import numpy as np

from reference.comm.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from reference.params import tree_map

SEQUENCE = 1    # the axis of positions in [b, s, h]


class TensorParallelRegion:
    """f and g (Shoeybi et al. 2019, section 3, figure 3). Outside, all ranks hold the same arrays."""

    def enter(self, xs):
        """Return x, which every rank has already (f). Costs nothing."""
        return xs

    def enter_backward(self, dxs):
        """All-reduce dx: every rank used x, so its gradient is the sum over the ranks (f backward)."""
        return all_reduce(dxs)

    def leave(self, partial):
        """All-reduce the ranks' partial sums; the result is identical on every rank (g)."""
        return all_reduce(partial)

    def leave_backward(self, dys):
        """Return dy: each partial sum entered the sum once, so its gradient is dy (g backward). Costs nothing."""
        return dys

    def keep(self, xs, entered):
        """Return the input to keep for the backward: the entered one, or less."""
        return entered

    def enter_again(self, kept):
        """Recover the entered input in the backward from the kept one."""
        return kept

    def positions(self, xs):
        """Return the positions that each rank holds outside, given its array [b, s, h]: all of them."""
        return [slice(0, x.shape[SEQUENCE]) for x in xs]

    def of_first_position(self, ys):
        """Return the result for the sequence's first position on every rank: all have computed it."""
        return ys

    def of_first_position_backward(self, dys):
        return dys

    def parts_of_a_sum(self, xs):
        """Return the ranks' results whose sum is that over all positions: any rank's: all are identical."""
        return xs[:1]

    def complete(self, grads, tensors):
        """Return each rank's gradients, complete for replicated tensors too: every rank saw all positions.

        Of some tensors inside a region there are fewer shards than ranks: their copies' gradients are partial sums.
        """
        return each_complete(lambda tensor, parts: parts if tensor.most_shards is None else
                             sum_over_copies(parts, tensor), grads, tensors)


class SequenceParallelRegion:
    """An all-gather and a reduce-scatter in place of f and g (Korthikanti et al. 2022, section 4.2.2, figure 5).

    Outside, each of t ranks has s/t positions of every sequence, so norms, dropout and residual sums are neither
    computed nor kept t times over. An all-reduce is a reduce-scatter and an all-gather, so the traffic is the same as
    before.
    """

    def __init__(self, keep_gathered_inputs=False):
        """Choose whether gathered inputs are kept for the backward, b s h on every rank, or gathered again."""
        self.keep_gathered_inputs = keep_gathered_inputs

    def enter(self, xs):
        """All-gather each rank's positions [b, s/t, h] to all positions [b, s, h], on every rank."""
        return all_gather(xs, SEQUENCE)

    def enter_backward(self, dxs):
        """Reduce-scatter dx: every rank used every position, and needs the summed gradient of its own."""
        return reduce_scatter(dxs, SEQUENCE)

    def leave(self, partial):
        """Reduce-scatter the ranks' partial sums [b, s, h]: each gets its own positions [b, s/t, h] of the sum."""
        return reduce_scatter(partial, SEQUENCE)

    def leave_backward(self, dys):
        """All-gather dy: every partial sum entered every position's sum once, so each rank needs all of dy."""
        return all_gather(dys, SEQUENCE)

    def keep(self, xs, entered):
        """Return the input to keep for the backward: the entered one, or less."""
        return entered if self.keep_gathered_inputs else xs

    def enter_again(self, kept):
        """Recover the entered input in the backward from the kept one."""
        return kept if self.keep_gathered_inputs else all_gather(kept, SEQUENCE)

    def positions(self, xs):
        """Return the positions that each rank holds outside, given its array [b, s/t, h]."""
        n = xs[0].shape[SEQUENCE]
        return [slice(rank * n, rank * n + n) for rank in range(len(xs))]

    def of_first_position(self, ys):
        """Return on every rank the result for the sequence's first position, which rank 0 holds."""
        return broadcast(ys, 0)

    def of_first_position_backward(self, dys):
        """Zero the gradient on all ranks but the first: nothing reads their results."""
        return [dys[0], *map(np.zeros_like, dys[1:])]

    def parts_of_a_sum(self, xs):
        """Return the ranks' results whose sum is that over all positions: all ranks', each of its own positions."""
        return xs

    def complete(self, grads, tensors):
        """Return each rank's gradients, complete for replicated tensors.

        Norms, routers, the biases of row-parallel layers and the position table are on every rank, but each rank
        applies them to its own positions only. So their gradients are partial sums: an all-reduce. (Experts are inside
        the region, and see all positions.)
        """
        return each_complete(lambda tensor, parts: parts if tensor.dealt else
                             parts if tensor.split is not None and tensor.most_shards is None
                             else sum_over_copies(parts, tensor), grads, tensors)


def sum_over_copies(parts, tensor):
    """All-reduce a tensor's gradients over the neighbouring ranks that hold the same elements."""
    n = tensor.copies(len(parts))
    return [x for first in range(0, len(parts), n) for x in all_reduce(parts[first:first + n])]


def each_complete(complete, grads, tensors):
    """Call complete(tensor, all ranks' gradients of it) for each tensor; return each rank's tree of gradients."""
    return [tree_map(lambda tensor, *parts, rank=rank: complete(tensor, parts)[rank], tensors, *grads)
            for rank in range(len(grads))]


TENSOR_PARALLEL = TensorParallelRegion()
