"""Experts: the router, its losses, dispatch and combine; experts on t ranks, and dealt out to e."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from reference.comm.expert_parallel import return_from_experts, send_to_experts
from reference.config import ExpertsConfig, ModelConfig
from reference.errors import UserError
from reference.layer_context import AuxiliaryLosses, LayerContext
from reference.layers.dispatch import combine, dispatch, order_of
from reference.layers.experts import (averaged_gradients, dealt_experts_backward, dealt_experts_forward,
                                      experts_backward, experts_forward, experts_tensors, losses_of_whole,
                                      sharded_experts_backward, sharded_experts_forward)
from reference.layers.router import (balance_of_microbatches, overwritten_counts, route, route_backward,
                                     router_losses_backward, top_k)
from reference.params import deal, split
from tests import experts_theorems as theorems, textbook_theorems
from tests.strategies import ANY_MODEL, SIZES, Case, cases, close, recomputes

WITH_EXPERTS = dict(architectures=ANY_MODEL, experts=1)
RNG = np.random.default_rng(0)


@given(cases(sizes=st.just(1), **WITH_EXPERTS))
def test_experts_are_their_definition(case):
    """A loop over tokens gives the same, whatever the load of the experts."""
    theorems.experts_are_their_definition(case)


@given(cases(**WITH_EXPERTS))
def test_each_expert_on_t_ranks(case):
    theorems.experts_equal_whole(case)


@given(st.integers(1, 4).flatmap(lambda e: st.tuples(cases(sizes=st.just(1), architectures=ANY_MODEL, experts=e),
                                                     st.just(e))))
def test_experts_dealt_out_to_e_ranks(case_and_e):
    """It holds for uneven loads, for experts without tokens, and for more ranks than a sample has tokens."""
    theorems.dealt_experts_equal_whole(*case_and_e)


@given(cases(**WITH_EXPERTS), recomputes())
def test_a_model_with_experts(case, recompute):
    textbook_theorems.model_equals_whole(case, recompute)


@settings(max_examples=settings().max_examples // 2)
@given(cases(sizes=st.just(1), **WITH_EXPERTS))
def test_gradients_agree_with_central_differences(case):
    """Those of the auxiliary losses too, which are added to the loss with their coefficients."""
    textbook_theorems.gradients_are_derivatives(case)


@pytest.mark.parametrize("pre_softmax", [False, True])
def test_the_routers_gradient_is_a_derivative(pre_softmax):
    """The weights of the chosen experts, and both losses, as functions of the logits."""
    c, context = ExpertsConfig(4, 2, pre_softmax, moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.2), losses_of(2, 6)
    logits, dweights, step = RNG.normal(size=(2, 3, 4)), RNG.normal(size=(2, 3, 2)), 1e-6

    def value(logits):
        routing = route(logits, c)
        losses = losses_of_whole(logits, routing, c, context)
        return (routing.weights * dweights).sum() + losses.values @ [0.3, 0.2]

    routing = route(logits, c)
    dlogits = route_backward(dweights, routing, c) + router_losses_backward(
        routing.probs, losses_of_whole(logits, routing, c, context), c)
    for place in np.ndindex(logits.shape):
        beside = step * theorems.one_at(place, logits.shape)
        assert abs((value(logits + beside) - value(logits - beside)) / (2 * step) - dlogits[place]) < 1e-8


def losses_of(sequences, tokens):
    return LayerContext(auxiliary=AuxiliaryLosses(sequences, tokens))


@given(cases(sizes=st.just(1), experts=1), SIZES, SIZES)
def test_replicas_equal_one_process(case, d, m):
    """The losses of the routers too are the same however the batch is dealt out."""
    textbook_theorems.replicas_equal_one_process(case, d % 3 + 1, m % 3 + 1)


def test_the_first_of_equal_logits_is_chosen():
    assert top_k(np.array([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]]), 2).tolist() == [[1, 2], [0, 1]]


@given(st.integers(1, 3).flatmap(lambda k: st.tuples(st.just(k), st.integers(k, 5))), st.integers(1, 4))
def test_combine_is_the_adjoint_of_dispatch_where_all_weights_are_one(sizes, s):
    k, n = sizes
    c, ids = ExpertsConfig(n, k, True), np.argsort(RNG.normal(size=(2, s, n)), -1)[..., :k]
    order, x = order_of(ids, c), RNG.normal(size=(2, s, 3))
    copies = RNG.normal(size=(ids.size, 3))
    close(np.vdot(dispatch(x, order), copies), np.vdot(x, combine(copies, np.ones(ids.shape), order)))


@given(st.integers(1, 4), st.integers(1, 2), st.data())
def test_what_travels_to_experts_comes_back(e, each, data):
    counts = [np.array(data.draw(st.lists(st.integers(0, 3), min_size=e * each, max_size=e * each))) for _ in range(e)]
    copies = [RNG.normal(size=(own.sum(), 2)) for own in counts]
    arrived = send_to_experts(copies, counts)
    for x, back in zip(copies, return_from_experts(arrived, counts), strict=True):
        assert (x == back).all()
    labels = send_to_experts([np.repeat(np.arange(e * each), own) for own in counts], counts)
    for rank, found in enumerate(labels):
        assert found.tolist() == sorted(found.tolist())
        assert all(expert // each == rank for expert in found)


def test_a_capacity_drops_the_last_copies_of_an_expert():
    """Of four tokens that all choose expert 0 first, a factor of 1 keeps two; dropped copies add nothing."""
    ids = np.array([[[0, 1], [0, 1], [0, 2], [0, 3]]])
    order = order_of(ids, ExpertsConfig(4, 2, moe_expert_capacity_factor=1.0))
    assert order.copies.tolist() == [0, 2, 1, 3, 5, 7] and order.counts.tolist() == [2, 2, 1, 1]
    y = combine(np.ones((6, 1)), np.ones(ids.shape), order)
    assert y[0, :, 0].tolist() == [2, 2, 1, 1]


def test_an_even_router_has_a_load_balancing_loss_of_one():
    """It is larger where some experts are chosen more often and more probably, up to E/k."""
    c = ExpertsConfig(4, 2)
    for logits, expected in ((np.kron(np.eye(2), np.ones((1, 2))), 1.0), (np.array([[9.0, 9, 0, 0]]), 2.0)):
        probs = route(100 * logits[None], c).probs
        shares = np.bincount(top_k(100 * logits, 2).reshape(-1), minlength=4) / logits.shape[0] / 2
        assert abs(4 * (shares * probs[0].mean(0)).sum() - expected) < 1e-3


# ---- the wrong ways, shown to be wrong ------------------------------------------------------------------------------


def test_a_loss_over_microbatches_depends_on_their_number():
    """The same eight sequences in one, two, four microbatches have three losses; the mean over sequences has one."""
    routing = route(np.random.default_rng(1).normal(size=(8, 4, 3)), ExpertsConfig(3, 2))
    usual = [balance_of_microbatches(routing.probs, routing.ids, parts) for parts in (1, 2, 4)]
    assert min(abs(np.diff(usual))) > 1e-3
    each = [balance_of_microbatches(routing.probs[i:i + 1], routing.ids[i:i + 1], 1) for i in range(8)]
    close(np.array(sum(each) / 8), np.array(balance_of_microbatches(routing.probs, routing.ids, 8)))


def small_layer(t=1):
    case = textbook_case(t)
    return case, case.model, experts_tensors(case.model), case.params(experts_tensors(case.model))


def textbook_case(t):
    """Return a fixed case with four experts."""
    model = ModelConfig(1, 4, 2, 5, 8, experts=ExpertsConfig(4, 2, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.1))
    return Case(t, model, 2, 4, 7, sequence_parallel=t > 1)


def test_averaged_gradients_are_too_large_for_experts():
    """Gradients of the mean over two ranks' own means: divided by two, those of experts are twice what they must be."""
    case, c, tensors, p = small_layer()
    x, dy = case.array("x", 4, 4, 4), case.array("dy", 4, 4, 4)
    _, whole = experts_backward(dy, p, experts_forward(x, p, c)[1], c)
    shards = deal(p, tensors, 2)
    _, caches = dealt_experts_forward(np.split(x, 2), shards, c, [LayerContext()] * 2)
    _, local = dealt_experts_backward(np.split(2 * dy, 2), shards, caches, c)     # each divides by its own samples
    wrong = averaged_gradients(local)
    close(wrong[0].router, whole.router)
    close(wrong[1].experts.w_in, 2 * whole.experts.w_in[2:])


def test_the_routers_gradient_is_partial_under_sequence_parallelism():
    """Without the sum over t ranks each router would learn from its own positions alone (Megatron-LM issue 599)."""
    case, c, tensors, p = small_layer(t=2)
    x, dy = case.x(), case.x("dy")
    _, whole = experts_backward(dy, p, experts_forward(x, p, c)[1], c)
    shards = split(p, tensors, 2)
    _, cache = sharded_experts_forward(np.split(x, 2, 1), shards, c, case.region)
    _, grads = sharded_experts_backward(np.split(dy, 2, 1), shards, cache, c, case.region)
    assert abs(grads[0].router - whole.router).max() > 0.1
    close(grads[0].router + grads[1].router, whole.router)
    close(case.region.complete(grads, tensors)[1].router, whole.router)


def test_an_all_reduce_in_place_loses_the_own_count():
    """Each rank has 3 tokens, and both 6: the own count is 6 as well, and a loss that is multiplied by it doubles."""
    totals, own = overwritten_counts([np.array([3.0]), np.array([3.0])])
    assert [x.item() for x in totals] == [6, 6] and [x.item() for x in own] == [6, 6]


# ---- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("choices", "sentence"), [
    (dict(num_experts=2, moe_router_topk=3), "--moe-router-topk is 3, but --num-experts is 2"),
    (dict(num_experts=4, moe_router_topk=1), "would never learn"),
    (dict(num_experts=0), "--num-experts is 0, but must be at least 1"),
    (dict(num_experts=4, moe_layer_freq=0), "--moe-layer-freq is 0"),
    (dict(num_experts=4, moe_aux_loss_coeff=-1.0), "--moe-aux-loss-coeff is -1.0"),
    (dict(num_experts=4, moe_expert_capacity_factor=0.0), "--moe-expert-capacity-factor is 0.0"),
])
def test_choices_that_make_no_sense(choices, sentence):
    with pytest.raises(UserError, match=sentence):
        ExpertsConfig(**choices)
