"""The transformer's MLP on one tensor-parallel rank. Its textbook twin is reference/layers/mlp.py."""
from mpi_impl.comm.reason import Reason
from mpi_impl.kernels import activated_linear, activation_backward, add_to, linear, rows, total
from mpi_impl.layers.layer import Layer
from reference.layer_context import TRAINING
from reference.layers.mlp import MLP, MLPCache

INPUT, OUTPUT = Reason("mlp", "input"), Reason("mlp", "output")


def mlp_forward(x, p: MLP, c, region, context=TRAINING):
    """Map x [b, s, h] to y [b, s, h], both outside the region. c is the ModelConfig."""
    entered = region.enter(x, INPUT)                         # f
    a, act_cache = activated_linear(entered, p.w_in, p.b_in, c.activation)   # -> [b, s, 4h/t]
    y = region.leave(linear(a, p.w_out), OUTPUT)             # g of a sum over 4h/t -> [b, s, h]
    add_to(y, p.b_out)                                       # the bias once, after the sum
    return y, MLPCache(region.keep(x, entered), act_cache, a)


def mlp_backward(dy, p: MLP, cache, c, grads: MLP, sink, region):
    """Return dx [b, s, h] for dy [b, s, h], both outside the region."""
    kept, act_cache, a = cache
    # forward: y = g(a @ w_out) + b_out
    grads.b_out[...] += total(rows(dy))
    dy = region.leave_backward(dy, OUTPUT)                   # g, backward
    sink(grads.w_out, a, dy)
    dz, db_in = activation_backward(linear(dy, p.w_out.T), act_cache, c.activation)
    # forward: a = act(f(x) @ w_in + b_in)
    sink(grads.w_in, region.enter_again(kept, INPUT), dz)
    grads.b_in[...] += db_in
    return region.enter_backward(linear(dz, p.w_in.T), INPUT)   # f, backward


LAYER = Layer(MLP, mlp_forward, mlp_backward)
