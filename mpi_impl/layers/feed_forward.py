"""The second branch of a block on one tensor-parallel rank: an MLP, or experts in its place. Its textbook twin is
reference/layers/feed_forward.py.
"""
from mpi_impl.layers.experts import experts_backward, experts_forward
from mpi_impl.layers.mlp import mlp_backward, mlp_forward
from reference.layer_context import TRAINING
from reference.layers.experts import Experts


def feed_forward_forward(x, p, c, region, context=TRAINING):
    """Map x [b, s, h] to y [b, s, h], both outside the region. c is the ModelConfig."""
    if isinstance(p, Experts):
        return experts_forward(x, p, c, region, context)
    return mlp_forward(x, p, c.activation, region)


def feed_forward_backward(dy, p, cache, c, grads, sink, region):
    """Return dx [b, s, h] for dy [b, s, h], both outside the region."""
    if isinstance(p, Experts):
        return experts_backward(dy, p, cache, c, grads, sink, region)
    return mlp_backward(dy, p, cache, c.activation, grads, sink, region)
