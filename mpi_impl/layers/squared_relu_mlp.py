"""The MLP with a squared ReLU on one rank. Its textbook twin is reference/layers/squared_relu_mlp.py."""
from mpi_impl.comm.reason import Reason
from mpi_impl.kernels import linear, relu
from mpi_impl.layers.layer import Layer
from reference.layer_context import TRAINING
from reference.layers.squared_relu_mlp import SquaredReLUMLP, SquaredReLUMLPCache

INPUT, OUTPUT = Reason("mlp", "input"), Reason("mlp", "output")


def squared_relu_mlp_forward(x, p: SquaredReLUMLP, c, region, context=TRAINING):
    """Map x [b, s, h] to y [b, s, h], both outside the region."""
    entered = region.enter(x, INPUT)                                       # f
    rectified, _ = relu(linear(entered, p.w_in))                           # [b, s, h] @ [h, f/t] -> [b, s, f/t]
    y = region.leave(linear(rectified * rectified, p.w_out), OUTPUT)       # g of [b, s, f/t] @ [f/t, h]
    return y, SquaredReLUMLPCache(region.keep(x, entered), rectified)


def squared_relu_mlp_backward(dy, p: SquaredReLUMLP, cache, c, grads: SquaredReLUMLP, sink, region):
    """Return dx [b, s, h] for dy [b, s, h], both outside the region."""
    kept, rectified = cache
    # forward: y = g(rectified^2 @ w_out)
    dy = region.leave_backward(dy, OUTPUT)                                 # g, backward
    sink(grads.w_out, rectified * rectified, dy)
    dz = linear(dy, p.w_out.T) * rectified * 2                             # [b, s, f/t]
    # forward: rectified = relu(f(x) @ w_in)
    sink(grads.w_in, region.enter_again(kept, INPUT), dz)
    return region.enter_backward(linear(dz, p.w_in.T), INPUT)              # f, backward


LAYER = Layer(SquaredReLUMLP, squared_relu_mlp_forward, squared_relu_mlp_backward)
