"""The transformer block, layer norm before each branch (pre-LN): x + attention(norm(x)), then x + mlp(norm(x)).

Under tensor parallelism every rank computes the norms and the residual sums alike, on all of x: cheaper than sending
anything (Shoeybi et al. 2019, section 3). So a block costs two all-reduces forward (g after attention, g after the
MLP) and two backward (f before each).
"""
from dataclasses import dataclass
from typing import Any, NamedTuple

from reference.layers.attention import (Attention, attention_backward, attention_forward, attention_tensors,
                                        sharded_attention_backward, sharded_attention_forward)
from reference.layers.layer_norm import LayerNorm, layer_norm_backward, layer_norm_forward, layer_norm_tensors
from reference.layers.mlp import (MLP, mlp_backward, mlp_forward, mlp_tensors, sharded_mlp_backward,
                                  sharded_mlp_forward)

CAUSAL = True   # a GPT's block: a position sees itself and what is before it


@dataclass(frozen=True)
class Block:
    """Tensors of one transformer block, or their gradients."""

    input_layernorm: LayerNorm
    attention: Attention
    post_attention_layernorm: LayerNorm
    mlp: MLP


class BlockCache(NamedTuple):
    """The caches of the four layers."""

    input_layernorm: Any
    attention: Any
    post_attention_layernorm: Any
    mlp: Any


def block_tensors(c):
    """Declares the tensors for a ModelConfig."""
    return Block(layer_norm_tensors(c), attention_tensors(c), layer_norm_tensors(c), mlp_tensors(c))


def block_forward(x, p, c, rotary):
    """x [b, s, h] -> [b, s, h]. c is the ModelConfig, `rotary` is rope's cos and sin, or None."""
    normed, norm_1 = layer_norm_forward(x, p.input_layernorm, c.layernorm_epsilon)
    y, attention = attention_forward(normed, p.attention, CAUSAL, rotary)
    x = x + y
    normed, norm_2 = layer_norm_forward(x, p.post_attention_layernorm, c.layernorm_epsilon)
    y, mlp = mlp_forward(normed, p.mlp, c.activation)
    return x + y, BlockCache(norm_1, attention, norm_2, mlp)


def block_backward(dy, p, cache, c):
    """dy [b, s, h] -> dx [b, s, h] and the gradients, as a Block. A residual passes dy on, and a branch adds to it."""
    dnormed, mlp = mlp_backward(dy, p.mlp, cache.mlp, c.activation)
    dx, norm_2 = layer_norm_backward(dnormed, p.post_attention_layernorm, cache.post_attention_layernorm)
    dy = dy + dx
    dnormed, attention = attention_backward(dy, p.attention, cache.attention)
    dx, norm_1 = layer_norm_backward(dnormed, p.input_layernorm, cache.input_layernorm)
    return dy + dx, Block(norm_1, attention, norm_2, mlp)


def sharded_block_forward(x, shards, c, rotary):
    """x [b, s, h], alike on all ranks -> [b, s, h], alike on all ranks.

    Norms and residual sums stand here once, for every rank computes the same.
    """
    p, attentions, mlps = shards[0], [shard.attention for shard in shards], [shard.mlp for shard in shards]
    normed, norm_1 = layer_norm_forward(x, p.input_layernorm, c.layernorm_epsilon)
    y, attention = sharded_attention_forward(normed, attentions, CAUSAL, rotary)
    x = x + y
    normed, norm_2 = layer_norm_forward(x, p.post_attention_layernorm, c.layernorm_epsilon)
    y, mlp = sharded_mlp_forward(normed, mlps, c.activation)
    return x + y, BlockCache(norm_1, attention, norm_2, mlp)


def sharded_block_backward(dy, shards, cache, c):
    """dy [b, s, h], alike on all ranks -> dx [b, s, h], alike on all ranks, and each rank's gradients."""
    p, attentions, mlps = shards[0], [shard.attention for shard in shards], [shard.mlp for shard in shards]
    dnormed, mlp = sharded_mlp_backward(dy, mlps, cache.mlp, c.activation)
    dx, norm_2 = layer_norm_backward(dnormed, p.post_attention_layernorm, cache.post_attention_layernorm)
    dy = dy + dx
    dnormed, attention = sharded_attention_backward(dy, attentions, cache.attention)
    dx, norm_1 = layer_norm_backward(dnormed, p.input_layernorm, cache.input_layernorm)
    return dy + dx, [Block(norm_1, a, norm_2, m) for a, m in zip(attention, mlp)]
