"""GPT: embedding, L blocks, a final layer norm, logits and loss (Radford et al. 2019; Shoeybi et al. 2019).

The same functions run the whole model or a stage of it: see models/stage.py, which has all but the head.
"""
from dataclasses import dataclass
from typing import Any

from reference.layers.block import Block, norms_backward, norms_forward
from reference.layers.cross_entropy import (argmax_token, cross_entropy_backward, cross_entropy_forward,
                                            sharded_cross_entropy_backward, sharded_cross_entropy_forward)
from reference.layers.embedding import (Embedding, logits_backward, logits_forward, sharded_logits_backward,
                                        sharded_logits_forward, word_tensor)
from reference.layers.layer_norm import layer_norm_backward, layer_norm_forward, layer_norm_tensors
from reference.models.stage import (KEEP_ALL, KEEP_INPUT, Reads, add_table, has_head, hidden_backward, hidden_forward,
                                    sharded_hidden_backward, sharded_hidden_forward, stage_tensors)


@dataclass(frozen=True)
class GPT:
    """Tensors of a GPT or of a stage, or their gradients. What the stage does not hold is None."""

    embedding: Embedding
    blocks: dict[int, Block]           # by layer number, counted over the whole model
    final_layernorm: Any               # a LayerNorm, or None
    output: Any                        # word table of untied logits [V, h], split by rows


def gpt_tensors(c, layers=None):
    """Declares the tensors of the stage that has these layers, a range; of the whole model without one."""
    layers = range(c.num_layers) if layers is None else layers
    last = c.num_layers - 1 in layers
    return GPT(**stage_tensors(c, layers), final_layernorm=layer_norm_tensors(c) if last else None,
               output=word_tensor(c) if last and c.untie_embeddings_and_output_weights else None)


def gpt_forward(x, p, c, targets, dropout=None, recompute=KEEP_ALL):
    """Tokens [b, s], or the x [b, s, h] of the stage before -> loss [b, s], or the x [b, s, h] for the next stage.

    c is the ModelConfig. `targets` [b, s] are the tokens to predict; only the last stage looks at them. `dropout` is
    the microbatch's Dropout, or None where nothing is dropped; `recompute` says which activations are not kept.
    """
    x, cache = hidden_forward(x, p, c, Reads(x), dropout, recompute)
    if has_head(p, c):
        x, head = head_forward(x, p, c, targets)
        cache = cache._replace(head=head)
    return x, cache


def gpt_backward(dy, p, cache, c):
    """dloss [b, s], or dx of the next stage [b, s, h] -> dx [b, s, h], None for tokens; and the gradients, as a GPT."""
    dword = doutput = final_layernorm = None
    if has_head(p, c):
        dy, final_layernorm, dtable = head_backward(dy, p, cache.head)
        dword, doutput = (dtable, None) if p.output is None else (None, dtable)
    dx, embedding, blocks = hidden_backward(dy, p, cache, c)
    return dx, GPT(add_table(embedding, dword), blocks, final_layernorm, doutput)


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
    """Tokens [b, s], or the x of the stage before -> logits [b, s, V] of the words that follow each, or the x for the
    next stage.
    """
    x, _ = hidden_forward(x, p, c, Reads(x), None, KEEP_INPUT)
    return logits_of(x, p, c) if has_head(p, c) else x


def predicted_tokens(x, p, c):
    """Tokens [b, s], or the x of the stage before -> the likeliest token after each, [b, s]; or the x for the next
    stage.
    """
    x, _ = hidden_forward(x, p, c, Reads(x), None, KEEP_INPUT)
    return argmax_token(logits_of(x, p, c)) if has_head(p, c) else x


def next_logits(x, p, c, past):
    """Tokens [b, n], or the x of the stage before -> logits [b, V] of the word that follows the last, or the x for the
    next stage: for generation. The tokens follow those that `past`, the stage's layers', has seen; it takes these in.
    """
    x, _ = hidden_forward(x, p, c, Reads(x, past=past), None, KEEP_INPUT)
    return logits_of(x[:, -1:].copy(), p, c)[:, 0] if has_head(p, c) else x


def logits_of(x, p, c):
    """x [b, s, h] -> logits [b, s, V]."""
    normed, _ = layer_norm_forward(x, p.final_layernorm, c.layernorm_epsilon)
    return logits_forward(normed, output_table(p), c.vocab_size)[0]


def output_table(p):
    """The word table that gives the logits: the embedding's own, or that of an untied output layer."""
    return p.embedding.word if p.output is None else p.output


# ---- the whole model on t ranks -----------------------------------------------------------------------------------


def sharded_gpt_forward(tokens, shards, c, targets, region, dropout=None, recompute=KEEP_ALL):
    """tokens, targets [b, s] -> loss [b, s], all alike on all ranks; `shards` are the whole model's."""
    xs, cache = sharded_hidden_forward(shards, c, Reads(tokens), region, dropout, recompute)
    normed, norm = norms_forward(xs, [p.final_layernorm for p in shards], c)
    logits, logits_cache = sharded_logits_forward(normed, [output_table(p) for p in shards], c.vocab_size, region)
    loss, loss_cache = sharded_cross_entropy_forward(logits, targets)
    return loss, cache._replace(head=(norm, logits_cache, loss_cache))


def sharded_gpt_backward(dloss, shards, cache, c, region):
    """dloss [b, s], alike on all ranks -> each rank's gradients."""
    norm, logits_cache, loss_cache = cache.head
    dlogits = sharded_cross_entropy_backward(dloss, loss_cache)
    dnormed, dtables = sharded_logits_backward(dlogits, [output_table(p) for p in shards], logits_cache, region)
    dxs, final_layernorms = norms_backward(dnormed, [p.final_layernorm for p in shards], norm)
    embeddings, blocks = sharded_hidden_backward(dxs, shards, cache, c, region)
    if c.untie_embeddings_and_output_weights:
        grads = [GPT(*one) for one in zip(embeddings, blocks, final_layernorms, dtables)]
    else:
        grads = [GPT(add_table(e, dtable), b, norm, None)
                 for e, b, norm, dtable in zip(embeddings, blocks, final_layernorms, dtables)]
    return region.complete(grads, gpt_tensors(c))
