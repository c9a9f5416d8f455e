"""GPT: embedding, L blocks, a final layer norm, logits and loss (Radford et al. 2019; Shoeybi et al. 2019).

The same functions run the whole model or a stage of it. The backbone, all but the head, is in models/stage.py.
"""
from dataclasses import dataclass
from typing import Any

from reference.layer_context import EVALUATION, TRAINING
from reference.layers.block import Block, norms_backward, norms_forward
from reference.layers.cross_entropy import (argmax_token, cross_entropy_backward, cross_entropy_forward,
                                            sharded_cross_entropy_backward, sharded_cross_entropy_forward)
from reference.layers.embedding import (Embedding, logits_backward, logits_forward, sharded_logits_backward,
                                        sharded_logits_forward, word_tensor)
from reference.layers.layer import declare, layer_backward, layer_forward
from reference.models.stage import (StageInputs, add_table, backbone_backward, backbone_forward, has_head,
                                    sharded_backbone_backward, sharded_backbone_forward, stage_tensors)


@dataclass(frozen=True)
class GPT:
    """Tensors of a GPT or of a stage, or their gradients. What the stage does not hold is None."""

    embedding: Embedding
    blocks: dict[int, Block]           # by layer number, counted over the whole model
    final_layernorm: Any               # a norm, or None
    output: Any                        # word table of untied logits [V, h], split by rows


def gpt_tensors(c, layers=None):
    """Declare the tensors of the stage that has these layers, a range; of the whole model without one."""
    layers = range(c.num_layers) if layers is None else layers
    last = c.num_layers - 1 in layers
    return GPT(**stage_tensors(c, layers), final_layernorm=declare("norm", c) if last else None,
               output=word_tensor(c) if last and c.untie_embeddings_and_output_weights else None)


def gpt_forward(x, p, c, targets, context=TRAINING):
    """Map tokens [b, s], or the x [b, s, h] of the stage before, to loss [b, s], or to the x for the next stage.

    c is the ModelConfig. `targets` [b, s] are the tokens to predict; only the last stage looks at them. `context` says
    what is dropped, and what is kept for the backward.
    """
    x, cache = backbone_forward(x, p, c, StageInputs(x), context)
    if has_head(p, c):
        x, head = head_forward(x, p, c, targets)
        cache = cache._replace(head=head)
    return x, cache


def gpt_backward(dy, p, cache, c):
    """Map dloss [b, s], or dx of the next stage [b, s, h], to dx [b, s, h], or None for tokens; return the gradients.
    """
    dword = doutput = final_layernorm = None
    if has_head(p, c):
        dy, final_layernorm, dtable = head_backward(dy, p, cache.head)
        dword, doutput = (dtable, None) if p.output is None else (None, dtable)
    dx, embedding, blocks = backbone_backward(dy, p, cache, c)
    return dx, GPT(add_table(embedding, dword), blocks, final_layernorm, doutput)


def head_forward(x, p, c, targets):
    """Map x [b, s, h] to loss [b, s]."""
    normed, norm = layer_forward(x, p.final_layernorm, c.layernorm_epsilon)
    logits, logits_cache = logits_forward(normed, output_table(p), c.vocab_size)
    loss, loss_cache = cross_entropy_forward(logits, targets)
    return loss, (norm, logits_cache, loss_cache)


def head_backward(dloss, p, cache):
    """Map dloss [b, s] to dx [b, s, h]; return the gradients of the final layer norm and of the word table."""
    norm, logits_cache, loss_cache = cache
    dlogits = cross_entropy_backward(dloss, loss_cache)
    dnormed, dtable = logits_backward(dlogits, output_table(p), logits_cache)
    dx, final_layernorm = layer_backward(dnormed, p.final_layernorm, norm)
    return dx, final_layernorm, dtable


def gpt_logits(x, p, c):
    """Map tokens [b, s], or the x of the stage before, to the logits [b, s, V] of the token after each; or to the x for
    the next stage.
    """
    x, _ = backbone_forward(x, p, c, StageInputs(x), EVALUATION)
    return logits_of(x, p, c) if has_head(p, c) else x


def predicted_tokens(x, p, c):
    """Map tokens [b, s], or the x of the stage before, to the most probable token after each, [b, s], or to the x for
    the next stage.
    """
    x, _ = backbone_forward(x, p, c, StageInputs(x), EVALUATION)
    return argmax_token(logits_of(x, p, c)) if has_head(p, c) else x


def next_logits(x, p, c, kv_cache):
    """Map tokens [b, n], or the x of the stage before, to the logits [b, V] of the token that follows the last, or to
    the x for the next stage. The tokens follow those in `kv_cache`, a KVCache for each of the stage's layers.
    """
    context = EVALUATION._replace(kv_cache=kv_cache)
    x, _ = backbone_forward(x, p, c, StageInputs(x), context)
    return logits_of(context.last(x), p, c)[:, 0] if has_head(p, c) else x


def logits_of(x, p, c):
    """Map x [b, s, h] to logits [b, s, V]."""
    normed, _ = layer_forward(x, p.final_layernorm, c.layernorm_epsilon)
    return logits_forward(normed, output_table(p), c.vocab_size)[0]


def output_table(p):
    """Return the word table of the logits: the embedding's own, or that of an untied output layer."""
    return p.embedding.word if p.output is None else p.output


# ---- the whole model on t ranks -----------------------------------------------------------------------------------


def sharded_gpt_forward(tokens, shards, c, targets, region, context=TRAINING):
    """Map tokens, targets [b, s] to loss [b, s], all identical on every rank; `shards` are the whole model's."""
    xs, cache = sharded_backbone_forward(shards, c, StageInputs(tokens), region, context)
    normed, norm = norms_forward(xs, [p.final_layernorm for p in shards], c)
    logits, logits_cache = sharded_logits_forward(normed, [output_table(p) for p in shards], c.vocab_size, region)
    loss, loss_cache = sharded_cross_entropy_forward(logits, targets)
    return loss, cache._replace(head=(norm, logits_cache, loss_cache))


def sharded_gpt_backward(dloss, shards, cache, c, region):
    """Map dloss [b, s], identical on every rank, to each rank's gradients."""
    norm, logits_cache, loss_cache = cache.head
    dlogits = sharded_cross_entropy_backward(dloss, loss_cache)
    dnormed, dtables = sharded_logits_backward(dlogits, [output_table(p) for p in shards], logits_cache, region)
    dxs, final_layernorms = norms_backward(dnormed, [p.final_layernorm for p in shards], norm)
    embeddings, blocks = sharded_backbone_backward(dxs, shards, cache, c, region)
    if c.untie_embeddings_and_output_weights:
        grads = [GPT(*one) for one in zip(embeddings, blocks, final_layernorms, dtables)]
    else:
        grads = [GPT(add_table(e, dtable), b, norm, None)
                 for e, b, norm, dtable in zip(embeddings, blocks, final_layernorms, dtables)]
    return region.complete(grads, gpt_tensors(c))
