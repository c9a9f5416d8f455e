"""GPT, or a stage of it, on one tensor-parallel rank. Its textbook twin is reference/models/gpt.py.

`p` and `grads` are trees of units, which are `materialized` for as long as they are used (units.py).
"""
from mpi_impl.layers.cross_entropy import argmax_token, cross_entropy_backward, cross_entropy_forward
from mpi_impl.layers.embedding import logits_backward, logits_forward
from mpi_impl.layers.layer import layer_backward, layer_forward
from mpi_impl.models.stage import backbone_backward, backbone_forward
from mpi_impl.models.units import materialized
from mpi_impl.runtime.arrays import widened
from reference.layer_context import EVALUATION, TRAINING
from reference.models.gpt import GPT, output_table
from reference.models.stage import StageInputs, has_head


def gpt_forward(x, p: GPT, c, targets, region, context=TRAINING):
    """Map tokens [b, s], or the x [b, s, h] of the stage before, to loss [b, s], or to the x for the next stage."""
    x, cache = backbone_forward(x, p, c, StageInputs(x), region, context)
    if has_head(p, c):
        x, head = head_forward(x, p, c, targets, region)
        cache = cache._replace(head=head)
    return x, cache


def gpt_backward(dy, p: GPT, cache, c, grads: GPT, sink, region):
    """Map dloss [b, s], or dx of the next stage [b, s, h], to dx [b, s, h], or None for tokens.

    `sink.done(...)` is called with the units whose gradients are complete for this microbatch.
    """
    if has_head(p, c):
        dy = head_backward(dy, p, cache.head, grads, sink, region)
    return backbone_backward(dy, p, cache, c, grads, sink, region)


def head_forward(x, p: GPT, c, targets, region):
    """Map x [b, s, h], outside the regions, to loss [b, s], identical on every rank, in float32 at least (or not, on
    request).
    """
    with materialized(p.final_layernorm) as norm, materialized(output_table(p)) as word:
        normed, norm_cache = layer_forward(x, norm, c.layernorm_epsilon)
        logits, logits_cache = logits_forward(normed, word, c.vocab_size, region)
    loss, loss_cache = cross_entropy_forward(logits, targets, region.group, widen=not c.fp16_lm_cross_entropy)
    return loss, (norm_cache, logits_cache, loss_cache)


def head_backward(dloss, p: GPT, cache, grads: GPT, sink, region):
    """Map dloss [b, s] to dx [b, s, h], outside the regions."""
    norm_cache, logits_cache, loss_cache = cache
    dlogits = cross_entropy_backward(dloss, loss_cache)
    with (materialized(p.final_layernorm) as norm, materialized(output_table(p)) as word,
          materialized(grads.final_layernorm) as dnorm, materialized(output_table(grads)) as dword):
        dnormed = logits_backward(dlogits, word, logits_cache, dword, sink, region)
        dx = layer_backward(dnormed, norm, norm_cache, dnorm)
    sink.done(grads.final_layernorm, output_table(grads))
    return dx


def predicted_tokens(x, p: GPT, c, region):
    """Map tokens [b, s], or the x of the stage before, to the most probable token after each, [b, s], identical on
    every rank, or to the x for the next stage.
    """
    x, _ = backbone_forward(x, p, c, StageInputs(x), region, EVALUATION)
    return argmax_token(widened(logits_of(x, p, c, region)), region.group) if has_head(p, c) else x


def next_logits(x, p: GPT, c, kv_cache, region):
    """Map tokens [b, n], or the x of the stage before, to this rank's logits [b, V/t] of the token that follows the
    last, or to the x for the next stage. The tokens follow those in `kv_cache`, a KVCache for each of its layers.
    """
    context = EVALUATION._replace(kv_cache=kv_cache)
    x, _ = backbone_forward(x, p, c, StageInputs(x), region, context)
    return logits_of(context.last(x), p, c, region)[:, 0] if has_head(p, c) else x


def logits_of(x, p: GPT, c, region):
    """Map x [b, s, h] to this rank's logits [b, s, V/t]."""
    with materialized(p.final_layernorm) as norm, materialized(output_table(p)) as word:
        normed, _ = layer_forward(x, norm, c.layernorm_epsilon)
        return logits_forward(normed, word, c.vocab_size, region)[0]
