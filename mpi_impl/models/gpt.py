"""GPT, or a stage of it, on one tensor-parallel rank. Its textbook twin is reference/models/gpt.py.

`p` and `grads` are trees of units: `opened`, a unit is a tree of tensors (parallel/units.py).
"""
from contextlib import closing

from mpi_impl.arrays import narrowed, widened
from mpi_impl.layers.block import block_backward, block_forward
from mpi_impl.layers.cross_entropy import cross_entropy_backward, cross_entropy_forward
from mpi_impl.layers.embedding import embedding_backward, embedding_forward, logits_backward, logits_forward
from mpi_impl.layers.layer_norm import layer_norm_backward, layer_norm_forward
from mpi_impl.parallel.units import in_turn, opened
from reference.models.gpt import (GPT, KEEP_ALL, KEEP_INPUT, GPTCache, LayersCache, has_embedding, has_head,
                                  output_table, stage_rotary)


def gpt_forward(x, p: GPT, c, targets, region, dropout=None, recompute=KEEP_ALL):
    """Tokens [b, s], or the x [b, s, h] of the stage before -> loss [b, s], or the x [b, s, h] for the next stage."""
    x, cache = hidden_forward(x, p, c, region, dropout, recompute)
    if has_head(p, c):
        x, head = head_forward(x, p, c, targets, region)
        cache = cache._replace(head=head)
    return x, cache


def gpt_backward(dy, p: GPT, cache, c, grads: GPT, sink, region):
    """dloss [b, s], or dx of the next stage [b, s, h] -> dx [b, s, h], or None for tokens.

    `sink.done(...)` is told which units have all that this microbatch gives them.
    """
    if has_head(p, c):
        dy = head_backward(dy, p, cache.head, grads, sink, region)
    with closing(in_turn(p.blocks, [layer for kept in reversed(cache.layers) for layer in turns(kept)])) as blocks:
        for kept in reversed(cache.layers):
            dy = layers_backward(dy, blocks, kept, cache, c, grads, sink, region)
    if has_embedding(p):
        with opened(grads.embedding) as dembedding:
            embedding_backward(dy, cache.embedding, dembedding, region)
        sink.done(grads.embedding)
        return None
    return dy


def hidden_forward(x, p: GPT, c, region, dropout, recompute):
    """All of a stage but the head: -> x [b, s, h] and its caches."""
    embedding, kept = None, []
    if has_embedding(p):
        with opened(p.embedding) as tables:
            x, embedding = embedding_forward(x, tables, region, dropout)
            del tables               # or they would be there for as long as this function runs
    rotary = stage_rotary(x, c, region.length(x))
    with closing(in_turn(p.blocks, p.blocks)) as blocks:
        for layers, again in recompute.groups(p.blocks):
            y, caches = blocks_forward(x, layers, blocks, c, rotary, region, dropout, recompute.selective,
                                       keep=not again)
            kept.append(LayersCache(layers, None, x) if again else LayersCache(layers, caches, None))
            x = y
    return x, GPTCache(embedding, kept, None, rotary, dropout)


def blocks_forward(x, layers, blocks, c, rotary, region, dropout, selective=False, keep=True):
    """Some layers of a stage, whose parameters `blocks` gives in turn: x [b, s, h] -> [b, s, h], and their caches."""
    caches = {}
    for layer in layers:
        x, cache = block_forward(x, next(blocks), c, rotary, region, dropout and dropout.at(layer), selective)
        if keep:
            caches[layer] = cache
        del cache                    # what is not kept is gone before the next layer's is there
    return x, caches


def layers_backward(dy, blocks, kept, cache, c, grads: GPT, sink, region):
    """Of layers whose caches were kept, or are computed again: dy [b, s, h] -> dx. For `blocks` see blocks_forward."""
    layers, caches, x = kept
    if caches is None:
        x, caches = forward_again(x, layers[:-1], blocks, cache, c, region)
    for layer in reversed(layers):
        block = next(blocks)
        if layer not in caches:     # the last one's forward comes here, while its parameters are there for both
            caches |= forward_again(x, [layer], iter([block]), cache, c, region)[1]
            sink.recomputed(caches)
        with opened(grads.blocks[layer]) as dblock:
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
        return blocks_forward(x, layers, blocks, c, cache.rotary, region, cache.dropout)


def head_forward(x, p: GPT, c, targets, region):
    """x [b, s, h], outside the regions -> loss [b, s], alike on all ranks, in float32 at least (or not, on request)."""
    with opened(p.final_layernorm) as norm, opened(output_table(p)) as word:
        normed, norm_cache = layer_norm_forward(x, norm, c.layernorm_epsilon)
        logits, logits_cache = logits_forward(normed, word, c.vocab_size, region)
    if not c.fp16_lm_cross_entropy:
        logits = widened(logits)
    loss, loss_cache = cross_entropy_forward(logits, targets, region.group)
    return loss, (norm_cache, logits_cache, loss_cache)


def head_backward(dloss, p: GPT, cache, grads: GPT, sink, region):
    """dloss [b, s] -> dx [b, s, h], outside the regions."""
    norm_cache, logits_cache, loss_cache = cache
    dlogits = cross_entropy_backward(dloss, loss_cache)
    with (opened(p.final_layernorm) as norm, opened(output_table(p)) as word,
          opened(grads.final_layernorm) as dnorm, opened(output_table(grads)) as dword):
        dlogits = narrowed(dlogits, word.dtype)
        dnormed = logits_backward(dlogits, word, logits_cache, dword, sink, region)
        dx = layer_norm_backward(dnormed, norm, norm_cache, dnorm)
    sink.done(grads.final_layernorm, output_table(grads))
    return dx


def gpt_logits(x, p: GPT, c, region):
    """Tokens [b, s], or the x of the stage before -> this rank's logits [b, s, V/t], or the x for the next stage."""
    x, _ = hidden_forward(x, p, c, region, None, KEEP_INPUT)
    if not has_head(p, c):
        return x
    with opened(p.final_layernorm) as norm, opened(output_table(p)) as word:
        normed, _ = layer_norm_forward(x, norm, c.layernorm_epsilon)
        return logits_forward(normed, word, c.vocab_size, region)[0]
