"""Attention over c context-parallel ranks, each with its own positions of every sequence: three ways.

A rank has the queries, keys and values of its positions (positions.py), and each of its queries has to see keys
of other ranks. A rank has a/t heads of queries and g/t of keys and values. g is below a where several heads of queries
share one of keys, and then less is sent, above all in the first two ways.

1. Ring (`p2p`, Liu et al. 2023). Keys and values travel around the ring of ranks, while each rank attends to those that
   it has got, by online softmax. 2 b s/c d g/t elements to the next rank, c - 1 times. In the backward they travel
   again, and their gradients follow, gathering each rank's part, until they are home.
2. All-gather (`all_gather`, Llama 3: 2407.21783, section 3.3.2). Every rank gets all keys and values, 2 b s d g/t, in
   one call, and again in the backward; their gradients are reduce-scattered.
3. All-to-all (`a2a`, DeepSpeed-Ulysses: Jacobs et al. 2023). Ranks exchange heads for positions: each gets all
   positions of a c-th of its heads, attends as if it were alone, and the result is exchanged back. Each rank sends
   (2a + 2g)/t d elements for each of its b s/c positions, but for the c-th that it keeps. c must divide g/t.

A list has an element for each rank. Dropout draws at the positions of the whole sequence, so the masks are those of one
rank.
"""
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np

from reference.activations import Nested
from reference.comm.collectives import all_gather, all_to_all, reduce_scatter
from reference.layers.online_softmax import Partial, block_attention, block_attention_backward, finish, merge
from reference.ops import CoreInputs, attention_core, attention_core_backward
from reference.positions import SequencePart, collect, deal, visible_blocks, zigzag


class BlocksCache(NamedTuple):
    """The arrays of one rank that the backward needs. There are no probabilities: blocks are computed again."""

    inputs: Annotated[CoreInputs, Nested()]
    attended: Any   # [b, s/c, a/t, d]: what was returned
    highest: Any    # [b, a/t, s/c, 1]: of each query's scores
    total: Any      # [b, a/t, s/c, 1]: of exp(score - highest)


class ExchangedCache(NamedTuple):
    """The arrays of one rank's heads, at all positions."""

    inputs: Annotated[CoreInputs, Nested(changes={"exchanged": True})]
    core: Annotated[Any, Nested(changes={"exchanged": True})]     # of attention_core; with selective recompute None


# ---- one rank, and the keys and values of some -----------------------------------------------------------------------


def attend(inputs, kv, queries, keys, found):
    """Let the queries at these chunks of positions attend to the keys at others, and merge with what was `found`.

    found has a Partial for each chunk of queries, or None at first.
    """
    k, v = kv
    for block in visible_blocks(queries, keys, inputs.causal):
        partial = block_attention(inputs.q[:, block.queries], k[:, block.keys], v[:, block.keys], block.diagonal,
                                  *at_block(inputs, block))
        before = found[block.chunk]
        found[block.chunk] = partial if before is None else merge(before, partial)


def attend_backward(dattended, cache, kv, queries, keys):
    """Return the parts of dq, dk and dv that come from these keys, for dattended [b, s/c, a/t, d]."""
    inputs, (k, v) = cache.inputs, kv
    dq, dk, dv = (np.zeros_like(x) for x in (inputs.q, k, v))
    along = (dattended * cache.attended).sum(-1, keepdims=True).swapaxes(1, 2)           # [b, a/t, s/c, 1]
    for block in visible_blocks(queries, keys, inputs.causal):
        rows = block.queries
        dq_block, dk_block, dv_block = block_attention_backward(
            dattended[:, rows], along[:, :, rows], cache.highest[:, :, rows], cache.total[:, :, rows],
            inputs.q[:, rows], k[:, block.keys], v[:, block.keys], block.diagonal, *at_block(inputs, block))
        dq[:, rows] += dq_block
        dk[:, block.keys] += dk_block
        dv[:, block.keys] += dv_block
    return dq, dk, dv


def at_block(inputs, block):
    """Return dropout's Site for a block, and how many of its keys are real in each sample."""
    site = inputs.site and inputs.site.moved(0, 0, block.first_query, block.first_key)
    return site, None if inputs.lengths is None else inputs.lengths - block.first_key


def finish_all(inputs, found):
    """Return attention's result and the cache, from the Partials of all keys."""
    _, highest, total = (np.concatenate(parts, 2) for parts in zip(*found))
    attended = np.concatenate([finish(partial) for partial in found], 1)
    return attended, BlocksCache(inputs, attended, highest, total)


# ---- 1: the ring ----------------------------------------------------------------------------------------------------


def ring_attention_forward(inputs, chunks):
    """Map each rank's CoreInputs to its result [b, s/c, a/t, d]. `chunks` are the positions of each rank."""
    c, found = len(inputs), [[None] * len(own) for own in chunks]
    travelling = [(one.k, one.v) for one in inputs]
    for step in range(c):
        for rank, one in enumerate(inputs):
            attend(one, travelling[rank], chunks[rank], chunks[(rank - step) % c], found[rank])
        travelling = pass_on(travelling)
    return unzip(finish_all(one, partials) for one, partials in zip(inputs, found))


def ring_attention_backward(dattended, caches, chunks):
    """Return each rank's dq, dk and dv. The gradients travel behind the keys and values, one step later."""
    c = len(caches)
    travelling = [(cache.inputs.k, cache.inputs.v) for cache in caches]
    home = [attend_backward(dy, cache, kv, own, own)
            for dy, cache, kv, own in zip(dattended, caches, travelling, chunks)]
    dqs, gathered = [dq for dq, _, _ in home], [(0, 0)] * c
    for step in range(1, c):
        travelling, gathered = pass_on(travelling), pass_on(gathered)
        for rank, (dy, cache) in enumerate(zip(dattended, caches)):
            dq, dk, dv = attend_backward(dy, cache, travelling[rank], chunks[rank], chunks[(rank - step) % c])
            dqs[rank] = dqs[rank] + dq
            gathered[rank] = gathered[rank][0] + dk, gathered[rank][1] + dv
    gathered = pass_on(gathered)                                         # home
    return [(dq, dk + others[0], dv + others[1]) for dq, (_, dk, dv), others in zip(dqs, home, gathered)]


def pass_on(xs):
    """Hand each rank's to the next rank; the last one's goes to the first."""
    return [xs[rank - 1] for rank in range(len(xs))]


# ---- 2: all-gather --------------------------------------------------------------------------------------------------


def gathered_attention_forward(inputs, chunks):
    """Map each rank's CoreInputs to its result [b, s/c, a/t, d]. `chunks` are the positions of each rank."""
    ks, vs = (all_gather([getattr(one, name) for one in inputs], 1) for name in "kv")      # [b, s, g/t, d]
    keys, results = [chunk for own in chunks for chunk in own], []
    for one, k, v, own in zip(inputs, ks, vs, chunks):
        found: list[Partial | None] = [None] * len(own)
        attend(one, (k, v), own, keys, found)
        results.append(finish_all(one, found))
    return unzip(results)


def gathered_attention_backward(dattended, caches, chunks):
    """Return each rank's dq, dk and dv."""
    ks, vs = (all_gather([getattr(cache.inputs, name) for cache in caches], 1) for name in "kv")
    keys = [chunk for own in chunks for chunk in own]
    dqs, dks, dvs = zip(*[attend_backward(dy, cache, (k, v), own, keys)
                          for dy, cache, k, v, own in zip(dattended, caches, ks, vs, chunks)])
    return list(zip(dqs, reduce_scatter(dks, 1), reduce_scatter(dvs, 1)))


# ---- 3: all-to-all --------------------------------------------------------------------------------------------------


def exchanged_attention_forward(inputs, chunks):
    """Map each rank's CoreInputs to its result [b, s/c, a/t, d]. `chunks` are the positions of each rank."""
    qs, ks, vs = (heads_for_positions([getattr(one, name) for one in inputs], chunks) for name in "qkv")
    results, caches = [], []
    for rank, (one, q, k, v) in enumerate(zip(inputs, qs, ks, vs)):
        site = one.site and one.site.moved(0, rank * q.shape[2])         # its heads are not the first
        exchanged = one._replace(q=q, k=k, v=v, site=site)
        attended, core = attention_core(*exchanged)
        results.append(attended)
        caches.append(ExchangedCache(exchanged, core))
    return positions_for_heads(results, chunks), caches


def exchanged_attention_backward(dattended, caches, chunks):
    """Return each rank's dq, dk and dv. The adjoint of an exchange is the exchange back."""
    gradients = [attention_core_backward(dy, cache.core)
                 for dy, cache in zip(heads_for_positions(dattended, chunks), caches)]
    return list(zip(*[positions_for_heads(parts, chunks) for parts in zip(*gradients)]))


def heads_for_positions(xs, chunks):
    """Give each rank a c-th of the heads of all positions: [b, s/c, n, d] -> [b, s, n/c, d]."""
    return [collect(parts, chunks) for parts in all_to_all([np.split(x, len(xs), 2) for x in xs])]


def positions_for_heads(xs, chunks):
    """Give each rank its positions of all heads: [b, s, n/c, d] -> [b, s/c, n, d]."""
    return [np.concatenate(parts, 2) for parts in all_to_all([deal(x, chunks) for x in xs])]


WAYS = {"p2p": (ring_attention_forward, ring_attention_backward),
        "all_gather": (gathered_attention_forward, gathered_attention_backward),
        "a2a": (exchanged_attention_forward, exchanged_attention_backward)}


def unzip(pairs):
    """Return a list of all results, and a list of all caches."""
    results, caches = zip(*pairs)
    return list(results), list(caches)


# ---- a whole model on c ranks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lockstep(SequencePart):
    """The positions of all ranks, one rank's after the other's in one array: with this as the `part` of its context, a
    whole model runs on c ranks in lockstep.

    Everything but attention looks at one position at a time, so it makes no difference to it whether a rank's positions
    are in an array of their own; the gradients of parameters are those of all ranks, summed.
    """

    dealt: list[list[slice]]     # each rank's chunks
    way: str                     # a key of WAYS

    def runs(self, held):
        """Return where all these positions are in the whole sequence. `held` is everything: there is no other array."""
        return self.chunks

    def attend(self, inputs):
        """Map CoreInputs to the attended values [b, s, a, d], and return the cache."""
        forward, _ = WAYS[self.way]
        parts = [inputs._replace(q=q, k=k, v=v) for q, k, v in zip(*map(self.of_ranks, inputs[:3]))]
        attended, caches = forward(parts, self.dealt)
        return np.concatenate(attended, 1), PartsCache(self, caches)

    def of_ranks(self, x):
        """Return each rank's positions of x."""
        return np.split(x, len(self.dealt), 1)


class PartsCache(NamedTuple):
    """The caches of all ranks of a Lockstep."""

    part: Lockstep
    caches: Any

    def backward(self, dattended):
        """Return dq, dk and dv, in the shapes of q, k and v."""
        _, backward = WAYS[self.part.way]
        gradients = backward(self.part.of_ranks(dattended), self.caches, self.part.dealt)
        return tuple(np.concatenate(parts, 1) for parts in zip(*gradients))


def lockstep(c, s, way):
    """Return the Lockstep of c ranks, to which s positions are dealt in a zigzag."""
    dealt = zigzag(c, s)
    return Lockstep(0, [[chunk for own in dealt for chunk in own]], dealt, way)
