"""BERT, or a stage of it, on one tensor-parallel rank. Its textbook twin is reference/models/bert.py.

`p` and `grads` are trees of units, which are `materialized` for as long as they are used (units.py).
"""
import numpy as np

from mpi_impl.comm.reason import Reason
from mpi_impl.layers.cross_entropy import cross_entropy_backward, cross_entropy_forward
from mpi_impl.layers.heads import masked_lm_backward, masked_lm_forward, pooled_backward, pooled_forward
from mpi_impl.layers.layer import layer_backward, layer_forward
from mpi_impl.layers.linear import linear_backward, linear_forward
from mpi_impl.models.stage import backbone_backward, backbone_forward
from mpi_impl.models.units import materialized
from mpi_impl.runtime.arrays import narrowed, widened
from reference.layer_context import EVALUATION, TRAINING
from reference.layers import cross_entropy as textbook
from reference.models.bert import BERT, classifier_of, logits_and_targets, span_logits, stage_inputs
from reference.models.stage import has_head
from reference.positions import SomePositions, collect, take, zigzag

SPAN = Reason("span", "scores")


def bert_forward(x, p: BERT, c, batch, region, context=TRAINING):
    """Map the x [b, s, h] of the stage before, if there is one, to the losses of the heads, or to the x for the next.
    """
    x, cache = backbone_forward(x, p, c, stage_inputs(batch), region, context)
    if has_head(p, c):
        x, head = heads_forward(x, p, c, batch, region)
        cache = cache._replace(head=head)
    return x, cache


def bert_backward(dy, p: BERT, cache, c, grads: BERT, sink, region):
    """Map the gradients of the losses, or dx of the next stage, to dx [b, s, h], or None for tokens.

    `sink.done(...)` is called with the units whose gradients are complete for this microbatch.
    """
    if has_head(p, c):
        dy = heads_backward(dy, p, cache.head, c, grads, sink, region)
    return backbone_backward(dy, p, cache, c, grads, sink, region)


def heads_forward(x, p: BERT, c, batch, region):
    """Map x [b, s, h], outside the regions, to the losses, identical on every rank, in float32 at least (or not, on
    request).
    """
    with materialized(p.final_layernorm) as norm:
        normed, norm_cache = layer_forward(x, norm, c.layernorm_epsilon)
        del norm                     # or this name would keep it until the function returns
    losses, caches = [], {}
    for head in c.heads:
        loss, caches[head] = (lm_loss_forward(normed, p, c, batch, region) if head == "lm" else
                              span_loss_forward(normed, p, batch, region) if head == "span" else
                              pooled_loss_forward(normed, p, head, batch, region))
        losses.append(loss)
    return tuple(losses), (norm_cache, caches)


def heads_backward(dlosses, p: BERT, cache, c, grads: BERT, sink, region):
    """Return dx [b, s, h], outside the regions."""
    norm_cache, caches = cache
    dnormed = np.zeros_like(norm_cache[0])
    for head, dloss in reversed(list(zip(c.heads, dlosses))):
        if head == "lm":
            dnormed += lm_loss_backward(dloss, p, c, caches[head], grads, sink, region)
        elif head == "span":
            dnormed += span_loss_backward(dloss, p, caches[head], grads, sink, region)
        else:
            dnormed[:, :1] += pooled_loss_backward(dloss, p, head, caches[head], grads, sink, region)
    with materialized(p.final_layernorm) as norm, materialized(grads.final_layernorm) as dnorm:
        dx = layer_backward(dnormed, norm, norm_cache, dnorm)
    sink.done(grads.final_layernorm)
    return dx


# ---- masked tokens --------------------------------------------------------------------------------------------------


def positions_to_predict(batch, c, region):
    """Return SomePositions of this rank's part of the batch, with all that are to be predicted."""
    ranks = region.context_ranks.size if region.context_ranks else 1
    return SomePositions.with_weight(batch.weights, c.most_predicted(batch.weights.shape[1], ranks))


def lm_loss_forward(normed, p: BERT, c, batch, region):
    """Map normed [b, s, h] to loss [b, s], which is 0 where nothing is predicted."""
    at = positions_to_predict(batch, c, region)
    with materialized(p.lm_head) as head, materialized(p.embedding.word) as word:
        logits, cache = masked_lm_forward(normed, head, word, c, region, at)
    targets = at.gather(batch.targets)
    loss, loss_cache = cross_entropy_forward(logits, targets, region.group, widen=not c.fp16_lm_cross_entropy)
    return at.scatter_losses(loss), (cache, loss_cache)


def lm_loss_backward(dloss, p: BERT, c, cache, grads: BERT, sink, region):
    """Map dloss [b, s] to dnormed [b, s, h]."""
    head_cache, loss_cache = cache
    dlogits = cross_entropy_backward(head_cache[-1].gather_losses(dloss), loss_cache)
    with (materialized(p.lm_head) as head, materialized(p.embedding.word) as word,
          materialized(grads.lm_head) as dhead, materialized(grads.embedding.word) as dword):
        dnormed = masked_lm_backward(dlogits, head, word, head_cache, c, (dhead, dword), sink, region)
    sink.done(grads.lm_head, grads.embedding.word)
    return dnormed


# ---- heads that read the first position -----------------------------------------------------------------------------


def pooled_loss_forward(normed, p: BERT, head, batch, region):
    """Map normed [b, s, h] to loss [b]. The logits are few, and every rank has them all."""
    with materialized(p.pooler) as pooler, materialized(classifier_of(p, head)) as classifier:
        scores, cache = pooled_forward(normed, pooler, classifier)
    loss, loss_cache = textbook.cross_entropy_forward(*logits_and_targets(head, widened(scores), batch))
    return region.of_first_position(loss, f"loss: {head}"), (cache, loss_cache)


def pooled_loss_backward(dloss, p: BERT, head, cache, grads: BERT, sink, region):
    """Map dloss [b] to dnormed of the first position, [b, 1, h]."""
    head_cache, loss_cache = cache
    dscores = textbook.cross_entropy_backward(region.of_first_position_backward(dloss), loss_cache)
    with (materialized(p.pooler) as pooler, materialized(classifier_of(p, head)) as classifier,
          materialized(grads.pooler) as dpooler, materialized(classifier_of(grads, head)) as dclassifier):
        dscores = narrowed(dscores.reshape(len(head_cache[0]), -1), pooler.w.dtype)
        dfirst = pooled_backward(dscores, pooler, classifier, head_cache, (dpooler, dclassifier), sink)
    sink.done(grads.pooler, classifier_of(grads, head))
    return dfirst


# ---- the head that finds an answer in a passage ---------------------------------------------------------------------


def span_loss_forward(normed, p: BERT, batch, region):
    """Map normed [b, s, h] to loss [b, 2]. The scores of all positions are few, and every rank gets them."""
    with materialized(p.span_head) as head:
        scores, kept = linear_forward(normed, head)
    logits = span_logits(of_all_positions(widened(scores), region), batch.lengths)
    loss, loss_cache = textbook.cross_entropy_forward(logits, batch.answers)
    return loss, (kept, loss_cache)


def span_loss_backward(dloss, p: BERT, cache, grads: BERT, sink, region):
    """Map dloss [b, 2] to dnormed [b, s, h]."""
    kept, loss_cache = cache
    dscores = textbook.cross_entropy_backward(dloss, loss_cache).swapaxes(1, 2)
    with materialized(p.span_head) as head, materialized(grads.span_head) as dhead:
        own = narrowed(of_own_positions(dscores, kept, region), head.w.dtype)
        dnormed = linear_backward(own, head, kept, dhead, sink)
    sink.done(grads.span_head)
    return dnormed


def of_all_positions(scores, region):
    """Gather each rank's scores, in the layout outside the regions, to [b, s, 2], identical on every rank."""
    scores, ranks = region.enter(scores, SPAN), region.context_ranks
    if ranks is None:
        return scores
    found = np.split(ranks.all_gather(scores, 1, SPAN), ranks.size, 1)
    return collect(found, zigzag(ranks.size, ranks.size * scores.shape[1]))


def of_own_positions(dscores, x, region):
    """Return the part of dscores [b, s, 2] for this rank's x [b, ..., h]: the adjoint of `of_all_positions`. (Of
    context-parallel ranks one counts a sample, and on the others they are 0.)
    """
    if ranks := region.context_ranks:
        dealt = np.concatenate([take(dscores, chunks) for chunks in zigzag(ranks.size, dscores.shape[1])], 1)
        dscores = ranks.reduce_scatter(dealt, 1, SPAN)
    return dscores[:, region.positions(x)].copy()


# ---- predictions of a tuned model -----------------------------------------------------------------------------------


def answer_logits(x, p: BERT, c, batch, region, context=EVALUATION):
    """Map the x [b, s, h] of the stage before, if there is one, to the logits of each sample's answers, identical on
    every rank of a sequence's first chunk: [b, n], of choices or classes, or [b, 2, s], of the first and the last
    position; or to the x for the next stage.
    """
    x, _ = backbone_forward(x, p, c, stage_inputs(batch), region, context)
    if not has_head(p, c):
        return x
    (head,) = c.heads
    with materialized(p.final_layernorm) as norm:
        normed, _ = layer_forward(x, norm, c.layernorm_epsilon)
    if head == "span":
        with materialized(p.span_head) as layer:
            return span_logits(of_all_positions(widened(linear_forward(normed, layer)[0]), region), batch.lengths)
    with materialized(p.pooler) as pooler, materialized(classifier_of(p, head)) as classifier:
        scores, _ = logits_and_targets(head, widened(pooled_forward(normed, pooler, classifier)[0]), batch)
    return region.of_first_position(scores, f"scores: {head}")
