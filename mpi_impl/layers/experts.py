"""Experts on one tensor-parallel rank, all of them or those that were dealt to it. The textbook twin is
reference/layers/experts.py.

With sequence parallelism all positions are gathered first, and then dispatched: so the traffic over t is an MLP's, and
each of t ranks sends its copies of all positions to the same rank among its own e. (Megatron dispatches each rank's own
positions, and gathers over t what has arrived: t times less between the e ranks, k times more between the t.)
"""

import numpy as np

from mpi_impl.comm.expert_parallel import counts_of_ranks, return_from_experts, send_to_experts
from mpi_impl.comm.reason import Reason
from mpi_impl.comm.regions import WithinRegion
from mpi_impl.kernels import linear
from mpi_impl.layers.layer import Layer, layer_backward, layer_forward
from mpi_impl.runtime.arrays import narrowed, to_host, widened
from reference.layer_context import TRAINING
from reference.layers.dispatch import combine, combine_backward, dispatch, dispatch_backward, order_of
from reference.layers.experts import Experts, ExpertsCache, biased_once, expert_of
from reference.layers.router import choices_of_sequences, route, route_backward, router_losses, router_losses_backward

INPUT, CHOICES, WEIGHTS, OUTPUT = (Reason("experts", tensor) for tensor in ("input", "choices", "weights", "output"))


def experts_forward(x, p: Experts, c, region, context=TRAINING):
    """Map x [b, s, h] to y [b, s, h], both outside the region. c is the ModelConfig."""
    logits = widened(linear(x, p.router))                     # [b, s, h] @ [h, E] -> [b, s, E], all of it outside
    routing = route(logits, c.experts)
    entered, ids, weights = (region.enter(each, reason) for each, reason in (                        # f
        (x, INPUT), (routing.ids, CHOICES), (narrowed(routing.weights, x.dtype), WEIGHTS)))
    losses = losses_of_positions(logits, routing, ids, c.experts, context, region, region.positions(x))
    context.note_losses([losses])
    order = order_of(ids, c.experts)
    copies, counts = dispatch(entered, order), to_host(order.counts)
    if region.experts:                                                                               # there, and back
        everyone = counts_of_ranks(counts, region.experts)
        copies = send_to_experts(copies, everyone, region.experts, "experts: dispatch")
        counts = own_counts(everyone, region.experts)
    outputs, experts = each_expert_forward(copies, biased_once(p.experts, region.rank), counts, c, region)
    if region.experts:
        outputs = return_from_experts(outputs, everyone, region.experts, "experts: combine")
        counts = everyone
    y, shared = region.leave(combine(outputs, weights, order), OUTPUT), None                         # g
    if p.shared is not None:
        y_shared, shared = layer_forward(x, p.shared, c, region)
        y += y_shared
    return y, ExpertsCache(x, routing, losses, order._replace(counts=counts), weights, outputs, experts, shared)


def losses_of_positions(logits, routing, ids, c, context, region, held):
    """Return the RouterLosses of logits [b, s, E] at this rank's positions `held`; ids [b, s, k] are those of all that
    the t ranks of a layer have. c is an ExpertsConfig.
    """
    if context.auxiliary is None:
        return None
    length = ids.shape[1]
    choices = choices_of_sequences(ids, c.num_experts, context, context.runs(slice(0, length)))
    if region.context_ranks:                                       # the other positions are on other ranks
        choices = region.context_ranks.all_reduce(choices, "experts: choices of sequences")
        length *= region.context_ranks.size
    return router_losses(logits, routing, choices, length, c, context, context.runs(held))


def experts_backward(dy, p: Experts, cache: ExpertsCache, c, grads: Experts, sink, region):
    """Return dx [b, s, h] for dy [b, s, h], both outside the region."""
    inside, counts = region.leave_backward(dy, OUTPUT), cache.order.counts                           # g, backward
    dcopies, dweights = combine_backward(inside, cache.outputs, cache.weights, cache.order)
    if region.experts:                                                                               # there, and back
        everyone, counts = counts, own_counts(counts, region.experts)
        dcopies = send_to_experts(dcopies, everyone, region.experts, "experts: combine")
    dcopies = each_expert_backward(dcopies, p.experts, cache.experts, counts, c, grads.experts, sink, region)
    if region.experts:
        dcopies = return_from_experts(dcopies, everyone, region.experts, "experts: dispatch")
    dx = region.enter_backward(dispatch_backward(dcopies, cache.order), INPUT)                       # f, backward
    dweights = region.enter_backward(dweights, WEIGHTS)
    dx += router_backward(dweights, p.router, cache, c, grads.router, sink)
    if p.shared is not None:
        dx += layer_backward(dy, p.shared, cache.shared, c, grads.shared, sink, region)
    return dx


def router_backward(dweights, w, cache: ExpertsCache, c, grads, sink):
    """Return dx [b, s, h] for dweights [b, s, k], and for the router's own losses. `grads` is the router's [h, E]."""
    dlogits = route_backward(widened(dweights), cache.routing, c.experts)
    dlogits += router_losses_backward(cache.routing.probs, cache.losses, c.experts)
    dlogits = narrowed(dlogits, cache.x.dtype)
    sink(grads, cache.x, dlogits)                             # forward: logits = x @ w
    return linear(dlogits, w.T)


def each_expert_forward(x, p, counts, c, region):
    """Apply each expert to its own rows of x [n, h], which are in the order of experts: -> [n, h], a partial sum."""
    y, inside, caches, ends = np.empty_like(x), WithinRegion(region.group), [None] * len(counts), np.cumsum(counts)
    for i, (n, end) in enumerate(zip(counts.tolist(), ends.tolist())):
        if n:
            y[end - n:end], caches[i] = layer_forward(x[end - n:end], expert_of(p, i), c, inside)
    return y, caches


def each_expert_backward(dy, p, caches, counts, c, grads, sink, region):
    """Return dx [n, h] for dy [n, h]. An expert without rows gets no gradient."""
    dx, inside, ends = np.empty_like(dy), WithinRegion(region.group), np.cumsum(counts)
    for i, (n, end) in enumerate(zip(counts.tolist(), ends.tolist())):
        if n:
            dx[end - n:end] = layer_backward(dy[end - n:end], expert_of(p, i), caches[i], c,
                                             expert_of(grads, i), sink, inside)
    return dx


def own_counts(counts, group):
    """Return how many copies each of this rank's experts gets from all ranks, [E/e], from all ranks' counts [e, E]."""
    return np.split(counts.sum(0), len(counts))[group.rank]


LAYER = Layer(Experts, experts_forward, experts_backward)
