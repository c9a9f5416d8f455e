"""Online softmax: attention to keys that come block by block, with no more of the scores than one block at any time.

For each query it is enough to know, of the keys so far, the highest score m, the sum l of exp(score - m), and the sum o
of exp(score - m) v. Another block of keys has its own m', l' and o', and both together have

    M = max(m, m')    L = exp(m - M) l + exp(m' - M) l'    O = exp(m - M) o + exp(m' - M) o'

since exp(score - m) exp(m - M) = exp(score - M). At the end O / L is what softmax in one go gives (Milakov and
Gimelshein 2018; Dao et al. 2022 for attention; Liu et al. 2023 for blocks that travel around a ring).

The backward knows m and l of all keys, so it computes the final probabilities of each block again, in any order.
"""
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from reference.ops import batched_matmul, by_groups, by_heads, dropout, dropout_backward


class Partial(NamedTuple):
    """Attention of n queries to some of the keys."""

    context: Any   # [b, a, n, d]: the sum of exp(score - highest) v
    highest: Any   # [b, a, n, 1]: minus infinity for a query that sees none of these keys
    total: Any     # [b, a, n, 1]: the sum of exp(score - highest)


def block_attention(q, k, v, diagonal, site=None, real=None):
    """Let n queries attend to m keys: q [b, n, a, d], k, v [b, m, g, d] -> a Partial.

    On the `diagonal` queries and keys are at the same positions, and no query sees a later one. Only the first real[i]
    keys of sample i are no padding, perhaps none; real is int64 [b], or None: all are real. `site` is where dropout
    draws. Each of g heads of keys serves a/g heads of queries.
    """
    scores = block_scores(q, k, diagonal, real)                           # [b, a, n, m]
    highest = scores.max(-1, keepdims=True)
    exp = np.exp(scores - or_zero(highest))
    dropped, _ = dropout(exp, site)
    return Partial(grouped_matmul(dropped, v.swapaxes(1, 2)), highest, exp.sum(-1, keepdims=True))


def block_attention_backward(dcontext, along, highest, total, q, k, v, diagonal, site=None, real=None):
    """Return this block's part of dq [b, n, a, d], and of dk, dv [b, m, g, d], for dcontext [b, n, a, d].

    `highest` and `total` [b, a, n, 1] are those of all keys, and `along` [b, a, n, 1] is the sum over d of dcontext
    times context: softmax's backward needs no more of the other blocks.
    """
    dcontext, values = dcontext.swapaxes(1, 2), v.swapaxes(1, 2)
    probs = np.exp(block_scores(q, k, diagonal, real) - highest) / total
    dropped, mask = dropout(probs, site)
    # forward: context = dropped @ v
    dprobs = dropout_backward(grouped_matmul(dcontext, values.swapaxes(2, 3)), mask)
    dv = batched_matmul(by_groups(dropped, values).swapaxes(2, 3), by_groups(dcontext, values))
    # forward: probs = softmax(q k^T / sqrt(d))
    dscores = probs * (dprobs - along) / sqrt(q.shape[-1])
    dq = grouped_matmul(dscores, k.swapaxes(1, 2))
    dk = batched_matmul(by_groups(dscores, values).swapaxes(2, 3), by_groups(q.swapaxes(1, 2), values))
    return tuple(x.swapaxes(1, 2) for x in (dq, dk, dv))


def merge(one, other):
    """Return the Partial of all keys that two were computed from."""
    highest = np.maximum(one.highest, other.highest)
    shift = or_zero(highest)
    mine, its = np.exp(one.highest - shift), np.exp(other.highest - shift)
    return Partial(one.context * mine + other.context * its, highest, one.total * mine + other.total * its)


def finish(partial):
    """Return attention's result [b, n, a, d], from the Partial of all keys."""
    return (partial.context / partial.total).swapaxes(1, 2)


def block_scores(q, k, diagonal, real):
    """Return q k^T / sqrt(d) [b, a, n, m]; minus infinity where a query does not see a key."""
    scores = grouped_matmul(q.swapaxes(1, 2), k.swapaxes(1, 2).swapaxes(2, 3)) / sqrt(q.shape[-1])
    if diagonal:
        past = np.tril(np.ones_like(scores, shape=scores.shape[2:], dtype=bool))
        scores = np.where(past, scores, -np.inf)
    if real is not None:
        seen = np.arange(k.shape[1], like=k) < real[:, None]              # [b, m]
        scores = np.where(seen[:, None, None], scores, -np.inf)
    return scores


def grouped_matmul(x, y):
    """Compute x [b, a, n, k] @ y [b, g, k, m] -> [b, a, n, m]: each y serves a/g neighbouring heads of x."""
    return by_heads(batched_matmul(by_groups(x, y), y), x)


def or_zero(highest):
    """Replace minus infinity: a query that sees no key has no score to subtract."""
    return np.where(np.isfinite(highest), highest, 0)
