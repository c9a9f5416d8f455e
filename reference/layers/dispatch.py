"""Dispatch and combine: the copies of tokens in the order of the experts that compute them, and back.

A token with k experts has k *copies*. Sorted by expert, those of each expert are rows of one matrix, so an expert is a
matrix product, whatever the load: no token is dropped, and an expert without tokens has a matrix without rows.

    tokens           a     b     c            experts 0 to 3, k = 2
    experts         2 0   0 3   0 2
    copies          a b c   -   a c   b       sorted: 3 for expert 0, none for 1, 2 for 2, 1 for 3

With a *capacity*, C copies for each expert, the first C are kept, and the others dropped: the residual connection alone
carries them on. Which ones are dropped depends on the tokens that are counted together, a microbatch's. So a run with a
capacity is another run on another topology, and with microbatches of another size. (Megatron drops the least probable
copies unless it is told --moe-token-drop-policy position, which is the rule here.)
"""
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from reference.ops import rows


class Order(NamedTuple):
    """The copies in the order of their experts."""

    copies: Any    # int64 [n]: copy j of token i is i k + j
    counts: Any    # int64 [E]: each expert's copies
    shape: Any     # [b, s, k]


def order_of(ids, c):
    """Sort copies by expert, and those of one expert by token: ids [b, s, k]. c is an ExpertsConfig."""
    flat = ids.reshape(-1)
    copies = np.argsort(flat, kind="stable")
    experts = flat[copies]
    begins = np.searchsorted(experts, np.arange(c.num_experts + 1, like=flat))       # of each expert's copies, and n
    counts = np.diff(begins)
    if c.moe_expert_capacity_factor is not None:
        capacity = ceil(c.moe_expert_capacity_factor * len(flat) / c.num_experts)
        place = np.arange(len(flat), like=flat) - begins[experts]                    # among those of its expert
        counts = np.minimum(counts, capacity)
        kept = np.argsort(place >= capacity, kind="stable")[:counts.sum().item()]    # in their order
        copies = copies[kept]
    return Order(copies, counts, ids.shape)


def dispatch(x, order):
    """Copy tokens x [b, s, h] into the order of the experts: -> [n, h]."""
    return rows(x)[order.copies // order.shape[-1]]


def dispatch_backward(dcopies, order):
    """Return dx [b, s, h] for dcopies [n, h]: a token's gradient is the sum over its copies."""
    return copies_of_tokens(dcopies, order).sum(2)


def combine(copies, weights, order):
    """Add up the experts' outputs for each token: copies [n, h], weights [b, s, k] -> [b, s, h]."""
    return (copies_of_tokens(copies, order) * weights[..., None]).sum(2)


def combine_backward(dy, copies, weights, order):
    """Return dcopies [n, h] and dweights [b, s, k] for dy [b, s, h]."""
    dcopies = rows(weights[..., None] * dy[:, :, None])[order.copies]
    return dcopies, (copies_of_tokens(copies, order) * dy[:, :, None]).sum(-1)


def copies_of_tokens(copies, order):
    """Return copies [n, h] in the order of their tokens, [b, s, k, h]: 0 for those that were dropped."""
    sorted_again = np.zeros_like(copies, shape=(int(np.prod(order.shape)), copies.shape[-1]))
    sorted_again[order.copies] = copies
    return sorted_again.reshape(*order.shape, -1)
