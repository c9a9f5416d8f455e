"""RMS norm of one rank's array. Its textbook twin is reference/layers/rms_norm.py."""
from mpi_impl import kernels
from mpi_impl.layers.layer import Layer
from reference.layers.rms_norm import RMSNorm


def rms_norm_forward(x, p: RMSNorm, epsilon):
    """Map x [b, s, h] -> [b, s, h]."""
    return kernels.rms_norm(x, p.weight, epsilon)


def rms_norm_backward(dy, p: RMSNorm, cache, grads: RMSNorm, around=None):
    """Return dx [b, s, h] for dy [b, s, h]. What came around the branch behind the norm is added to it."""
    dx, dweight = kernels.rms_norm_backward(dy, p.weight, cache, around)
    grads.weight[...] += dweight
    return dx


LAYER = Layer(RMSNorm, rms_norm_forward, rms_norm_backward)
