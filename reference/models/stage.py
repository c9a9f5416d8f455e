"""What all models share: embedding and blocks; of the whole model, or of a stage, any contiguous range of its layers.

What a stage holds tells what it does. The one with layer 0 embeds tokens; the one with layer L - 1 has the head, which
differs from model to model (gpt.py, bert.py). Of a model's tensors each holds `embedding`, `blocks` by layer number,
and `final_layernorm` with what follows; what a stage does not hold is None.

Logits read the word table of the embedding unless the config unties them. A last stage that is not also the first
holds a copy of that tied table, under the same name, `embedding.word`: its gradient is the sum over both copies.
"""
from dataclasses import replace
from typing import Any, NamedTuple

from reference.config import Recompute
from reference.kv_cache import length_of
from reference.layers.block import (block_backward, block_forward, block_tensors, sharded_block_backward,
                                    sharded_block_forward)
from reference.layers.embedding import (Embedding, embedding_backward, embedding_forward, embedding_tensors,
                                        sharded_embedding_backward, sharded_embedding_forward)
from reference.ops import rotary_cos_sin

KEEP_ALL = Recompute()
KEEP_INPUT = Recompute("full", num_layers=1 << 30)     # of a stage, and nothing else: for what goes forward only


class StageInputs(NamedTuple):
    """What a stage reads of a batch, beside the x of the stage before."""

    tokens: Any              # [b, s]
    token_types: Any = None  # [b, s], of BERT
    lengths: Any = None      # [b]: what comes after is padding; None where there is none
    kv_cache: Any = None         # in generation, of the stage's layers: the positions before these (a KVCache each)

    @property
    def first(self):
        """The position of the first token."""
        return 0 if self.kv_cache is None else length_of(self.kv_cache)


class LayersCache(NamedTuple):
    """Of layers that follow one another: the cache of each, or only what went in, for them to be computed again."""

    layers: list[int]
    caches: dict[int, Any] | None    # by layer
    x: Any                           # [b, s, h]; a list of them in the sharded model; None where the caches are kept


class StageCache(NamedTuple):
    """The caches of what a stage holds; the others are None."""

    embedding: Any
    layers: list[LayersCache]
    head: Any                # final layer norm, logits, loss
    rotary: Any              # with the next two, what layers that are computed again need beside their input
    dropout: Any
    lengths: Any


# ---- which tensors --------------------------------------------------------------------------------------------------


def stage_tensors(c, layers):
    """Declares embedding and blocks of the stage with these layers, a range: what every model begins with."""
    first, last = 0 in layers, c.num_layers - 1 in layers
    everything = embedding_tensors(c)
    embedding = everything if first else Embedding(everything.word if last and c.tied else None, None)
    return {"embedding": embedding, "blocks": {layer: block_tensors(c) for layer in layers}}


def stage_of(p, layers):
    """Of a rank's tensors, which may be several stages', those of the stage with these layers: the same arrays."""
    return replace(p, blocks={layer: p.blocks[layer] for layer in layers})


def join_stages(parts):
    """The whole model from ranks that hold different layers of it. A tied word table is that of the first stage."""
    first, last = (next(p for p in parts if held(p) is not None)
                   for held in (lambda p: p.blocks.get(0), lambda p: p.final_layernorm))
    blocks = {layer: block for p in parts for layer, block in p.blocks.items()}
    return replace(last, embedding=first.embedding, blocks=dict(sorted(blocks.items())))


def has_embedding(p):
    return 0 in p.blocks


def has_head(p, c):
    return c.num_layers - 1 in p.blocks


# ---- forward and backward, of all but the head ----------------------------------------------------------------------


def backbone_forward(x, p, c, inputs, dropout, recompute):
    """The x of the stage before, if there is one -> x [b, s, h] and its caches. `inputs` is a StageInputs."""
    embedding, kept = None, []
    if has_embedding(p):
        x, embedding = embedding_forward(inputs.tokens, p.embedding, dropout, inputs.token_types, inputs.first)
    rotary = stage_rotary(x, c, x.shape[1], inputs.first)
    for layers, again in recompute.groups(p.blocks):
        y, caches = blocks_forward(x, layers, p, c, rotary, dropout, inputs.lengths, recompute.selective, not again,
                                   inputs.kv_cache)
        kept.append(LayersCache(layers, None, x) if again else LayersCache(layers, caches, None))
        x = y
    return x, StageCache(embedding, kept, None, rotary, dropout, inputs.lengths)


def backbone_backward(dy, p, cache, c):
    """dy [b, s, h] -> dx [b, s, h], None for tokens; and the gradients of embedding and blocks. A stage that does not
    embed has none of the tables.
    """
    embedding, blocks = Embedding(None, None), dict[int, Any]()
    for kept in reversed(cache.layers):
        dy, grads = layers_backward(dy, p, kept, cache, c)
        blocks |= grads
    if has_embedding(p):
        dy, embedding = None, embedding_backward(dy, p.embedding, cache.embedding)
    return dy, embedding, {layer: blocks[layer] for layer in p.blocks}


def blocks_forward(x, layers, p, c, rotary, dropout, lengths, selective=False, keep=True, kv_cache=None):
    """Some layers of a stage, in order: x [b, s, h] -> [b, s, h], and the cache of each layer, if they are kept."""
    caches = {}
    for layer in layers:
        x, cache = block_forward(x, p.blocks[layer], c, rotary, dropout and dropout.at(layer), selective, lengths,
                                 kv_cache and kv_cache[layer])
        if keep:
            caches[layer] = cache
        del cache                    # what is not kept is gone before the next layer's is there
    return x, caches


def layers_backward(dy, p, kept, cache, c):
    """Of layers whose caches were kept, or are computed again: dy [b, s, h] -> dx, and gradients by layer."""
    layers, caches, x = kept
    if caches is None:
        _, caches = blocks_forward(x, layers, p, c, cache.rotary, cache.dropout, cache.lengths)
    grads = {}
    for layer in reversed(layers):
        dy, grads[layer] = block_backward(dy, p.blocks[layer], caches[layer], c)
    return dy, grads


def add_table(embedding, dtable):
    """The gradients of the tables, to that of words added what the logits give it; either may be None."""
    if dtable is None:
        return embedding
    return replace(embedding, word=dtable if embedding.word is None else embedding.word + dtable)


def stage_rotary(x, c, s, first=0):
    """rope's cos and sin for s positions, from `first` on, like x, shared by all layers; None where positions are
    learned.
    """
    return rotary_cos_sin(s, c.rotary_size, x, first=first) if c.position_embedding_type == "rope" else None


# ---- the whole model on t ranks -------------------------------------------------------------------------------------


def sharded_backbone_forward(shards, c, inputs, region, dropout, recompute):
    """-> each rank's x [b, s, h], as it is outside the regions, and its caches; `shards` are the whole model's."""
    xs, embedding = sharded_embedding_forward(inputs.tokens, [p.embedding for p in shards], region, dropout,
                                              inputs.token_types)
    rotary, kept = stage_rotary(xs[0], c, inputs.tokens.shape[1]), []
    for layers, again in recompute.groups(shards[0].blocks):
        ys, caches = sharded_blocks_forward(xs, layers, shards, c, rotary, region, dropout, inputs.lengths,
                                            recompute.selective, keep=not again)
        kept.append(LayersCache(layers, None, xs) if again else LayersCache(layers, caches, None))
        xs = ys
    return xs, StageCache(embedding, kept, None, rotary, dropout, inputs.lengths)


def sharded_backbone_backward(dxs, shards, cache, c, region):
    """Each rank's dx [b, s, h], as it is outside the regions -> its gradients: of the embedding, and of the blocks."""
    blocks: list[dict] = [dict.fromkeys(p.blocks) for p in shards]
    for layers, caches, xs in reversed(cache.layers):
        if caches is None:
            _, caches = sharded_blocks_forward(xs, layers, shards, c, cache.rotary, region, cache.dropout,
                                               cache.lengths)
        for layer in reversed(layers):
            dxs, grads = sharded_block_backward(dxs, [p.blocks[layer] for p in shards], caches[layer], c, region)
            for rank, grad in enumerate(grads):
                blocks[rank][layer] = grad
    return sharded_embedding_backward(dxs, [p.embedding for p in shards], cache.embedding, region), blocks


def sharded_blocks_forward(xs, layers, shards, c, rotary, region, dropout, lengths, selective=False, keep=True):
    """Some layers, in order: each rank's x [b, s, h], as it is outside the regions -> likewise, and the caches."""
    caches = {}
    for layer in layers:
        xs, cache = sharded_block_forward(xs, [p.blocks[layer] for p in shards], c, rotary, region,
                                          dropout and dropout.at(layer), selective, lengths)
        if keep:
            caches[layer] = cache
    return xs, caches
