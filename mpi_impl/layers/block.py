"""The transformer block on one tensor-parallel rank. Its textbook twin is reference/layers/block.py."""
from mpi_impl.layers.attention import attention_backward, attention_forward
from mpi_impl.layers.layer_norm import layer_norm_backward, layer_norm_forward
from mpi_impl.layers.mlp import mlp_backward, mlp_forward
from reference.layers.block import CAUSAL, Block, BlockCache


def block_forward(x, p: Block, c, rotary, region):
    """x [b, s, h], alike on all ranks -> [b, s, h], alike on all ranks. c is the ModelConfig."""
    normed, norm_1 = layer_norm_forward(x, p.input_layernorm, c.layernorm_epsilon)
    y, attention = attention_forward(normed, p.attention, CAUSAL, rotary, region)
    x = x + y
    normed, norm_2 = layer_norm_forward(x, p.post_attention_layernorm, c.layernorm_epsilon)
    y, mlp = mlp_forward(normed, p.mlp, c.activation, region)
    return x + y, BlockCache(norm_1, attention, norm_2, mlp)


def block_backward(dy, p: Block, cache, c, grads: Block, sink, region):
    """dy [b, s, h], alike on all ranks -> dx [b, s, h], alike on all ranks."""
    dnormed = mlp_backward(dy, p.mlp, cache.mlp, c.activation, grads.mlp, sink, region)
    dy = dy + layer_norm_backward(dnormed, p.post_attention_layernorm, cache.post_attention_layernorm,
                                  grads.post_attention_layernorm)
    dnormed = attention_backward(dy, p.attention, cache.attention, grads.attention, sink, region)
    return dy + layer_norm_backward(dnormed, p.input_layernorm, cache.input_layernorm, grads.input_layernorm)
