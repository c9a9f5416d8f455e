"""The transformer block on one tensor-parallel rank. Its textbook twin is reference/layers/block.py."""
from mpi_impl import kernels
from mpi_impl.layers.layer import layer_backward, layer_forward
from reference.layer_context import TRAINING
from reference.layers.block import AFTER_ATTENTION, AFTER_MLP, Block, BlockCache, residual
from reference.layers.layer_norm import LayerNorm


def block_forward(x, p: Block, c, region, context=TRAINING):
    """Map x [b, s, h] to [b, s, h], both outside the regions. c is the ModelConfig."""
    dropout = context.dropout
    normed, norm_1 = layer_forward(x, p.input_layernorm, c.layernorm_epsilon)
    y, attention = layer_forward(normed, p.attention, c, region, context)
    (x, mask_1), (normed, norm_2) = add_branch_and_norm(residual(x, normed, c), y, p.post_attention_layernorm,
                                                        c.layernorm_epsilon, region, dropout, AFTER_ATTENTION)
    y, mlp = layer_forward(normed, p.mlp, c, region, context)
    x, mask_2 = add_branch(residual(x, normed, c), y, region, dropout, AFTER_MLP)
    return x, BlockCache(norm_1, attention, mask_1, norm_2, mlp, mask_2)


def block_backward(dy, p: Block, cache, c, grads: Block, sink, region):
    """Return dx [b, s, h] for dy [b, s, h], both outside the regions."""
    masked = kernels.dropout_backward(dy, cache.mlp_mask)
    dnormed = layer_backward(masked, p.mlp, cache.mlp, c, grads.mlp, sink, region)
    dy = residual_backward(dy, dnormed, p.post_attention_layernorm, cache.post_attention_layernorm, c,
                           grads.post_attention_layernorm)
    masked = kernels.dropout_backward(dy, cache.attention_mask)
    dnormed = layer_backward(masked, p.attention, cache.attention, c, grads.attention, sink, region)
    return residual_backward(dy, dnormed, p.input_layernorm, cache.input_layernorm, c, grads.input_layernorm)


def residual_backward(dy, dnormed, p, cache, c, grads):
    """Return dx of a norm; dy came around the branch, dnormed, which is overwritten, through it."""
    if c.apply_residual_connection_post_layernorm:
        return layer_backward(kernels.add_to(dnormed, dy), p, cache, grads)
    return layer_backward(dnormed, p, cache, grads, dy)


def add_branch(x, y, region, dropout, site):
    """Add the branch y to the residual, and return the dropout mask of this rank's positions. Overwrites y."""
    return kernels.add_branch(y, x, local_site(site, x, region, dropout))


def add_branch_and_norm(x, y, norm, epsilon, region, dropout, site):
    """Return add_branch's results, and the norm of the sum with its cache: one kernel on a GPU for a layer norm."""
    if isinstance(norm, LayerNorm):
        return kernels.add_branch_and_norm(y, x, local_site(site, x, region, dropout), norm.weight, norm.bias, epsilon)
    summed, mask = add_branch(x, y, region, dropout, site)
    return (summed, mask), layer_forward(summed, norm, epsilon)


def local_site(site, x, region, dropout):
    """Return the dropout site of this rank's positions."""
    return dropout and dropout.hidden(site, region.positions(x))
