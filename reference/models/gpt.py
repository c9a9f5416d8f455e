"""GPT: embedding, L blocks, a final layer norm, logits and loss (Radford et al. 2019; Shoeybi et al. 2019).

The same functions run the whole model or a stage of it, which is any contiguous range of layers: what a stage holds
tells what it does. The stage with layer 0 embeds tokens; the one with layer L - 1 computes the loss.

Logits read the word table of the embedding unless the config unties them. A last stage that is not also the first
holds a copy of that tied table, under the same name, `embedding.word`: its gradient is the sum over both copies.
"""
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from reference.layers.block import (Block, block_backward, block_forward, block_tensors, sharded_block_backward,
                                    sharded_block_forward)
from reference.layers.cross_entropy import (cross_entropy_backward, cross_entropy_forward,
                                            sharded_cross_entropy_backward, sharded_cross_entropy_forward)
from reference.layers.embedding import (Embedding, embedding_backward, embedding_forward, embedding_tensors,
                                        logits_backward, logits_forward, sharded_embedding_backward,
                                        sharded_embedding_forward, sharded_logits_backward, sharded_logits_forward,
                                        word_tensor)
from reference.layers.layer_norm import layer_norm_backward, layer_norm_forward, layer_norm_tensors
from reference.ops import rotary_cos_sin


@dataclass(frozen=True)
class GPT:
    """Tensors of a GPT or of a stage, or their gradients. What the stage does not hold is None."""

    embedding: Embedding
    blocks: dict[int, Block]           # by layer number, counted over the whole model
    final_layernorm: Any               # a LayerNorm, or None
    output: Any                        # word table of untied logits [V, h], split by rows


class GPTCache(NamedTuple):
    """The caches of what a stage holds; the others are None."""

    embedding: Any
    blocks: dict[int, Any]   # by layer number
    head: Any                # final layer norm, logits, loss


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


def gpt_forward(x, p, c, targets):
    """Tokens [b, s], or the x [b, s, h] of the stage before -> loss [b, s], or the x [b, s, h] for the next stage.

    c is the ModelConfig. `targets` [b, s] are the tokens to predict; only the last stage looks at them.
    """
    x, embedding, blocks = hidden_forward(x, p, c)
    head = None
    if has_head(p, c):
        x, head = head_forward(x, p, c, targets)
    return x, GPTCache(embedding, blocks, head)


def gpt_backward(dy, p, cache, c):
    """dloss [b, s], or dx of the next stage [b, s, h] -> dx [b, s, h], None for tokens; and the gradients, as a GPT."""
    dword = doutput = final_layernorm = dposition = None
    if has_head(p, c):
        dy, final_layernorm, dtable = head_backward(dy, p, cache.head)
        dword, doutput = (dtable, None) if p.output is None else (None, dtable)
    blocks = {}
    for layer in reversed(p.blocks):
        dy, blocks[layer] = block_backward(dy, p.blocks[layer], cache.blocks[layer], c)
    if has_embedding(p):
        embedding = embedding_backward(dy, p.embedding, cache.embedding)
        dy, dposition = None, embedding.position
        dword = embedding.word if dword is None else embedding.word + dword
    return dy, GPT(Embedding(dword, dposition), {layer: blocks[layer] for layer in p.blocks}, final_layernorm, doutput)


def gpt_logits(x, p, c):
    """Tokens [b, s], or the x of the stage before -> logits [b, s, V], or the x for the next stage: for sampling."""
    x, _, _ = hidden_forward(x, p, c)
    if not has_head(p, c):
        return x
    normed, _ = layer_norm_forward(x, p.final_layernorm, c.layernorm_epsilon)
    return logits_forward(normed, output_table(p), c.vocab_size)[0]


def hidden_forward(x, p, c):
    """All of a stage but the head: -> x [b, s, h] and the caches of embedding and blocks."""
    embedding, blocks = None, {}
    if has_embedding(p):
        x, embedding = embedding_forward(x, p.embedding)
    rotary = stage_rotary(x, c)
    for layer, block in p.blocks.items():
        x, blocks[layer] = block_forward(x, block, c, rotary)
    return x, embedding, blocks


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


def has_embedding(p):
    return 0 in p.blocks


def has_head(p, c):
    return c.num_layers - 1 in p.blocks


def output_table(p):
    """The word table that gives the logits: the embedding's own, or that of an untied output layer."""
    return p.embedding.word if p.output is None else p.output


def stage_rotary(x, c):
    """rope's cos and sin for the s positions of x [b, s, h], shared by all layers; None where positions are learned."""
    return rotary_cos_sin(x.shape[1], c.rotary_size, x) if c.position_embedding_type == "rope" else None


# ---- the whole model on t ranks -----------------------------------------------------------------------------------


def sharded_gpt_forward(tokens, shards, c, targets):
    """tokens, targets [b, s] -> loss [b, s], all alike on all ranks; `shards` are the whole model's."""
    x, embedding = sharded_embedding_forward(tokens, [p.embedding for p in shards])
    rotary, blocks = stage_rotary(x, c), {}
    for layer in shards[0].blocks:
        x, blocks[layer] = sharded_block_forward(x, [p.blocks[layer] for p in shards], c, rotary)
    normed, norm = layer_norm_forward(x, shards[0].final_layernorm, c.layernorm_epsilon)
    logits, logits_cache = sharded_logits_forward(normed, [output_table(p) for p in shards], c.vocab_size)
    loss, loss_cache = sharded_cross_entropy_forward(logits, targets)
    return loss, GPTCache(embedding, blocks, (norm, logits_cache, loss_cache))


def sharded_gpt_backward(dloss, shards, cache, c):
    """dloss [b, s], alike on all ranks -> each rank's gradients."""
    norm, logits_cache, loss_cache = cache.head
    dlogits = sharded_cross_entropy_backward(dloss, loss_cache)
    dnormed, dtables = sharded_logits_backward(dlogits, [output_table(p) for p in shards], logits_cache)
    dx, final_layernorm = layer_norm_backward(dnormed, shards[0].final_layernorm, norm)
    grads = {}
    for layer in reversed(shards[0].blocks):
        dx, grads[layer] = sharded_block_backward(dx, [p.blocks[layer] for p in shards], cache.blocks[layer], c)
    blocks = [{layer: grads[layer][rank] for layer in p.blocks} for rank, p in enumerate(shards)]
    embeddings = sharded_embedding_backward(dx, [p.embedding for p in shards], cache.embedding)
    if c.untie_embeddings_and_output_weights:
        return [GPT(e, b, final_layernorm, dtable) for e, b, dtable in zip(embeddings, blocks, dtables)]
    return [GPT(Embedding(e.word + dtable, e.position), b, final_layernorm, None)
            for e, b, dtable in zip(embeddings, blocks, dtables)]
