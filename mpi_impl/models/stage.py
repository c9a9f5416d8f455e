"""The backbone of a model, or of a stage of it, on one tensor-parallel rank: everything but the head.

Its textbook twin is reference/models/stage.py. `p` and `grads` are trees of units, which are `materialized` for as long
as they are used (units.py).
"""
from contextlib import closing

from mpi_impl.layers.block import block_backward, block_forward
from mpi_impl.layers.embedding import embedding_backward, embedding_forward
from mpi_impl.models.units import in_turn, materialized
from reference.layer_context import LayerContext
from reference.models.stage import LayersCache, StageCache, StageInputs, has_embedding, stage_rotary


def backbone_forward(x, p, c, inputs: StageInputs, region, context: LayerContext):
    """Map the x of the stage before, if there is one, to x [b, s, h], outside the regions; and return the caches."""
    embedding, kept = None, []
    if has_embedding(p):
        with materialized(p.embedding) as tables:
            x, embedding = embedding_forward(inputs.tokens, tables, region, context, inputs.token_types)
            del tables               # or this name would keep them until the function returns
    rotary = stage_rotary(x, c, context.runs(slice(0, region.length(x))))
    context = context._replace(rotary=rotary, lengths=inputs.lengths)
    with closing(in_turn(p.blocks, p.blocks)) as blocks:
        for layers, recompute in context.groups(p.blocks):
            y, caches = blocks_forward(x, layers, blocks, c, region, context, keep=not recompute)
            kept.append(LayersCache(layers, None, x) if recompute else LayersCache(layers, caches, None))
            x = y
    return x, StageCache(embedding, kept, None, context)


def backbone_backward(dy, p, cache: StageCache, c, grads, sink, region):
    """Map dy [b, s, h] to dx [b, s, h], or None for tokens; and add to the gradients."""
    with closing(in_turn(p.blocks, [layer for kept in reversed(cache.layers) for layer in turns(kept)])) as blocks:
        for kept in reversed(cache.layers):
            dy = layers_backward(dy, blocks, kept, cache, c, grads, sink, region)
    if has_embedding(p):
        with materialized(grads.embedding) as dembedding:
            embedding_backward(dy, cache.embedding, dembedding, region)
        sink.done(grads.embedding)
        return None
    return dy


def blocks_forward(x, layers, blocks, c, region, context: LayerContext, keep=True):
    """Run some layers of a stage, whose parameters `blocks` yields in turn: x [b, s, h] -> [b, s, h], and the caches.
    """
    caches = {}
    for layer in layers:
        x, cache = block_forward(x, next(blocks), c, region, context.at(layer))
        if keep:
            caches[layer] = cache
        del cache                    # free it before the next layer makes its own
    return x, caches


def layers_backward(dy, blocks, kept, cache, c, grads, sink, region):
    """Map dy [b, s, h] to dx through layers whose caches were kept, or are computed again."""
    layers, caches, x = kept
    if caches is None:
        x, caches = forward_again(x, layers[:-1], blocks, cache, c, region)
    for layer in reversed(layers):
        block = next(blocks)
        if layer not in caches:     # the last layer: its parameters serve its forward and its backward
            caches |= forward_again(x, [layer], iter([block]), cache, c, region)[1]
            sink.recomputed(caches)
        with materialized(grads.blocks[layer]) as dblock:
            dy = block_backward(dy, block, caches[layer], c, dblock, sink, region)
        sink.done(grads.blocks[layer])
        del block, dblock       # or their buffers would live until the next layer's are there
    return dy


def turns(kept):
    """Return the order in which layers_backward needs the parameters of its layers."""
    layers, caches, _ = kept
    return [*(layers[:-1] if caches is None else []), *reversed(layers)]


def forward_again(x, layers, blocks, cache, c, region):
    """Repeat blocks_forward, dropout's masks included. What it sends is a phase of its own in the ledger."""
    with region.group.ledger.phase("recompute"):
        return blocks_forward(x, layers, blocks, c, region, cache.context)
