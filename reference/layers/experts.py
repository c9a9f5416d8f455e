"""Experts in the MLP's place: E of them, of which each token's router chooses k (Shazeer et al. 2017, 1701.06538).

    y = sum over the k experts e that the router chooses of weight_e MLP_e(x)   [+ MLP_shared(x)]

The parameters grow with E, the work with k. An expert is an MLP, and its tensors are stacked: those of all experts are
one tensor with one more axis, the first.

Three ways to split them, which go together:

- *over t tensor-parallel ranks*, each expert as any MLP is: columns of A, rows of B. The router computes outside the
  region, like a norm, on what is identical on every rank or, with sequence parallelism, on each rank's own positions.
  Its choices enter the region together with x (f), and the weighted sum of the experts' partial sums leaves it (g).
- *over e ranks*, each expert whole on one of them: expert parallelism, `dealt_experts_forward`. The ranks have
  different samples, and copies of everything else.
- *over replicas*, which hold copies.

So there are two kinds of gradients. An expert has seen the tokens of all e ranks, and its gradient is summed over the
ranks that hold a copy of it. All other tensors' are summed over all replicas.
"""
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import numpy as np

from reference.activations import Nested
from reference.comm.collectives import all_reduce
from reference.comm.expert_parallel import return_from_experts, send_to_experts
from reference.layer_context import TRAINING
from reference.layers.dispatch import Order, combine, combine_backward, dispatch, dispatch_backward, order_of
from reference.layers.layer import (Layer, declare, layer_backward, layer_forward, sharded_layer_backward,
                                    sharded_layer_forward)
from reference.layers.router import (Routing, choices_of_sequences, route, route_backward, router_losses,
                                     router_losses_backward)
from reference.ops import linear, linear_backward
from reference.params import tree_map, weight


@dataclass(frozen=True)
class Experts:
    """Tensors of the router and the experts, or their gradients."""

    router: Any     # [h, E], replicated
    experts: Any    # of all experts: each tensor of an MLP, plain or gated, with one more axis, E
    shared: Any     # an MLP that computes all tokens, or None


class ExpertsCache(NamedTuple):
    """The caches of a layer with experts."""

    x: Any                                     # [b, s, h], the router's input
    routing: Annotated[Routing, Nested()]
    losses: Any                                # RouterLosses, or None
    order: Order
    weights: Any                               # [b, s, k], inside the region
    outputs: Any                               # [n, h] of the experts, in the order of their copies
    experts: Any                               # the experts' own caches, in a list: their rows have no place in a batch
    shared: Annotated[Any, Nested("shared")]   # the shared MLP's cache, or None


def experts_tensors(c):
    """Declare the tensors for a ModelConfig."""
    one = declare("mlp", replace(c, ffn_hidden_size=c.experts.moe_ffn_hidden_size or c.ffn_size))
    shared = c.experts.moe_shared_expert_intermediate_size
    return Experts(weight((c.hidden_size, c.experts.num_experts), c.init_method_std),
                   tree_map(lambda tensor: tensor.stacked(c.experts.num_experts), one),
                   declare("mlp", replace(c, ffn_hidden_size=shared)) if shared else None)


def experts_forward(x, p, c, context=TRAINING):
    """Map x [b, s, h] -> y [b, s, h]. c is the ModelConfig, `context` the layer's LayerContext."""
    logits = linear(x, p.router)                              # [b, s, h] @ [h, E] -> [b, s, E]
    routing = route(logits, c.experts)
    losses = losses_of_whole(logits, routing, c.experts, context)
    context.note_losses([losses])
    order = order_of(routing.ids, c.experts)
    outputs, experts = each_expert_forward(dispatch(x, order), p.experts, order.counts, c)
    y, shared = combine(outputs, routing.weights, order), None
    if p.shared is not None:
        y_shared, shared = layer_forward(x, p.shared, c)
        y = y + y_shared
    return y, ExpertsCache(x, routing, losses, order, routing.weights, outputs, experts, shared)


def losses_of_whole(logits, routing, c, context):
    """Return the RouterLosses of whole sequences. c is an ExpertsConfig."""
    length = logits.shape[1]
    choices = choices_of_sequences(routing.ids, c.num_experts, context, [slice(0, length)])
    return router_losses(logits, routing, choices, length, c, context, [slice(0, length)])


def experts_backward(dy, p, cache, c):
    """Return dx [b, s, h] and the gradients, as Experts, for dy [b, s, h]."""
    # forward: y = combine(experts(dispatch(x)), weights)
    doutputs, dweights = combine_backward(dy, cache.outputs, cache.weights, cache.order)
    dcopies, experts = each_expert_backward(doutputs, p.experts, cache.experts, cache.order.counts, c)
    dx, router = router_backward(dweights, p.router, cache, c)
    dx, shared = dx + dispatch_backward(dcopies, cache.order), None
    if p.shared is not None:
        dx_shared, shared = layer_backward(dy, p.shared, cache.shared, c)
        dx = dx + dx_shared
    return dx, Experts(router, experts, shared)


def router_backward(dweights, w, cache, c):
    """Return dx [b, s, h] and dw [h, E] for dweights [b, s, k], and for the router's own losses."""
    dlogits = route_backward(dweights, cache.routing, c.experts)
    dlogits = dlogits + router_losses_backward(cache.routing.probs, cache.losses, c.experts)
    dx, dw, _ = linear_backward(dlogits, cache.x, w)          # forward: logits = x @ w
    return dx, dw


def each_expert_forward(x, p, counts, c):
    """Apply each expert to its own rows of x [n, h], which are in the order of experts: -> [n, h]."""
    ys, caches = [], []
    for i, part in enumerate(np.split(x, np.cumsum(counts)[:-1])):
        y, cache = layer_forward(part, expert_of(p, i), c) if len(part) else (part, None)
        ys.append(y)
        caches.append(cache)
    return np.concatenate(ys), caches


def each_expert_backward(dy, p, caches, counts, c):
    """Return dx [n, h] and the gradients of the stacked tensors for dy [n, h]. An expert without rows has none."""
    dxs, grads = [], []
    for i, (part, cache) in enumerate(zip(np.split(dy, np.cumsum(counts)[:-1]), caches)):
        own = expert_of(p, i)
        dx, grad = layer_backward(part, own, cache, c) if len(part) else (part, tree_map(np.zeros_like, own))
        dxs.append(dx)
        grads.append(grad)
    return np.concatenate(dxs), tree_map(lambda *each: np.stack(each), *grads)


def expert_of(p, i):
    """Return expert i of stacked tensors."""
    return tree_map(lambda tensor: tensor[i], p)


# ---- each expert on t ranks -----------------------------------------------------------------------------------------


def sharded_experts_forward(xs, shards, c, region, context=TRAINING):
    """Map each rank's input x [b, s, h] to its output y [b, s, h]; both use the layout outside the region."""
    logits = [linear(x, p.router) for x, p in zip(xs, shards)]
    routings = [route(each, c.experts) for each in logits]
    ids, weights = region.enter([one.ids for one in routings]), region.enter([one.weights for one in routings])    # f
    partial, caches = [], []
    for rank, (x, positions) in enumerate(zip(region.enter(xs), region.positions(xs))):              # f
        choices = choices_of_sequences(ids[rank], c.experts.num_experts, context, [slice(0, x.shape[1])])
        losses = router_losses(logits[rank], routings[rank], choices, x.shape[1], c.experts, context, [positions])
        order = order_of(ids[rank], c.experts)
        outputs, experts = each_expert_forward(dispatch(x, order), biased_once(shards[rank].experts, rank),
                                               order.counts, c)
        partial.append(combine(outputs, weights[rank], order))
        caches.append(ExpertsCache(xs[rank], routings[rank], losses, order, weights[rank], outputs, experts, None))
    context.note_losses(region.parts_of_a_sum([cache.losses for cache in caches]))
    ys, shared = region.leave(partial), None                                                         # g
    if shards[0].shared is not None:
        ys_shared, shared = sharded_layer_forward(xs, [p.shared for p in shards], c, region)
        ys = [y + more for y, more in zip(ys, ys_shared)]
    return ys, (caches, shared)


def sharded_experts_backward(dys, shards, cache, c, region):
    """Return each rank's dx [b, s, h] and gradients for its dy [b, s, h]; both use the layout outside the region."""
    caches, shared = cache
    partial, dweights, experts = [], [], []
    for dy, p, one in zip(region.leave_backward(dys), shards, caches):
        doutputs, dweight = combine_backward(dy, one.outputs, one.weights, one.order)
        dcopies, grads = each_expert_backward(doutputs, p.experts, one.experts, one.order.counts, c)
        partial.append(dispatch_backward(dcopies, one.order))
        dweights.append(dweight)
        experts.append(grads)
    routed = [router_backward(dweight, p.router, one, c)
              for dweight, p, one in zip(region.enter_backward(dweights), shards, caches)]
    dxs = [dx + more for dx, (more, _) in zip(region.enter_backward(partial), routed)]
    dshared = [None] * len(shards)
    if shared is not None:
        dxs_shared, dshared = sharded_layer_backward(dys, [p.shared for p in shards], shared, c, region)
        dxs = [dx + more for dx, more in zip(dxs, dxs_shared)]
    return dxs, [Experts(router, *grads) for (_, router), *grads in zip(routed, experts, dshared)]


LAYER = Layer("experts", Experts, experts_tensors, experts_forward, experts_backward, sharded_experts_forward,
              sharded_experts_backward, order="router logits probs ids weights experts:mlp shared:mlp")


def biased_once(p, rank):
    """Return a rank's shard of the experts, with zeros for the last bias on all ranks but the first.

    The experts' outputs are partial sums until they leave the region, and a bias must be in the sum once. All ranks see
    all of dy, so its gradient is complete on each of them. (An MLP with a gate has no biases.)
    """
    return p if rank == 0 or not hasattr(p, "b_out") else replace(p, b_out=np.zeros_like(p.b_out))


# ---- experts on e ranks ---------------------------------------------------------------------------------------------


def dealt_experts_forward(xs, shards, c, contexts):
    """Map each rank's x [b, s, h], of its own samples, to y. Of each stacked tensor a rank holds its E/e experts."""
    logits = [linear(x, p.router) for x, p in zip(xs, shards)]
    routings = [route(each, c.experts) for each in logits]
    losses = [losses_of_whole(each, routing, c.experts, context)
              for each, routing, context in zip(logits, routings, contexts)]
    orders = [order_of(routing.ids, c.experts) for routing in routings]
    counts = [order.counts for order in orders]
    arrived = send_to_experts([dispatch(x, order) for x, order in zip(xs, orders)], counts)         # there
    outputs, experts = zip(*(each_expert_forward(x, p.experts, own, c)
                             for x, p, own in zip(arrived, shards, own_counts(counts))))
    outputs, ys, caches = return_from_experts(outputs, counts), [], []                               # and back
    for rank, (x, p, routing, order) in enumerate(zip(xs, shards, routings, orders)):
        contexts[rank].note_losses([losses[rank]])
        y, shared = combine(outputs[rank], routing.weights, order), None
        if p.shared is not None:
            y_shared, shared = layer_forward(x, p.shared, c)
            y = y + y_shared
        ys.append(y)
        caches.append(ExpertsCache(x, routing, losses[rank], order, routing.weights, outputs[rank], experts[rank],
                                   shared))
    return ys, caches


def dealt_experts_backward(dys, shards, caches, c):
    """Return each rank's dx [b, s, h] for its dy, and its gradients, each the sum over all e ranks' samples."""
    counts = [cache.order.counts for cache in caches]
    doutputs, dweights = zip(*(combine_backward(dy, cache.outputs, cache.weights, cache.order)
                               for dy, cache in zip(dys, caches)))
    dcopies, experts = zip(*(each_expert_backward(dy, p.experts, cache.experts, own, c)
                             for dy, p, cache, own in zip(send_to_experts(doutputs, counts), shards, caches,
                                                          own_counts(counts))))
    dcopies, dxs, grads = return_from_experts(dcopies, counts), [], []
    for rank, (dy, p, cache) in enumerate(zip(dys, shards, caches)):
        dx, router = router_backward(dweights[rank], p.router, cache, c)
        dx, shared = dx + dispatch_backward(dcopies[rank], cache.order), None
        if p.shared is not None:
            dx_shared, shared = layer_backward(dy, p.shared, cache.shared, c)
            dx = dx + dx_shared
        dxs.append(dx)
        grads.append(Experts(router, experts[rank], shared))
    return dxs, sum_of_copies(grads)


def own_counts(counts):
    """Return how many copies each rank's own experts get from all ranks, [E/e], from all ranks' counts [E]."""
    return np.split(sum(counts), len(counts))


def sum_of_copies(grads):
    """Sum the gradients of the router and of the shared MLP over ranks with different samples. The experts' have it."""
    def total(*each):
        return all_reduce(each)[0]

    router, shared = total(*[one.router for one in grads]), tree_map(total, *[one.shared for one in grads])
    return [Experts(router, one.experts, shared) for one in grads]


# ---- the wrong way --------------------------------------------------------------------------------------------------


def averaged_gradients(grads):
    """Return the gradients of one step from those of e ranks' own mean losses, by the rule for a dense model: divide by
    the number of ranks that hold a copy.

    The loss is the mean of e means, so all gradients must be divided by e. A copy of the router is on e ranks, but each
    expert is on one, and has the sum over all e ranks already: its gradient is e times too large. (Hence Megatron-LM's
    gradient scaling factor for expert-parallel parameters, and here losses that are divided by the *global* batch.)
    """
    return [Experts(one.router / len(grads), one.experts, tree_map(lambda x: x / len(grads), one.shared))
            for one in grads]
