"""Attention on one context-parallel rank, which has its own positions of every sequence: three ways. Its textbook twin
is reference/layers/context_attention.py.

Messages are posted before the blocks that are computed while they are on their way, and progressed after each block.
"""
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np

from mpi_impl.comm.group import Group
from mpi_impl.kernels import (attention_core, attention_core_again, attention_core_backward, block_attention,
                              block_attention_backward)
from mpi_impl.runtime.arrays import contiguous, narrowed, widened
from reference.activations import Nested
from reference.layers.context_attention import BlocksCache, ExchangedCache, at_block
from reference.layers.online_softmax import finish, merge
from reference.positions import SequencePart, collect, deal, visible_blocks, zigzag


@dataclass(frozen=True)
class ContextPart(SequencePart):
    """The part of every sequence that this rank holds, and its way to attend to the others."""

    group: Group
    way: str        # a key of WAYS

    def attend(self, inputs, recompute):
        """Map CoreInputs to the attended values [b, s/c, a/t, d], and return the cache.

        Selective recompute changes only what heads exchanged for positions keep: blocks keep no probabilities anyway.
        """
        forward, _ = WAYS[self.way]
        attended, cache = forward(inputs, self.chunks_of_ranks, self.group)
        if recompute.selective and isinstance(cache, ExchangedCache):
            cache = cache._replace(core=None)
        return attended, PartCache(self, cache)


class PartCache(NamedTuple):
    """The cache of a ContextPart."""

    part: ContextPart
    kept: Annotated[Any, Nested()]     # of one of the ways

    def backward(self, dattended):
        """Return dq, dk and dv, in the shapes of q, k and v."""
        _, backward = WAYS[self.part.way]
        return backward(dattended, self.kept, self.part.chunks_of_ranks, self.part.group)


def part_of(group: Group | None, way: str, length: int) -> ContextPart | None:
    """Return this rank's part of sequences of which it holds this many positions; None without context parallelism."""
    if group is None:
        return None
    return ContextPart(group.rank, zigzag(group.size, length * group.size), group, way)


# ---- one rank, and the keys and values of some -----------------------------------------------------------------------


def attend(inputs, kv, queries, keys, found, group):
    """Let the queries at these chunks of positions attend to the keys at others, and merge with what was `found`.

    found has a Partial for each chunk of queries, or None at first.
    """
    k, v = kv
    for block in visible_blocks(queries, keys, inputs.causal):
        partial = block_attention(inputs.q[:, block.queries], k[:, block.keys], v[:, block.keys], block.diagonal,
                                  *at_block(inputs, block))
        before = found[block.chunk]
        found[block.chunk] = partial if before is None else merge(before, partial)
        group.progress()


def attend_backward(dattended, cache, kv, queries, keys, group):
    """Return the parts of dq, dk and dv that come from these keys, for dattended [b, s/c, a/t, d]: float32 for halves,
    since they are added up.
    """
    inputs, (k, v), wide = cache.inputs, kv, cache.highest.dtype
    dq, dk, dv = (np.zeros_like(x, order="C", dtype=wide) for x in (inputs.q, k, v))
    along = (widened(dattended) * widened(cache.attended)).sum(-1, keepdims=True).swapaxes(1, 2)    # [b, a/t, s/c, 1]
    for block in visible_blocks(queries, keys, inputs.causal):
        rows = block.queries
        dq_block, dk_block, dv_block = block_attention_backward(
            dattended[:, rows], along[:, :, rows], cache.highest[:, :, rows], cache.total[:, :, rows],
            inputs.q[:, rows], k[:, block.keys], v[:, block.keys], block.diagonal, *at_block(inputs, block))
        dq[:, rows] += dq_block
        dk[:, block.keys] += dk_block
        dv[:, block.keys] += dv_block
        group.progress()
    return dq, dk, dv


def finish_all(inputs, found):
    """Return attention's result and the cache, from the Partials of all keys."""
    _, highest, total = (np.concatenate(parts, 2) for parts in zip(*found))
    attended = contiguous(narrowed(np.concatenate([finish(partial) for partial in found], 1), inputs.q.dtype))
    return attended, BlocksCache(inputs, attended, highest, total)


# ---- 1: the ring ----------------------------------------------------------------------------------------------------


def ring_attention_forward(inputs, chunks, group):
    """Map CoreInputs to this rank's result [b, s/c, a/t, d]. `chunks` are the positions of each rank."""
    own, found = chunks[group.rank], [None] * len(chunks[group.rank])
    travelling = np.stack([inputs.k, inputs.v])                          # [2, b, s/c, g/t, d]
    for step in range(group.size):
        following = pass_on(travelling, group, "keys and values") if step < group.size - 1 else None
        attend(inputs, travelling, own, chunks[(group.rank - step) % group.size], found, group)
        travelling = arrived(following)
    return finish_all(inputs, found)


def ring_attention_backward(dattended, cache, chunks, group):
    """Return dq, dk and dv. The gradients travel behind the keys and values, one step later."""
    c, own, inputs = group.size, chunks[group.rank], cache.inputs
    travelling, gathered, found = np.stack([inputs.k, inputs.v]), None, []
    for step in range(c):
        following = pass_on(travelling, group, "keys and values") if step < c - 1 else None
        dq, *dkv = attend_backward(dattended, cache, travelling, own, chunks[(group.rank - step) % c], group)
        found.append((dq, np.stack(dkv)))
        if step > 0:                                                     # keys and values of another rank
            gathered = pass_on(with_others(found[-1][1], gathered), group, "gradients of keys and values")
        travelling = arrived(following)
    dk, dv = with_others(found[0][1], gathered)                          # home
    return tuple(narrowed(x, inputs.q.dtype) for x in (sum(dq for dq, _ in found), dk, dv))


def with_others(dkv, passing):
    """Add what other ranks have found for the same keys and values, if it is on its way, in place."""
    others = arrived(passing)
    if others is not None:
        dkv += others
    return dkv


def pass_on(x, group, reason):
    """Post x to the next rank, and the receive of what the rank before passes on."""
    received = np.empty_like(x)
    receive = group.post_receive(received, (group.rank - 1) % group.size, 0, reason)
    return receive, group.post_send(x, (group.rank + 1) % group.size, 0, reason)


def arrived(passing):
    """Wait until what was passed on is there, and return it; None for nothing."""
    if passing is None:
        return None
    receive, send = passing
    x = receive.wait()
    send.wait()
    return x


# ---- 2: all-gather --------------------------------------------------------------------------------------------------


def gathered_attention_forward(inputs, chunks, group):
    """Map CoreInputs to this rank's result [b, s/c, a/t, d]. `chunks` are the positions of each rank."""
    own, found = chunks[group.rank], [None] * len(chunks[group.rank])
    keys = [chunk for each in chunks for chunk in each]
    kv = group.all_gather(np.stack([inputs.k, inputs.v]), 2, "keys and values")     # [2, b, s, g/t, d]
    attend(inputs, kv, own, keys, found, group)
    return finish_all(inputs, found)


def gathered_attention_backward(dattended, cache, chunks, group):
    """Return dq, dk and dv."""
    inputs, keys = cache.inputs, [chunk for each in chunks for chunk in each]
    kv = group.all_gather(np.stack([inputs.k, inputs.v]), 2, "keys and values")
    dq, *dkv = attend_backward(dattended, cache, kv, chunks[group.rank], keys, group)
    dk, dv = group.reduce_scatter(np.stack(dkv), 2, "gradients of keys and values")
    return tuple(narrowed(x, inputs.q.dtype) for x in (dq, dk, dv))


# ---- 3: all-to-all --------------------------------------------------------------------------------------------------


def exchanged_attention_forward(inputs, chunks, group):
    """Map CoreInputs to this rank's result [b, s/c, a/t, d]. `chunks` are the positions of each rank."""
    q, k, v = (heads_for_positions(x, chunks, group, what)
               for x, what in zip(inputs, ("queries", "keys", "values")))
    site = inputs.site and inputs.site.moved(0, group.rank * q.shape[2])              # its heads are not the first
    exchanged = inputs._replace(q=q, k=k, v=v, site=site)
    attended, core = attention_core(*exchanged)
    return positions_for_heads(attended, chunks, group, "attended values"), ExchangedCache(exchanged, core)


def exchanged_attention_backward(dattended, cache, chunks, group):
    """Return dq, dk and dv. The adjoint of an exchange is the exchange back."""
    core = attention_core_again(cache.inputs) if cache.core is None else cache.core
    gradients = attention_core_backward(heads_for_positions(dattended, chunks, group, "attended values"), core)
    return tuple(positions_for_heads(x, chunks, group, what)
                 for x, what in zip(gradients, ("queries", "keys", "values")))


def heads_for_positions(x, chunks, group, reason):
    """Give each rank a c-th of the heads of all positions: [b, s/c, n, d] -> [b, s, n/c, d]."""
    return collect(group.all_to_all(np.split(x, group.size, 2), reason), chunks)


def positions_for_heads(x, chunks, group, reason):
    """Give each rank its positions of all heads: [b, s, n/c, d] -> [b, s/c, n, d]."""
    return np.concatenate(group.all_to_all(deal(x, chunks), reason), 2)


WAYS = {"p2p": (ring_attention_forward, ring_attention_backward),
        "all_gather": (gathered_attention_forward, gathered_attention_backward),
        "a2a": (exchanged_attention_forward, exchanged_attention_backward)}
