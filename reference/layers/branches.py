"""The two branches of a block: the kinds of attention and of MLP that a model may choose.

Attention is GPT's (attention.py) or Llama's (grouped_attention.py), the MLP is plain (mlp.py) or has a gate
(gated_mlp.py). A model's config chooses when tensors are declared; from then on their type tells which kind it is.
"""
from reference.layer_context import TRAINING
from reference.layers.attention import (attention_backward, attention_forward, attention_tensors,
                                        sharded_attention_backward, sharded_attention_forward)
from reference.layers.gated_mlp import (GatedMLP, gated_mlp_backward, gated_mlp_forward, gated_mlp_tensors,
                                        sharded_gated_mlp_backward, sharded_gated_mlp_forward)
from reference.layers.grouped_attention import (GroupedAttention, grouped_attention_backward, grouped_attention_forward,
                                                grouped_attention_tensors, sharded_grouped_attention_backward,
                                                sharded_grouped_attention_forward)
from reference.layers.mlp import mlp_backward, mlp_forward, mlp_tensors, sharded_mlp_backward, sharded_mlp_forward

# ---- attention ------------------------------------------------------------------------------------------------------


def attention_branch_tensors(c):
    """Declare the tensors for a ModelConfig."""
    return grouped_attention_tensors(c) if c.grouped_attention else attention_tensors(c)


def attention_branch_forward(x, p, c, context=TRAINING):
    """Map x [b, s, h] to y [b, s, h]. c is the ModelConfig, `context` the layer's LayerContext."""
    if isinstance(p, GroupedAttention):
        return grouped_attention_forward(x, p, c, context)
    return attention_forward(x, p, c.causal, context)


def attention_branch_backward(dy, p, cache):
    """Return dx [b, s, h] and the gradients, of the type of p, for dy [b, s, h]."""
    return (grouped_attention_backward if isinstance(p, GroupedAttention) else attention_backward)(dy, p, cache)


def sharded_attention_branch_forward(xs, shards, c, region, context=TRAINING):
    """Map each rank's input x [b, s, h] to its output y [b, s, h]; both use the layout outside the region."""
    if isinstance(shards[0], GroupedAttention):
        return sharded_grouped_attention_forward(xs, shards, c, region, context)
    return sharded_attention_forward(xs, shards, c.causal, region, context)


def sharded_attention_branch_backward(dys, shards, cache, region):
    """Return each rank's dx [b, s, h] and gradients for its dy [b, s, h]; both use the layout outside the region."""
    backward = (sharded_grouped_attention_backward if isinstance(shards[0], GroupedAttention) else
                sharded_attention_backward)
    return backward(dys, shards, cache, region)


# ---- the MLP --------------------------------------------------------------------------------------------------------


def mlp_branch_tensors(c):
    """Declare the tensors for a ModelConfig."""
    return gated_mlp_tensors(c) if c.swiglu else mlp_tensors(c)


def mlp_branch_forward(x, p, c):
    """Map x [b, s, h] to y [b, s, h]. c is the ModelConfig."""
    return gated_mlp_forward(x, p) if isinstance(p, GatedMLP) else mlp_forward(x, p, c.activation)


def mlp_branch_backward(dy, p, cache, c):
    """Return dx [b, s, h] and the gradients, of the type of p, for dy [b, s, h]."""
    return gated_mlp_backward(dy, p, cache) if isinstance(p, GatedMLP) else mlp_backward(dy, p, cache, c.activation)


def sharded_mlp_branch_forward(xs, shards, c, region):
    """Map each rank's input x [b, s, h] to its output y [b, s, h]; both use the layout outside the region."""
    if isinstance(shards[0], GatedMLP):
        return sharded_gated_mlp_forward(xs, shards, region)
    return sharded_mlp_forward(xs, shards, c.activation, region)


def sharded_mlp_branch_backward(dys, shards, cache, c, region):
    """Return each rank's dx [b, s, h] and gradients for its dy [b, s, h]; both use the layout outside the region."""
    if isinstance(shards[0], GatedMLP):
        return sharded_gated_mlp_backward(dys, shards, cache, region)
    return sharded_mlp_backward(dys, shards, cache, c.activation, region)
