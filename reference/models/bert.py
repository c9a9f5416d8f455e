"""BERT: embedding, L blocks that look both ways, final layer norm, and heads (Devlin et al. 2018; Shoeybi et al. 2019).

It is trained to predict words that were masked (`lm`) and whether two pieces of text were swapped (`sop`: Lan et al.
2019, section 3.1). It is fine-tuned to choose one of several answers (`choice`), to classify pairs of sentences, by
whether one follows from the other (`entailment`: three classes) or asks the same (`paraphrase`: two), or to find an
answer in a passage (`span`: its first and its last position). ModelConfig.heads says which of these heads it has. The
rest is in models/stage.py; the order of norms and residual connections in layers/block.py.
"""
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference.layer_context import EVALUATION, TRAINING
from reference.layers.block import Block, norms_backward, norms_forward
from reference.layers.cross_entropy import (cross_entropy_backward, cross_entropy_forward,
                                            sharded_cross_entropy_backward, sharded_cross_entropy_forward)
from reference.layers.embedding import Embedding
from reference.layers.heads import (dense_tensors, masked_lm_backward, masked_lm_forward, masked_lm_tensors,
                                    pooled_backward, pooled_forward, sharded_masked_lm_backward,
                                    sharded_masked_lm_forward)
from reference.layers.layer import declare, layer_backward, layer_forward
from reference.layers.linear import linear_backward, linear_forward
from reference.models.stage import (StageInputs, add_table, backbone_backward, backbone_forward, has_head,
                                    sharded_backbone_backward, sharded_backbone_forward, stage_tensors)
from reference.positions import SomePositions

# Of the heads that read the first position: the layer that gives their scores, and how many of a sequence.
CLASSIFIERS = {"sop": "binary_head", "choice": "multichoice_head", "entailment": "entailment_head",
               "paraphrase": "paraphrase_head"}
SCORES = {"sop": 2, "choice": 1, "entailment": 3, "paraphrase": 2}
HEADS = ("final_layernorm", "lm_head", "pooler", *CLASSIFIERS.values(), "span_head")      # what follows the blocks


@dataclass(frozen=True)
class BERT:
    """Tensors of a BERT or of a stage, or their gradients. What the stage, or the model, does not have is None."""

    embedding: Embedding
    blocks: dict[int, Block]           # by layer number, counted over the whole model
    final_layernorm: Any               # a norm
    lm_head: Any                       # a MaskedLMHead
    pooler: Any                        # a Linear [h, h], and those that read what it gives:
    binary_head: Any                   # [h, 2], of the sentences' order
    multichoice_head: Any              # [h, 1], a score for an answer
    entailment_head: Any               # [h, 3]
    paraphrase_head: Any               # [h, 2]
    span_head: Any                     # a Linear [h, 2] that reads every position: does an answer begin, or end, here?


def bert_tensors(c, layers=None):
    """Declare the tensors of the stage that has these layers, a range; of the whole model without one."""
    layers = range(c.num_layers) if layers is None else layers
    last = c.num_layers - 1 in layers
    found: dict[str, Any] = {layer: dense_tensors(c, SCORES[head]) if last and head in c.heads else None
                             for head, layer in CLASSIFIERS.items()}
    return BERT(**stage_tensors(c, layers), final_layernorm=declare("norm", c) if last else None,
                lm_head=masked_lm_tensors(c) if last and "lm" in c.heads else None,
                pooler=dense_tensors(c, c.hidden_size) if any(found.values()) else None, **found,
                span_head=dense_tensors(c, 2) if last and "span" in c.heads else None)


def stage_inputs(batch):
    """Return what the stages read of a batch."""
    return StageInputs(batch.tokens, batch.token_types, batch.lengths)


def bert_forward(x, p, c, batch, context=TRAINING):
    """Map the x [b, s, h] of the stage before, if there is one, to the losses of the heads, or to the x for the next.

    A BERTBatch has losses [b, s], of masked tokens, and [b], of the sentences' order; a ChoiceBatch and a
    ClassBatch [b]; a SpanBatch [b, 2], of an answer's first and last position.
    For the other arguments see gpt_forward.
    """
    x, cache = backbone_forward(x, p, c, stage_inputs(batch), context)
    if has_head(p, c):
        x, head = heads_forward(x, p, c, batch)
        cache = cache._replace(head=head)
    return x, cache


def bert_backward(dy, p, cache, c):
    """Map the gradients of the losses, or dx of the next stage, to dx [b, s, h], or None for tokens; and return the
    gradients of the parameters.
    """
    dword, heads = None, dict.fromkeys(HEADS)
    if has_head(p, c):
        dy, dword, heads = heads_backward(dy, p, cache.head, c)
    dx, embedding, blocks = backbone_backward(dy, p, cache, c)
    return dx, BERT(add_table(embedding, dword), blocks, **heads)


def heads_forward(x, p, c, batch):
    """Map x [b, s, h] to the losses, in the order of c.heads."""
    normed, norm = layer_forward(x, p.final_layernorm, c.layernorm_epsilon)
    losses, caches = [], {}
    for head in c.heads:
        loss, caches[head] = (lm_loss_forward(normed, p, c, batch) if head == "lm" else
                              span_loss_forward(normed, p, batch) if head == "span" else
                              pooled_loss_forward(normed, p, head, batch))
        losses.append(loss)
    return tuple(losses), (norm, caches)


def heads_backward(dlosses, p, cache, c):
    """Return dx [b, s, h], dword [V, h] or None, and the gradients of HEADS by name."""
    norm, caches = cache
    dnormed, dword, grads = np.zeros_like(norm[0]), None, dict.fromkeys(HEADS)
    for head, dloss in reversed(list(zip(c.heads, dlosses))):
        if head == "lm":
            dx, dword, grads["lm_head"] = lm_loss_backward(dloss, p, c, caches[head])
            dnormed += dx
        elif head == "span":
            dx, grads["span_head"] = span_loss_backward(dloss, p, caches[head])
            dnormed += dx
        else:
            dx, grads["pooler"], grads[CLASSIFIERS[head]] = pooled_loss_backward(dloss, p, head, caches[head])
            dnormed[:, :1] += dx
    dx, grads["final_layernorm"] = layer_backward(dnormed, p.final_layernorm, norm)
    return dx, dword, grads


# ---- masked tokens --------------------------------------------------------------------------------------------------


def positions_to_predict(batch, c):
    """Return SomePositions of the batch, with all whose tokens are to be predicted."""
    return SomePositions.with_weight(batch.weights, c.most_predicted(batch.weights.shape[1]))


def lm_loss_forward(normed, p, c, batch):
    """Map normed [b, s, h] to loss [b, s], which is 0 where nothing is predicted."""
    at = positions_to_predict(batch, c)
    logits, cache = masked_lm_forward(normed, p.lm_head, p.embedding.word, c, at)
    loss, loss_cache = cross_entropy_forward(logits, at.gather(batch.targets))
    return at.scatter_losses(loss), (cache, loss_cache)


def lm_loss_backward(dloss, p, c, cache):
    """Map dloss [b, s] to dnormed [b, s, h]; return dword [V, h] and the gradients too, as a MaskedLMHead."""
    head_cache, loss_cache = cache
    dlogits = cross_entropy_backward(head_cache[-1].gather_losses(dloss), loss_cache)
    return masked_lm_backward(dlogits, p.lm_head, p.embedding.word, head_cache, c)


# ---- heads that read the first position -----------------------------------------------------------------------------


def pooled_loss_forward(normed, p, head, batch):
    """Map normed [b, s, h] to loss [b]."""
    scores, cache = pooled_forward(normed, p.pooler, classifier_of(p, head))
    loss, loss_cache = cross_entropy_forward(*logits_and_targets(head, scores, batch))
    return loss, (cache, loss_cache)


def pooled_loss_backward(dloss, p, head, cache):
    """Map dloss [b] to dnormed of the first position, [b, 1, h]; return the gradients of pooler and classifier."""
    head_cache, loss_cache = cache
    dscores = cross_entropy_backward(dloss, loss_cache).reshape(len(head_cache[0]), -1)
    return pooled_backward(dscores, p.pooler, classifier_of(p, head), head_cache)


def logits_and_targets(head, scores, batch):
    """Return a head's logits and targets. The scores of a question's answers, [b n, 1], are its logits, [b, n]; those
    of a sequence's classes are [b, k] already.
    """
    if head == "sop":
        return scores, batch.swapped
    return scores.reshape(len(batch.answers), -1), batch.answers


def classifier_of(p, head):
    """Return the layer that gives a head's scores."""
    return getattr(p, CLASSIFIERS[head])


# ---- the head that finds an answer in a passage ---------------------------------------------------------------------


def span_loss_forward(normed, p, batch):
    """Map normed [b, s, h] to loss [b, 2], of the answer's first and last position (Devlin et al. 2018, section 4.2).
    """
    scores, cache = linear_forward(normed, p.span_head)                       # [b, s, h] @ [h, 2] -> [b, s, 2]
    loss, loss_cache = cross_entropy_forward(span_logits(scores, batch.lengths), batch.answers)
    return loss, (cache, loss_cache)


def span_loss_backward(dloss, p, cache):
    """Map dloss [b, 2] to dnormed [b, s, h]; return the gradients of the head, too."""
    head_cache, loss_cache = cache
    return linear_backward(cross_entropy_backward(dloss, loss_cache).swapaxes(1, 2), p.span_head, head_cache)


def span_logits(scores, lengths):
    """Return the logits [b, 2, s] of scores [b, s, 2]: positions compete, and padding gets minus infinity."""
    real = np.arange(scores.shape[1], like=lengths) < lengths[:, None]        # [b, s]
    return np.where(real[:, None], scores.swapaxes(1, 2), -np.inf)


# ---- predictions of a tuned model -----------------------------------------------------------------------------------


def answer_logits(x, p, c, batch, context=EVALUATION):
    """Map the x [b, s, h] of the stage before, if there is one, to the logits of each sample's answers: [b, n], of
    choices or classes, or [b, 2, s], of the first and the last position; or to the x for the next stage.
    """
    x, _ = backbone_forward(x, p, c, stage_inputs(batch), context)
    if not has_head(p, c):
        return x
    (head,) = c.heads
    normed, _ = layer_forward(x, p.final_layernorm, c.layernorm_epsilon)
    if head == "span":
        return span_logits(linear_forward(normed, p.span_head)[0], batch.lengths)
    return logits_and_targets(head, pooled_forward(normed, p.pooler, classifier_of(p, head))[0], batch)[0]


# ---- the whole model on t ranks -------------------------------------------------------------------------------------


def sharded_bert_forward(batch, shards, c, region, context=TRAINING):
    """Return the losses of the heads, identical on every rank; `shards` are the whole model's."""
    xs, cache = sharded_backbone_forward(shards, c, stage_inputs(batch), region, context)
    normed, norm = norms_forward(xs, [p.final_layernorm for p in shards], c)
    losses, caches = [], {}
    for head in c.heads:
        if head == "lm":
            at = positions_to_predict(batch, c)
            scores, head_cache = sharded_masked_lm_forward(normed, [p.lm_head for p in shards],
                                                           [p.embedding.word for p in shards], c, region, at)
            loss, loss_cache = sharded_cross_entropy_forward(scores, at.gather(batch.targets))
            loss, caches[head] = at.scatter_losses(loss), (head_cache, loss_cache)
        elif head == "span":
            scores, head_cache = zip(*[linear_forward(x, p.span_head) for x, p in zip(normed, shards)])
            logits = span_logits(region.enter(list(scores))[0], batch.lengths)     # the same on every rank
            loss, loss_cache = cross_entropy_forward(logits, batch.answers)
            caches[head] = head_cache, loss_cache
        else:       # of its own first position each rank has something: only that of the sequence's first counts
            found, caches[head] = zip(*[pooled_loss_forward(x, p, head, batch) for x, p in zip(normed, shards)])
            loss = region.of_first_position(list(found))[0]
        losses.append(loss)
    return tuple(losses), cache._replace(head=(norm, caches))


def sharded_bert_backward(dlosses, shards, cache, c, region):
    """Map the gradients of the losses, identical on every rank, to each rank's gradients."""
    norm, caches = cache.head
    dnormed, dwords = [np.zeros_like(normed) for normed, _ in norm], [None] * len(shards)
    grads: dict = {name: [None] * len(shards) for name in HEADS}
    for head, dloss in zip(c.heads, dlosses):
        if head == "lm":
            head_cache, loss_cache = caches[head]
            dscores = sharded_cross_entropy_backward(head_cache[-1].gather_losses(dloss), loss_cache)
            dxs, dwords, grads["lm_head"] = sharded_masked_lm_backward(
                dscores, [p.lm_head for p in shards], [p.embedding.word for p in shards], head_cache, c, region)
            dnormed = [one + dx for one, dx in zip(dnormed, dxs)]
        elif head == "span":        # each rank has the gradients of all scores, and takes those of its own
            head_cache, loss_cache = caches[head]
            dscores = cross_entropy_backward(dloss, loss_cache).swapaxes(1, 2)
            dxs, grads["span_head"] = zip(*[
                linear_backward(dscores[:, own], p.span_head, one)
                for own, p, one in zip(region.positions(dnormed), shards, head_cache)])
            dnormed = [one + dx for one, dx in zip(dnormed, dxs)]
        else:
            of_ranks = region.of_first_position_backward([dloss] * len(shards))
            dxs, grads["pooler"], grads[CLASSIFIERS[head]] = zip(*[
                pooled_loss_backward(one, p, head, cache) for one, p, cache in zip(of_ranks, shards, caches[head])])
            for one, dx in zip(dnormed, dxs):
                one[:, :1] += dx
    dxs, grads["final_layernorm"] = norms_backward(dnormed, [p.final_layernorm for p in shards], norm)
    embeddings, blocks = sharded_backbone_backward(dxs, shards, cache, c, region)
    found = [BERT(add_table(e, dword), *others)
             for e, dword, *others in zip(embeddings, dwords, blocks, *grads.values())]
    return region.complete(found, bert_tensors(c))
