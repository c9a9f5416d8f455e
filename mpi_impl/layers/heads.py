"""BERT's heads on one tensor-parallel rank. Its textbook twin is reference/layers/heads.py."""
import numpy as np

from mpi_impl.kernels import ACTIVATIONS, activated_linear, add_to, rows, total
from mpi_impl.layers.embedding import logits_backward, logits_forward
from mpi_impl.layers.layer import layer_backward, layer_forward
from mpi_impl.layers.linear import linear_backward, linear_forward
from reference.layers.heads import MaskedLMHead
from reference.layers.linear import Linear


def transform_forward(x, p: MaskedLMHead, c):
    """Compute the logits' input from x: [b, s, h] -> [b, s, h]."""
    a, act_cache = activated_linear(x, p.dense.w, p.dense.b, c.activation)
    y, norm = layer_forward(a, p.layernorm, c.layernorm_epsilon)
    return y, (x, act_cache, norm)


def transform_backward(dy, p: MaskedLMHead, cache, c, grads: MaskedLMHead, sink):
    """Return dx [b, s, h] for dy [b, s, h]."""
    _, act_backward = ACTIVATIONS[c.activation]
    x, act_cache, norm = cache
    da = layer_backward(dy, p.layernorm, norm, grads.layernorm)
    return linear_backward(act_backward(da, act_cache), p.dense, x, grads.dense, sink)


def masked_lm_forward(x, p: MaskedLMHead, word, c, region, at):
    """Map x [b, s, h], outside the region, word [V/t, h] -> logits [b, n, V/t] at SomePositions; minus infinity for
    padding.
    """
    y, transform = transform_forward(x, p, c)
    logits, kept = logits_forward(y, word, c.vocab_size, region, at)
    add_to(logits, p.bias)                                   # minus infinity stays minus infinity
    return logits, (transform, kept, at)


def masked_lm_backward(dlogits, p: MaskedLMHead, word, cache, c, grads, sink, region):
    """Return dx [b, s, h], outside the region, for dlogits [b, n, V/t]. `grads`: the head's, and the word table's."""
    (dhead, dword), (transform, kept, at) = grads, cache
    dhead.bias[...] += total(rows(dlogits))
    dy = logits_backward(dlogits, word, kept, dword, sink, region, at)
    return transform_backward(dy, p, transform, c, dhead, sink)


def pooled_forward(x, pooler: Linear, classifier: Linear):
    """Map x [b, s, h] -> [b, n], from the first of this rank's positions."""
    z, dense = linear_forward(x[:, :1].copy(), pooler)       # a copy: the cache need not keep all positions
    pooled = np.tanh(z)
    y, scores = linear_forward(pooled, classifier)                            # [b, 1, h] @ [h, n] -> [b, 1, n]
    return y[:, 0], (dense, pooled, scores)


def pooled_backward(dy, pooler: Linear, classifier: Linear, cache, grads, sink):
    """Return dx of the first position, [b, 1, h], for dy [b, n]. `grads` are those of both layers."""
    (dpooler, dclassifier), (dense, pooled, scores) = grads, cache
    dpooled = linear_backward(dy[:, None], classifier, scores, dclassifier, sink)
    dpooled *= 1 - pooled * pooled
    return linear_backward(dpooled, pooler, dense, dpooler, sink)
