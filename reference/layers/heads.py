"""BERT's heads (Devlin et al. 2018, sections 3.1 and 4): one for masked tokens, and heads that read [CLS].

The head for tokens is a layer and a norm of its own, then the logits: the embedding's table read as columns, and a
bias. The others read only the first position, which attends to all: the pooler, a layer with tanh, and a linear layer.

All but the logits is outside the tensor-parallel regions: the ranks compute the same, or each its own positions. And
logits, which are the most work, are computed where a token is to be predicted, of which the data say how many there
are at most: --mask-prob, 15 % of the positions. (Megatron-LM computes them at all positions, and gives the others no
weight.)
"""
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference.layers.embedding import (logits_backward, logits_forward, sharded_logits_backward,
                                        sharded_logits_forward, word_tensor)
from reference.layers.layer import declare, layer_backward, layer_forward
from reference.layers.linear import Linear, linear_backward, linear_forward
from reference.ops import ACTIVATIONS, rows
from reference.params import Tensor, bias, weight


@dataclass(frozen=True)
class MaskedLMHead:
    """Tensors of the head for masked tokens, or their gradients."""

    dense: Linear          # [h, h], on every rank
    layernorm: Any         # a norm
    bias: Any              # [V], sharded like the rows of the word table


def masked_lm_tensors(c):
    """Declare the tensors for a ModelConfig. The word table is the embedding's."""
    word = word_tensor(c)
    return MaskedLMHead(dense_tensors(c, c.hidden_size), declare("norm", c),
                        Tensor((c.vocab_size,), split=0, pad_to=word.pad_to))


def dense_tensors(c, n):
    """Declare a linear layer from h to n, replicated."""
    return Linear(weight((c.hidden_size, n), c.init_method_std), bias((n,)))


# ---- masked tokens --------------------------------------------------------------------------------------------------


def transform_forward(x, p, c):
    """Compute norm(act(x @ w + b)), which the logits read: x [b, s, h] -> [b, s, h]."""
    act, _ = ACTIVATIONS[c.activation]
    z, dense = linear_forward(x, p.dense)
    a, act_cache = act(z)
    y, norm = layer_forward(a, p.layernorm, c.layernorm_epsilon)
    return y, (dense, act_cache, norm)


def transform_backward(dy, p, cache, c):
    """Return dx [b, s, h] and the gradients, as a MaskedLMHead without its bias, for dy [b, s, h]."""
    _, act_backward = ACTIVATIONS[c.activation]
    dense, act_cache, norm = cache
    da, layernorm = layer_backward(dy, p.layernorm, norm)
    dx, ddense = linear_backward(act_backward(da, act_cache), p.dense, dense)
    return dx, MaskedLMHead(ddense, layernorm, None)


def masked_lm_forward(x, p, word, c, at):
    """Map x [b, s, h], word [V, h] -> logits [b, n, V] at SomePositions."""
    y, transform = transform_forward(x, p, c)
    logits, logits_cache = logits_forward(at.gather(y), word, c.vocab_size)
    return logits + p.bias, (transform, logits_cache, at)


def masked_lm_backward(dlogits, p, word, cache, c):
    """Return dx [b, s, h], dword [V, h] and the gradients, as a MaskedLMHead, for dlogits [b, n, V]."""
    transform, logits_cache, at = cache
    dy, dword = logits_backward(dlogits, word, logits_cache)
    dx, grads = transform_backward(at.scatter(dy), p, transform, c)
    return dx, dword, MaskedLMHead(grads.dense, grads.layernorm, rows(dlogits).sum(0))


def sharded_masked_lm_forward(xs, shards, words, c, region, at):
    """Map each rank's x [b, s, h], in the layout outside the region -> its logits [b, n, V/t] at SomePositions."""
    ys, transforms = zip(*[transform_forward(x, p, c) for x, p in zip(xs, shards)])
    logits, logits_cache = sharded_logits_forward(list(ys), words, c.vocab_size, region, at)
    return [one + p.bias for one, p in zip(logits, shards)], (transforms, logits_cache, at)    # padding stays -infinity


def sharded_masked_lm_backward(dlogits, shards, words, cache, c, region):
    """Return each rank's dx [b, s, h], outside the region, dword and gradients for its dlogits [b, n, V/t]."""
    transforms, logits_cache, at = cache
    dys, dwords = sharded_logits_backward(dlogits, words, logits_cache, region, at)
    dxs, grads = zip(*[transform_backward(dy, p, one, c) for dy, p, one in zip(dys, shards, transforms)])
    return list(dxs), dwords, [MaskedLMHead(grad.dense, grad.layernorm, rows(one).sum(0))
                               for grad, one in zip(grads, dlogits)]


# ---- heads that read the first position -----------------------------------------------------------------------------


def pooled_forward(x, pooler, classifier):
    """Map x [b, s, h] -> [b, n], from its first position."""
    z, dense = linear_forward(x[:, :1], pooler)
    pooled = np.tanh(z)
    y, scores = linear_forward(pooled, classifier)                            # [b, 1, h] @ [h, n] -> [b, 1, n]
    return y[:, 0], (dense, pooled, scores)


def pooled_backward(dy, pooler, classifier, cache):
    """Return dx of the first position, [b, 1, h] (0 elsewhere), and both layers' gradients for dy [b, n]."""
    dense, pooled, scores = cache
    dpooled, dclassifier = linear_backward(dy[:, None], classifier, scores)
    dx, dpooler = linear_backward(dpooled * (1 - pooled**2), pooler, dense)
    return dx, dpooler, dclassifier
