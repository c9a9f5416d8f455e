"""All of a model, or of a stage of it, but the head, on one tensor-parallel rank. Its textbook twin is
reference/models/stage.py.

`p` and `grads` are trees of units: `materialized`, a unit is a tree of tensors (parallel/units.py).
"""
from contextlib import closing

from mpi_impl.layers.block import block_backward, block_forward
from mpi_impl.layers.embedding import embedding_backward, embedding_forward
from mpi_impl.models.units import in_turn, materialized
from reference.models.stage import LayersCache, StageCache, StageInputs, has_embedding, stage_rotary


def backbone_forward(x, p, c, inputs: StageInputs, region, dropout, recompute):
    """The x of the stage before, if there is one -> x [b, s, h], outside the regions, and its caches."""
    embedding, kept = None, []
    if has_embedding(p):
        with materialized(p.embedding) as tables:
            x, embedding = embedding_forward(inputs.tokens, tables, region, dropout, inputs.token_types, inputs.first)
            del tables               # or they would be there for as long as this function runs
    rotary = stage_rotary(x, c, region.length(x), inputs.first)
    with closing(in_turn(p.blocks, p.blocks)) as blocks:
        for layers, again in recompute.groups(p.blocks):
            y, caches = blocks_forward(x, layers, blocks, c, rotary, region, dropout, inputs.lengths,
                                       recompute.selective, not again, inputs.kv_cache)
            kept.append(LayersCache(layers, None, x) if again else LayersCache(layers, caches, None))
            x = y
    return x, StageCache(embedding, kept, None, rotary, dropout, inputs.lengths)


def backbone_backward(dy, p, cache: StageCache, c, grads, sink, region):
    """dy [b, s, h] -> dx [b, s, h], or None for tokens."""
    with closing(in_turn(p.blocks, [layer for kept in reversed(cache.layers) for layer in turns(kept)])) as blocks:
        for kept in reversed(cache.layers):
            dy = layers_backward(dy, blocks, kept, cache, c, grads, sink, region)
    if has_embedding(p):
        with materialized(grads.embedding) as dembedding:
            embedding_backward(dy, cache.embedding, dembedding, region)
        sink.done(grads.embedding)
        return None
    return dy


def blocks_forward(x, layers, blocks, c, rotary, region, dropout, lengths, selective=False, keep=True, kv_cache=None):
    """Some layers of a stage, whose parameters `blocks` gives in turn: x [b, s, h] -> [b, s, h], and their caches."""
    caches = {}
    for layer in layers:
        x, cache = block_forward(x, next(blocks), c, rotary, region, dropout and dropout.at(layer), selective, lengths,
                                 kv_cache and kv_cache[layer])
        if keep:
            caches[layer] = cache
        del cache                    # what is not kept is gone before the next layer's is there
    return x, caches


def layers_backward(dy, blocks, kept, cache, c, grads, sink, region):
    """Of layers whose caches were kept, or are computed again: dy [b, s, h] -> dx. For `blocks` see blocks_forward."""
    layers, caches, x = kept
    if caches is None:
        x, caches = forward_again(x, layers[:-1], blocks, cache, c, region)
    for layer in reversed(layers):
        block = next(blocks)
        if layer not in caches:     # the last one's forward comes here, while its parameters are there for both
            caches |= forward_again(x, [layer], iter([block]), cache, c, region)[1]
            sink.recomputed(caches)
        with materialized(grads.blocks[layer]) as dblock:
            dy = block_backward(dy, block, caches[layer], c, dblock, sink, region)
        sink.done(grads.blocks[layer])
        del block, dblock       # or their buffers would live until the next layer's are there
    return dy


def turns(kept):
    """The order in which layers_backward needs the parameters of its layers."""
    layers, caches, _ = kept
    return [*(layers[:-1] if caches is None else []), *reversed(layers)]


def forward_again(x, layers, blocks, cache, c, region):
    """blocks_forward as it was, masks included. What it sends is a phase of its own in the ledger."""
    with region.group.ledger.phase("recompute"):
        return blocks_forward(x, layers, blocks, c, cache.rotary, region, cache.dropout, cache.lengths)
