"""The backbone of every model, embedding and blocks: of the whole model, or of a stage, a contiguous range of layers.

The tensors that a stage holds determine what it does. The stage with layer 0 embeds tokens; the stage with layer L - 1
has the head, which differs from model to model (gpt.py, bert.py). Every model's tree has the fields `embedding`,
`blocks` (by layer number), and `final_layernorm` with what follows it; what a stage does not hold is None.

Logits use the word table of the embedding unless the config unties them. A last stage that is not also the first
holds a copy of that tied table, under the same name, `embedding.word`: its gradient is the sum over both copies.
"""
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from reference.layer_context import LayerContext
from reference.layers.block import block_backward, block_forward, sharded_block_backward, sharded_block_forward
from reference.layers.embedding import (Embedding, embedding_backward, embedding_forward, embedding_tensors,
                                        sharded_embedding_backward, sharded_embedding_forward)
from reference.layers.rope import rotary_cos_sin
from reference.models.blocks import blocks_tensors, gradients_of_blocks, join_blocks


class StageInputs(NamedTuple):
    """The part of a batch that a stage reads, besides the x of the stage before."""

    tokens: Any              # [b, s]
    token_types: Any = None  # [b, s], for BERT
    lengths: Any = None      # [b]: the samples' lengths, with padding after them; None without padding


class LayersCache(NamedTuple):
    """The caches of consecutive layers; or only their input, from which the backward computes the caches again."""

    layers: list[int]
    caches: dict[int, Any] | None    # by layer
    x: Any                           # [b, s, h]; a list of them in the sharded model; None where the caches are kept


class StageCache(NamedTuple):
    """The caches of what a stage holds; the others are None."""

    embedding: Any
    layers: list[LayersCache]
    head: Any                # final layer norm, logits, loss
    context: LayerContext    # for the layers that are computed again


# ---- which tensors --------------------------------------------------------------------------------------------------


def stage_tensors(c, layers):
    """Declare embedding and blocks of the stage with these layers, a range: every model begins with them."""
    first, last = 0 in layers, c.num_layers - 1 in layers
    everything = embedding_tensors(c)
    embedding = everything if first else Embedding(everything.word if last and c.tied else None, None)
    return {"embedding": embedding, "blocks": blocks_tensors(c, layers)}


def stage_of(p, layers):
    """Return the tree of one stage out of a rank's tree, which may hold several stages: the same arrays."""
    return replace(p, blocks={layer: p.blocks[layer] for layer in layers})


def join_stages(parts):
    """Return the whole model from ranks that hold different layers, with the first stage's copy of a tied table."""
    first, last = (next(p for p in parts if held(p) is not None)
                   for held in (lambda p: p.blocks.get(0), lambda p: p.final_layernorm))
    return replace(last, embedding=first.embedding, blocks=join_blocks([p.blocks for p in parts]))


def has_embedding(p):
    """Report whether a stage embeds tokens."""
    return 0 in p.blocks


def has_head(p, c):
    """Report whether a stage computes the losses."""
    return c.num_layers - 1 in p.blocks


# ---- the backbone: forward and backward without the head ------------------------------------------------------------


def backbone_forward(x, p, c, inputs, context):
    """Map the x [b, s, h] of the stage before, if there is one, to x [b, s, h]; and return the caches.

    `inputs` is a StageInputs, `context` the microbatch's LayerContext.
    """
    embedding, kept = None, []
    if has_embedding(p):
        x, embedding = embedding_forward(inputs.tokens, p.embedding, context, inputs.token_types)
    context = context._replace(rotary=stage_rotary(x, c, context.runs(slice(0, x.shape[1]))), lengths=inputs.lengths)
    for layers, recompute in context.groups(p.blocks):
        y, caches = blocks_forward(x, layers, p, c, context, keep=not recompute)
        kept.append(LayersCache(layers, None, x) if recompute else LayersCache(layers, caches, None))
        x = y
    return x, StageCache(embedding, kept, None, context)


def backbone_backward(dy, p, cache, c):
    """Map dy [b, s, h] to dx [b, s, h], or None for tokens; and return the gradients of embedding and blocks.

    A stage that does not embed returns an Embedding without tables.
    """
    embedding, blocks = Embedding(None, None), dict[int, Any]()
    for kept in reversed(cache.layers):
        dy, grads = layers_backward(dy, p, kept, cache, c)
        blocks |= grads
    if has_embedding(p):
        dy, embedding = None, embedding_backward(dy, p.embedding, cache.embedding)
    return dy, embedding, gradients_of_blocks(p.blocks, blocks)


def blocks_forward(x, layers, p, c, context, keep=True):
    """Run some layers of a stage, in order: x [b, s, h] -> [b, s, h], and each layer's cache, if they are kept."""
    caches = {}
    for layer in layers:
        x, cache = block_forward(x, p.blocks[layer], c, context.at(layer))
        if keep:
            caches[layer] = cache
        del cache                    # free it before the next layer makes its own
    return x, caches


def layers_backward(dy, p, kept, cache, c):
    """Map dy [b, s, h] to dx and to gradients by layer: of layers whose caches were kept, or are computed again."""
    layers, caches, x = kept
    if caches is None:
        _, caches = blocks_forward(x, layers, p, c, cache.context)
    grads = {}
    for layer in reversed(layers):
        dy, grads[layer] = block_backward(dy, p.blocks[layer], caches[layer], c)
    return dy, grads


def add_table(embedding, dtable):
    """Add the word table's gradient from the logits to that from the embedding; either may be None."""
    if dtable is None:
        return embedding
    return replace(embedding, word=dtable if embedding.word is None else embedding.word + dtable)


def stage_rotary(x, c, runs):
    """Return rope's cos and sin for these runs of positions, like x, for all layers; None for learned positions."""
    if c.position_embedding_type != "rope":
        return None
    cos, sin = zip(*[rotary_cos_sin(run.stop - run.start, c.rotary_size, x, c.rotary_base, run.start, c.rope_scaling)
                     for run in runs])
    return np.concatenate(cos), np.concatenate(sin)


# ---- the whole model on t ranks -------------------------------------------------------------------------------------


def sharded_backbone_forward(shards, c, inputs, region, context):
    """Return each rank's x [b, s, h], as it is outside the regions, and the caches; `shards` are the whole model's."""
    xs, embedding = sharded_embedding_forward(inputs.tokens, [p.embedding for p in shards], region, context,
                                              inputs.token_types)
    rotary = stage_rotary(xs[0], c, [slice(0, inputs.tokens.shape[1])])
    context = context._replace(rotary=rotary, lengths=inputs.lengths)
    kept = []
    for layers, recompute in context.groups(shards[0].blocks):
        ys, caches = sharded_blocks_forward(xs, layers, shards, c, region, context, keep=not recompute)
        kept.append(LayersCache(layers, None, xs) if recompute else LayersCache(layers, caches, None))
        xs = ys
    return xs, StageCache(embedding, kept, None, context)


def sharded_backbone_backward(dxs, shards, cache, c, region):
    """Map each rank's dx [b, s, h], as it is outside the regions, to its gradients of embedding and blocks."""
    blocks: list[dict] = [dict.fromkeys(p.blocks) for p in shards]
    for layers, caches, xs in reversed(cache.layers):
        if caches is None:
            _, caches = sharded_blocks_forward(xs, layers, shards, c, region, cache.context)
        for layer in reversed(layers):
            dxs, grads = sharded_block_backward(dxs, [p.blocks[layer] for p in shards], caches[layer], c, region)
            for rank, grad in enumerate(grads):
                blocks[rank][layer] = grad
    return (sharded_embedding_backward(dxs, [p.embedding for p in shards], cache.embedding, region),
            [gradients_of_blocks(p.blocks, grads) for p, grads in zip(shards, blocks)])


def sharded_blocks_forward(xs, layers, shards, c, region, context, keep=True):
    """Run some layers, in order: map each rank's x [b, s, h], as it is outside the regions; and return the caches."""
    caches = {}
    for layer in layers:
        xs, cache = sharded_block_forward(xs, [p.blocks[layer] for p in shards], c, region, context.at(layer))
        if keep:
            caches[layer] = cache
    return xs, caches
