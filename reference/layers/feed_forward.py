"""The second branch of a block: an MLP, or experts in its place. A layer's tensors tell which."""
from reference.layer_context import TRAINING
from reference.layers.branches import (mlp_branch_backward, mlp_branch_forward, mlp_branch_tensors,
                                       sharded_mlp_branch_backward, sharded_mlp_branch_forward)
from reference.layers.experts import (Experts, experts_backward, experts_forward, experts_tensors,
                                      sharded_experts_backward, sharded_experts_forward)


def feed_forward_tensors(c, layer):
    """Declare the tensors of a layer for a ModelConfig."""
    return experts_tensors(c) if c.has_experts(layer) else mlp_branch_tensors(c)


def feed_forward_forward(x, p, c, context=TRAINING):
    """Map x [b, s, h] -> y [b, s, h]. c is the ModelConfig, `context` the layer's LayerContext."""
    return experts_forward(x, p, c, context) if isinstance(p, Experts) else mlp_branch_forward(x, p, c)


def feed_forward_backward(dy, p, cache, c):
    """Return dx [b, s, h] and the gradients for dy [b, s, h]."""
    return (experts_backward if isinstance(p, Experts) else mlp_branch_backward)(dy, p, cache, c)


def sharded_feed_forward_forward(xs, shards, c, region, context=TRAINING):
    """Map each rank's input x [b, s, h] to its output y [b, s, h]; both use the layout outside the region."""
    if isinstance(shards[0], Experts):
        return sharded_experts_forward(xs, shards, c, region, context)
    return sharded_mlp_branch_forward(xs, shards, c, region)


def sharded_feed_forward_backward(dys, shards, cache, c, region):
    """Return each rank's dx [b, s, h] and gradients for its dy [b, s, h]; both use the layout outside the region."""
    backward = sharded_experts_backward if isinstance(shards[0], Experts) else sharded_mlp_branch_backward
    return backward(dys, shards, cache, c, region)
