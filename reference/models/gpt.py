"""GPT: embedding, L blocks, a final layer norm, logits and loss (Radford et al. 2019; Shoeybi et al. 2019).

The same functions run the whole model or a stage of it, which is any contiguous range of layers: what a stage holds
tells what it does. The stage with layer 0 embeds tokens; the one with layer L - 1 computes the loss.

Logits read the word table of the embedding unless the config unties them. A last stage that is not also the first
holds a copy of that tied table, under the same name, `embedding.word`: its gradient is the sum over both copies.
"""
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from reference.config import Recompute
from reference.layers.block import (Block, block_backward, block_forward, block_tensors, norms_backward, norms_forward,
                                    sharded_block_backward, sharded_block_forward)
from reference.layers.cross_entropy import (cross_entropy_backward, cross_entropy_forward,
                                            sharded_cross_entropy_backward, sharded_cross_entropy_forward)
from reference.layers.embedding import (Embedding, embedding_backward, embedding_forward, embedding_tensors,
                                        logits_backward, logits_forward, sharded_embedding_backward,
                                        sharded_embedding_forward, sharded_logits_backward, sharded_logits_forward,
                                        word_tensor)
from reference.layers.layer_norm import layer_norm_backward, layer_norm_forward, layer_norm_tensors
from reference.ops import rotary_cos_sin

KEEP_ALL = Recompute()
KEEP_INPUT = Recompute("full", num_layers=1 << 30)     # of a stage, and nothing else: for what goes forward only


@dataclass(frozen=True)
class GPT:
    """Tensors of a GPT or of a stage, or their gradients. What the stage does not hold is None."""

    embedding: Embedding
    blocks: dict[int, Block]           # by layer number, counted over the whole model
    final_layernorm: Any               # a LayerNorm, or None
    output: Any                        # word table of untied logits [V, h], split by rows


class LayersCache(NamedTuple):
    """Of layers that follow one another: the cache of each, or only what went in, for them to be computed again."""

    layers: list[int]
    caches: dict[int, Any] | None    # by layer
    x: Any                           # [b, s, h]; a list of them in the sharded model; None where the caches are kept


class GPTCache(NamedTuple):
    """The caches of what a stage holds; the others are None."""

    embedding: Any
    layers: list[LayersCache]
    head: Any                # final layer norm, logits, loss
    rotary: Any              # with the next one, what layers that are computed again need beside their input
    dropout: Any


def gpt_tensors(c, layers=None):
    """Declares the tensors of the stage that has these layers, a range; of the whole model without one."""
    layers = range(c.num_layers) if layers is None else layers
    first, last = 0 in layers, c.num_layers - 1 in layers
    tied = not c.untie_embeddings_and_output_weights
    everything = embedding_tensors(c)
    return GPT(Embedding(everything.word if first or (last and tied) else None, everything.position if first else None),
               {layer: block_tensors(c) for layer in layers},
               layer_norm_tensors(c) if last else None,
               word_tensor(c) if last and not tied else None)


def gpt_stage(p, layers):
    """Of a rank's tensors, which may be several stages', those of the stage with these layers: the same arrays."""
    return replace(p, blocks={layer: p.blocks[layer] for layer in layers})


def gpt_join(parts):
    """The whole model from ranks that hold different layers of it. A tied word table is that of the first stage."""
    first, last = (next(p for p in parts if held(p) is not None)
                   for held in (lambda p: p.blocks.get(0), lambda p: p.final_layernorm))
    blocks = {layer: block for p in parts for layer, block in p.blocks.items()}
    return GPT(first.embedding, dict(sorted(blocks.items())), last.final_layernorm, last.output)


def gpt_forward(x, p, c, targets, dropout=None, recompute=KEEP_ALL):
    """Tokens [b, s], or the x [b, s, h] of the stage before -> loss [b, s], or the x [b, s, h] for the next stage.

    c is the ModelConfig. `targets` [b, s] are the tokens to predict; only the last stage looks at them. `dropout` is
    the microbatch's Dropout, or None where nothing is dropped; `recompute` says which activations are not kept.
    """
    x, cache = hidden_forward(x, p, c, dropout, recompute)
    if has_head(p, c):
        x, head = head_forward(x, p, c, targets)
        cache = cache._replace(head=head)
    return x, cache


def gpt_backward(dy, p, cache, c):
    """dloss [b, s], or dx of the next stage [b, s, h] -> dx [b, s, h], None for tokens; and the gradients, as a GPT."""
    dword = doutput = final_layernorm = dposition = None
    if has_head(p, c):
        dy, final_layernorm, dtable = head_backward(dy, p, cache.head)
        dword, doutput = (dtable, None) if p.output is None else (None, dtable)
    blocks: dict[int, Block] = {}
    for kept in reversed(cache.layers):
        dy, grads = layers_backward(dy, p, kept, cache, c)
        blocks |= grads
    if has_embedding(p):
        embedding = embedding_backward(dy, p.embedding, cache.embedding)
        dy, dposition = None, embedding.position
        dword = embedding.word if dword is None else embedding.word + dword
    return dy, GPT(Embedding(dword, dposition), {layer: blocks[layer] for layer in p.blocks}, final_layernorm, doutput)


def hidden_forward(x, p, c, dropout, recompute):
    """All of a stage but the head: -> x [b, s, h] and its caches."""
    embedding, kept = None, []
    if has_embedding(p):
        x, embedding = embedding_forward(x, p.embedding, dropout)
    rotary = stage_rotary(x, c, x.shape[1])
    for layers, again in recompute.groups(p.blocks):
        y, caches = blocks_forward(x, layers, p, c, rotary, dropout, recompute.selective, keep=not again)
        kept.append(LayersCache(layers, None, x) if again else LayersCache(layers, caches, None))
        x = y
    return x, GPTCache(embedding, kept, None, rotary, dropout)


def blocks_forward(x, layers, p, c, rotary, dropout, selective=False, keep=True):
    """Some layers of a stage, in order: x [b, s, h] -> [b, s, h], and the cache of each layer, if they are kept."""
    caches = {}
    for layer in layers:
        x, cache = block_forward(x, p.blocks[layer], c, rotary, dropout and dropout.at(layer), selective)
        if keep:
            caches[layer] = cache
        del cache                    # what is not kept is gone before the next layer's is there
    return x, caches


def layers_backward(dy, p, kept, cache, c):
    """Of layers whose caches were kept, or are computed again: dy [b, s, h] -> dx, and gradients by layer."""
    layers, caches, x = kept
    if caches is None:
        _, caches = blocks_forward(x, layers, p, c, cache.rotary, cache.dropout)
    grads = {}
    for layer in reversed(layers):
        dy, grads[layer] = block_backward(dy, p.blocks[layer], caches[layer], c)
    return dy, grads


def head_forward(x, p, c, targets):
    """x [b, s, h] -> loss [b, s]."""
    normed, norm = layer_norm_forward(x, p.final_layernorm, c.layernorm_epsilon)
    logits, logits_cache = logits_forward(normed, output_table(p), c.vocab_size)
    loss, loss_cache = cross_entropy_forward(logits, targets)
    return loss, (norm, logits_cache, loss_cache)


def head_backward(dloss, p, cache):
    """dloss [b, s] -> dx [b, s, h], and the gradients of the final layer norm and of the word table."""
    norm, logits_cache, loss_cache = cache
    dlogits = cross_entropy_backward(dloss, loss_cache)
    dnormed, dtable = logits_backward(dlogits, output_table(p), logits_cache)
    dx, final_layernorm = layer_norm_backward(dnormed, p.final_layernorm, norm)
    return dx, final_layernorm, dtable


def gpt_logits(x, p, c):
    """Tokens [b, s], or the x of the stage before -> logits [b, s, V], or the x for the next stage: for sampling."""
    x, _ = hidden_forward(x, p, c, None, KEEP_INPUT)
    if not has_head(p, c):
        return x
    normed, _ = layer_norm_forward(x, p.final_layernorm, c.layernorm_epsilon)
    return logits_forward(normed, output_table(p), c.vocab_size)[0]


def has_embedding(p):
    return 0 in p.blocks


def has_head(p, c):
    return c.num_layers - 1 in p.blocks


def output_table(p):
    """The word table that gives the logits: the embedding's own, or that of an untied output layer."""
    return p.embedding.word if p.output is None else p.output


def stage_rotary(x, c, s):
    """rope's cos and sin for s positions, like x, shared by all layers; None where positions are learned."""
    return rotary_cos_sin(s, c.rotary_size, x) if c.position_embedding_type == "rope" else None


# ---- the whole model on t ranks -----------------------------------------------------------------------------------


def sharded_gpt_forward(tokens, shards, c, targets, region, dropout=None, recompute=KEEP_ALL):
    """tokens, targets [b, s] -> loss [b, s], all alike on all ranks; `shards` are the whole model's."""
    xs, embedding = sharded_embedding_forward(tokens, [p.embedding for p in shards], region, dropout)
    rotary, kept = stage_rotary(xs[0], c, tokens.shape[1]), []
    for layers, again in recompute.groups(shards[0].blocks):
        ys, caches = sharded_blocks_forward(xs, layers, shards, c, rotary, region, dropout, recompute.selective,
                                            keep=not again)
        kept.append(LayersCache(layers, None, xs) if again else LayersCache(layers, caches, None))
        xs = ys
    normed, norm = norms_forward(xs, [p.final_layernorm for p in shards], c)
    logits, logits_cache = sharded_logits_forward(normed, [output_table(p) for p in shards], c.vocab_size, region)
    loss, loss_cache = sharded_cross_entropy_forward(logits, targets)
    return loss, GPTCache(embedding, kept, (norm, logits_cache, loss_cache), rotary, dropout)


def sharded_blocks_forward(xs, layers, shards, c, rotary, region, dropout, selective=False, keep=True):
    """Some layers, in order: each rank's x [b, s, h], as it is outside the regions -> likewise, and the caches."""
    caches = {}
    for layer in layers:
        xs, cache = sharded_block_forward(xs, [p.blocks[layer] for p in shards], c, rotary, region,
                                          dropout and dropout.at(layer), selective)
        if keep:
            caches[layer] = cache
    return xs, caches


def sharded_gpt_backward(dloss, shards, cache, c, region):
    """dloss [b, s], alike on all ranks -> each rank's gradients."""
    norm, logits_cache, loss_cache = cache.head
    dlogits = sharded_cross_entropy_backward(dloss, loss_cache)
    dnormed, dtables = sharded_logits_backward(dlogits, [output_table(p) for p in shards], logits_cache, region)
    dxs, final_layernorms = norms_backward(dnormed, [p.final_layernorm for p in shards], norm)
    blocks: list[dict] = [dict.fromkeys(p.blocks) for p in shards]
    for layers, caches, xs in reversed(cache.layers):
        if caches is None:
            _, caches = sharded_blocks_forward(xs, layers, shards, c, cache.rotary, region, cache.dropout)
        for layer in reversed(layers):
            dxs, grads = sharded_block_backward(dxs, [p.blocks[layer] for p in shards], caches[layer], c, region)
            for rank, grad in enumerate(grads):
                blocks[rank][layer] = grad
    embeddings = sharded_embedding_backward(dxs, [p.embedding for p in shards], cache.embedding, region)
    if c.untie_embeddings_and_output_weights:
        grads = [GPT(*one) for one in zip(embeddings, blocks, final_layernorms, dtables)]
    else:
        grads = [GPT(Embedding(e.word + dtable, e.position), b, norm, None)
                 for e, b, norm, dtable in zip(embeddings, blocks, final_layernorms, dtables)]
    return region.complete(grads, gpt_tensors(c))
