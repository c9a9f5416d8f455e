"""GPT, or a stage of it, on one tensor-parallel rank. Its textbook twin is reference/models/gpt.py.

`p` and `grads` are trees of units: `opened`, a unit is a tree of tensors (parallel/units.py).
"""
from mpi_impl.layers.cross_entropy import argmax_token, cross_entropy_backward, cross_entropy_forward
from mpi_impl.layers.embedding import logits_backward, logits_forward
from mpi_impl.layers.layer_norm import layer_norm_backward, layer_norm_forward
from mpi_impl.models.stage import hidden_backward, hidden_forward
from mpi_impl.models.units import opened
from mpi_impl.runtime.arrays import narrowed, widened
from reference.models.gpt import GPT, output_table
from reference.models.stage import KEEP_ALL, KEEP_INPUT, Reads, has_head


def gpt_forward(x, p: GPT, c, targets, region, dropout=None, recompute=KEEP_ALL):
    """Tokens [b, s], or the x [b, s, h] of the stage before -> loss [b, s], or the x [b, s, h] for the next stage."""
    x, cache = hidden_forward(x, p, c, Reads(x), region, dropout, recompute)
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
    return hidden_backward(dy, p, cache, c, grads, sink, region)


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


def predicted_tokens(x, p: GPT, c, region):
    """Tokens [b, s], or the x of the stage before -> the likeliest token after each, [b, s], alike on all ranks; or the
    x for the next stage.
    """
    x, _ = hidden_forward(x, p, c, Reads(x), region, None, KEEP_INPUT)
    return argmax_token(widened(logits_of(x, p, c, region)), region.group) if has_head(p, c) else x


def next_logits(x, p: GPT, c, past, region):
    """Tokens [b, n], or the x of the stage before -> this rank's logits [b, V/t] of the word that follows the last, or
    the x for the next stage. The tokens follow those that `past`, the stage's layers', has seen; it takes these in.
    """
    x, _ = hidden_forward(x, p, c, Reads(x, past=past), region, None, KEEP_INPUT)
    return logits_of(x[:, -1:].copy(), p, c, region)[:, 0] if has_head(p, c) else x


def logits_of(x, p: GPT, c, region):
    """x [b, s, h] -> this rank's logits [b, s, V/t]."""
    with opened(p.final_layernorm) as norm, opened(output_table(p)) as word:
        normed, _ = layer_norm_forward(x, norm, c.layernorm_epsilon)
        return logits_forward(normed, word, c.vocab_size, region)[0]
