"""The second branch of a block on one tensor-parallel rank: an MLP, or experts in its place. Its textbook twin is
reference/layers/feed_forward.py.
"""
from mpi_impl.layers.branches import mlp_branch_backward, mlp_branch_forward
from mpi_impl.layers.experts import experts_backward, experts_forward
from reference.layer_context import TRAINING
from reference.layers.experts import Experts


def feed_forward_forward(x, p, c, region, context=TRAINING):
    """Map x [b, s, h] to y [b, s, h], both outside the region. c is the ModelConfig."""
    if isinstance(p, Experts):
        return experts_forward(x, p, c, region, context)
    return mlp_branch_forward(x, p, c, region)


def feed_forward_backward(dy, p, cache, c, grads, sink, region):
    """Return dx [b, s, h] for dy [b, s, h], both outside the region."""
    backward = experts_backward if isinstance(p, Experts) else mlp_branch_backward
    return backward(dy, p, cache, c, grads, sink, region)
