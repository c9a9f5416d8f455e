"""Layer normalisation of one rank's array. Its textbook twin is reference/layers/layer_norm.py."""
from mpi_impl import kernels
from mpi_impl.layers.layer import Layer
from reference.layers.layer_norm import LayerNorm


def layer_norm_forward(x, p: LayerNorm, epsilon):
    """Map x [b, s, h] -> [b, s, h]."""
    return kernels.layer_norm(x, p.weight, p.bias, epsilon)


def layer_norm_backward(dy, p: LayerNorm, cache, grads: LayerNorm, around=None):
    """Return dx [b, s, h] for dy [b, s, h]. What came around the branch behind the norm is added to it."""
    dx, dweight, dbias = kernels.layer_norm_backward(dy, p.weight, cache, around)
    grads.weight[...] += dweight
    grads.bias[...] += dbias
    return dx


LAYER = Layer(LayerNorm, layer_norm_forward, layer_norm_backward)
