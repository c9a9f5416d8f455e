"""A linear layer on one rank, whole or sharded by columns or rows. Its textbook twin is reference/layers/linear.py."""
from mpi_impl.comm.reason import Reason
from mpi_impl.kernels import add_to, linear, rows, total
from reference.layers.linear import Linear

INPUT, OUTPUT = Reason("linear", "input"), Reason("linear", "output")


def linear_forward(x, p: Linear):
    """Map x [b, s, n] -> y [b, s, m]."""
    return linear(x, p.w, p.b), x


def linear_backward(dy, p: Linear, x, grads: Linear, sink):
    """Return dx [b, s, n] for dy [b, s, m]."""
    sink(grads.w, x, dy)
    grads.b[...] += total(rows(dy))
    return linear(dy, p.w.T)


def column_parallel_forward(x, p: Linear, gather_output, region):
    """Map x [b, s, n], outside the region -> y [b, s, m/t], or [b, s, m] on every rank with gather_output."""
    entered = region.enter(x, INPUT)                         # f
    y = linear(entered, p.w, p.b)                            # [b, s, n] @ [n, m/t] -> [b, s, m/t]
    return (region.gather(y, OUTPUT) if gather_output else y), region.keep(x, entered)


def column_parallel_backward(dy, p: Linear, kept, gather_output, grads: Linear, sink, region):
    """Return dx [b, s, n], outside the region, for dy, in the layout of the forward's y."""
    if gather_output:
        dy = region.gather_backward(dy, OUTPUT)
    sink(grads.w, region.enter_again(kept, INPUT), dy)
    grads.b[...] += total(rows(dy))
    return region.enter_backward(linear(dy, p.w.T), INPUT)   # f, backward


def row_parallel_forward(x, p: Linear, region):
    """Map x [b, s, n/t], each rank's own -> y [b, s, m], outside the region."""
    y = region.leave(linear(x, p.w), OUTPUT)                 # g of [b, s, n/t] @ [n/t, m] -> [b, s, m]
    return add_to(y, p.b), x                                 # the bias once, after the sum


def row_parallel_backward(dy, p: Linear, x, grads: Linear, sink, region):
    """Return dx [b, s, n/t], each rank's own, for dy [b, s, m], outside the region."""
    grads.b[...] += total(rows(dy))
    dy = region.leave_backward(dy, OUTPUT)                   # g, backward
    sink(grads.w, x, dy)
    return linear(dy, p.w.T)
