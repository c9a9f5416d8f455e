"""The two branches of a block on one tensor-parallel rank. Its textbook twin is reference/layers/branches.py."""
from mpi_impl.layers.attention import attention_backward, attention_forward
from mpi_impl.layers.gated_mlp import gated_mlp_backward, gated_mlp_forward
from mpi_impl.layers.grouped_attention import grouped_attention_backward, grouped_attention_forward
from mpi_impl.layers.mlp import mlp_backward, mlp_forward
from reference.layer_context import TRAINING
from reference.layers.gated_mlp import GatedMLP
from reference.layers.grouped_attention import GroupedAttention


def attention_branch_forward(x, p, c, region, context=TRAINING):
    """Map x [b, s, h] to y [b, s, h], both outside the region. c is the ModelConfig."""
    if isinstance(p, GroupedAttention):
        return grouped_attention_forward(x, p, c, region, context)
    return attention_forward(x, p, c.causal, region, context)


def attention_branch_backward(dy, p, cache, grads, sink, region):
    """Return dx [b, s, h] for dy [b, s, h], both outside the region."""
    backward = grouped_attention_backward if isinstance(p, GroupedAttention) else attention_backward
    return backward(dy, p, cache, grads, sink, region)


def mlp_branch_forward(x, p, c, region):
    """Map x [b, s, h] to y [b, s, h], both outside the region. c is the ModelConfig."""
    return gated_mlp_forward(x, p, region) if isinstance(p, GatedMLP) else mlp_forward(x, p, c.activation, region)


def mlp_branch_backward(dy, p, cache, c, grads, sink, region):
    """Return dx [b, s, h] for dy [b, s, h], both outside the region."""
    if isinstance(p, GatedMLP):
        return gated_mlp_backward(dy, p, cache, grads, sink, region)
    return mlp_backward(dy, p, cache, c.activation, grads, sink, region)
