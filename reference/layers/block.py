"""The transformer block: twice a norm, a branch that reads it, and a residual connection around the branch.

The residual connection begins before the norm or after it (Shoeybi et al. 2019, figure 7):

    rearranged   x + branch(norm(x))          GPT's order, and the paper's for BERT: the residual stream is never normed
    original     norm(x) + branch(norm(x))    BERT's: the norm that Devlin et al. 2018 put behind a residual sum is here
                                              the beginning of the next branch; the first norm is the embedding's

In training, dropout hides some of a branch's output before it is added. Under tensor parallelism every rank computes
the same norms and residual sums on all of x: cheaper than sending anything (Shoeybi et al. 2019, section 3). So a block
costs two all-reduces forward (g after attention, g after the MLP) and two backward (f before each). Sequence
parallelism splits each in two halves, and computes between them on 1/t of the positions.
"""
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from reference import ops
from reference.activations import Activation, Nested
from reference.layer_context import TRAINING
from reference.layers.layer import declare, layer_backward, layer_forward, sharded_layer_backward, sharded_layer_forward

AFTER_ATTENTION, AFTER_MLP = "attention output", "mlp output"    # names of dropout's sites


@dataclass(frozen=True)
class Block:
    """Tensors of one transformer block, or their gradients."""

    input_layernorm: Any           # a norm
    attention: Any                 # of one of two kinds
    post_attention_layernorm: Any
    mlp: Any                       # an MLP of one of two kinds, or Experts


class BlockCache(NamedTuple):
    """The caches of the four layers, and the dropout masks after each branch; lists of them in the sharded block."""

    input_layernorm: Annotated[Any, Nested("input_layernorm", ops.NormCache)]
    attention: Annotated[Any, Nested("attention")]
    attention_mask: Annotated[Any, Activation("attention.output_mask", inside=False, array=ops.kept_elements)]
    post_attention_layernorm: Annotated[Any, Nested("post_attention_layernorm", ops.NormCache)]
    mlp: Annotated[Any, Nested("mlp")]
    mlp_mask: Annotated[Any, Activation("mlp.output_mask", inside=False, array=ops.kept_elements)]


def block_tensors(c, layer=0):
    """Declare the tensors of a layer for a ModelConfig."""
    mlp = "experts" if c.has_experts(layer) else "mlp"
    return Block(*(declare(name, c) for name in ("norm", "attention", "norm", mlp)))


def block_forward(x, p, c, context=TRAINING):
    """Map x [b, s, h] -> [b, s, h]. c is the ModelConfig, `context` the layer's LayerContext."""
    dropout = context.dropout
    normed, norm_1 = layer_forward(x, p.input_layernorm, c.layernorm_epsilon)
    y, attention = layer_forward(normed, p.attention, c, context)
    y, mask_1 = ops.dropout(y, dropout and dropout.hidden(AFTER_ATTENTION))
    x = residual(x, normed, c) + y
    normed, norm_2 = layer_forward(x, p.post_attention_layernorm, c.layernorm_epsilon)
    y, mlp = layer_forward(normed, p.mlp, c, context)
    y, mask_2 = ops.dropout(y, dropout and dropout.hidden(AFTER_MLP))
    return residual(x, normed, c) + y, BlockCache(norm_1, attention, mask_1, norm_2, mlp, mask_2)


def block_backward(dy, p, cache, c):
    """Return dx [b, s, h] and the gradients, as a Block, for dy [b, s, h]."""
    masked = ops.dropout_backward(dy, cache.mlp_mask)
    dnormed, mlp = layer_backward(masked, p.mlp, cache.mlp, c)
    dy, norm_2 = residual_backward(dy, dnormed, p.post_attention_layernorm, cache.post_attention_layernorm, c)
    masked = ops.dropout_backward(dy, cache.attention_mask)
    dnormed, attention = layer_backward(masked, p.attention, cache.attention, c)
    dx, norm_1 = residual_backward(dy, dnormed, p.input_layernorm, cache.input_layernorm, c)
    return dx, Block(norm_1, attention, norm_2, mlp)


def residual(x, normed, c):
    """Return the array that the residual connection adds to the branch."""
    return normed if c.apply_residual_connection_post_layernorm else x


def residual_backward(dy, dnormed, p, cache, c):
    """Return dx and the norm's gradients; dy came around the branch, dnormed through it."""
    if c.apply_residual_connection_post_layernorm:
        return layer_backward(dnormed + dy, p, cache)
    dx, grads = layer_backward(dnormed, p, cache)
    return dx + dy, grads


# ---- on t ranks -----------------------------------------------------------------------------------------------------


def sharded_block_forward(xs, shards, c, region, context=TRAINING):
    """Map each rank's x [b, s, h] to its output [b, s, h]; both use the layout outside the regions."""
    normed, norm_1 = norms_forward(xs, [p.input_layernorm for p in shards], c)
    ys, attention = sharded_layer_forward(normed, [p.attention for p in shards], c, region, context)
    xs, mask_1 = add_branch(residual(xs, normed, c), ys, region, context.dropout, AFTER_ATTENTION)
    normed, norm_2 = norms_forward(xs, [p.post_attention_layernorm for p in shards], c)
    ys, mlp = sharded_layer_forward(normed, [p.mlp for p in shards], c, region, context)
    xs, mask_2 = add_branch(residual(xs, normed, c), ys, region, context.dropout, AFTER_MLP)
    return xs, BlockCache(norm_1, attention, mask_1, norm_2, mlp, mask_2)


def sharded_block_backward(dys, shards, cache, c, region):
    """Return each rank's dx [b, s, h] and gradients for its dy [b, s, h]; both use the layout outside the regions."""
    masked = [ops.dropout_backward(dy, mask) for dy, mask in zip(dys, cache.mlp_mask)]
    dnormed, mlp = sharded_layer_backward(masked, [p.mlp for p in shards], cache.mlp, c, region)
    dys, norm_2 = residuals_backward(dys, dnormed, [p.post_attention_layernorm for p in shards],
                                     cache.post_attention_layernorm, c)
    masked = [ops.dropout_backward(dy, mask) for dy, mask in zip(dys, cache.attention_mask)]
    dnormed, attention = sharded_layer_backward(masked, [p.attention for p in shards], cache.attention, c, region)
    dxs, norm_1 = residuals_backward(dys, dnormed, [p.input_layernorm for p in shards], cache.input_layernorm, c)
    return dxs, [Block(*grads) for grads in zip(norm_1, attention, norm_2, mlp)]


def residuals_backward(dys, dnormed, shards, caches, c):
    """Apply residual_backward to each rank's arrays."""
    return map(list, zip(*[residual_backward(*one, c) for one in zip(dys, dnormed, shards, caches)]))


def norms_forward(xs, shards, c):
    """Apply a norm to each rank's array."""
    return map(list, zip(*[layer_forward(x, p, c.layernorm_epsilon) for x, p in zip(xs, shards)]))


def norms_backward(dys, shards, caches):
    return map(list, zip(*[layer_backward(*one) for one in zip(dys, shards, caches)]))


def add_branch(xs, ys, region, dropout, site):
    """Add the branch to the residual on each rank; return the sums and the dropout masks of its positions."""
    sums, masks = [], []
    for x, y, positions in zip(xs, ys, region.positions(xs)):
        y, mask = ops.dropout(y, dropout and dropout.hidden(site, positions))
        sums.append(x + y)
        masks.append(mask)
    return sums, masks
