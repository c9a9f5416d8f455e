"""The MLP with a gate on one tensor-parallel rank. Its textbook twin is reference/layers/gated_mlp.py."""
from mpi_impl.comm.reason import Reason
from mpi_impl.kernels import linear, swiglu, swiglu_backward
from mpi_impl.layers.layer import Layer
from reference.layer_context import TRAINING
from reference.layers.gated_mlp import GatedMLP, GatedMLPCache

INPUT, OUTPUT = Reason("mlp", "input"), Reason("mlp", "output")


def gated_mlp_forward(x, p: GatedMLP, c, region, context=TRAINING):
    """Map x [b, s, h] to y [b, s, h], both outside the region."""
    entered = region.enter(x, INPUT)                                          # f
    h, *columns = p.w_in.shape
    z = linear(entered, p.w_in.reshape(h, -1)).reshape(*entered.shape[:-1], *columns)     # [b, s, 2, f/t]
    a, act_cache = swiglu(z)                                                  # [b, s, f/t]
    y = region.leave(linear(a, p.w_out), OUTPUT)                              # g of [b, s, f/t] @ [f/t, h]
    return y, GatedMLPCache(region.keep(x, entered), act_cache, a)


def gated_mlp_backward(dy, p: GatedMLP, cache, c, grads: GatedMLP, sink, region):
    """Return dx [b, s, h] for dy [b, s, h], both outside the region."""
    kept, act_cache, a = cache
    # forward: y = g(a @ w_out)
    dy = region.leave_backward(dy, OUTPUT)                   # g, backward
    sink(grads.w_out, a, dy)
    dz = swiglu_backward(linear(dy, p.w_out.T), act_cache)   # [b, s, 2, f/t]
    # forward: a = swiglu(f(x) @ w_in)
    h, dz = len(p.w_in), dz.reshape(*dz.shape[:-2], -1)
    sink(grads.w_in.reshape(h, -1), region.enter_again(kept, INPUT), dz)
    return region.enter_backward(linear(dz, p.w_in.reshape(h, -1).T), INPUT)   # f, backward


LAYER = Layer(GatedMLP, gated_mlp_forward, gated_mlp_backward)
