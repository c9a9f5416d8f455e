"""Experts: ties, capacities, and wrong ways to train. test_theorems.py proves the rest."""
import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference.comm.expert_parallel import return_from_experts, send_to_experts
from reference.config import ExpertsConfig, ModelConfig
from reference.layer_context import AuxiliaryLosses, LayerContext
from reference.layers.dispatch import combine, order_of
from reference.layers.experts import (averaged_gradients, dealt_experts_backward, dealt_experts_forward,
                                      experts_backward, experts_forward, experts_tensors, losses_of_whole,
                                      sharded_experts_backward, sharded_experts_forward)
from reference.layers.router import balance_of_microbatches, route, route_backward, router_losses_backward, top_k
from reference.params import deal, split
from tests.cases import Case, close
from tests.reference.test_ops import gradient_is_right

MODEL = ModelConfig(1, 4, 2, 5, 8, experts=ExpertsConfig(4, 2, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.1))
TENSORS, TWO_RANKS = experts_tensors(MODEL), Case(2, MODEL, 2, 4, 7, sequence_parallel=True)
PARAMS, RNG = TWO_RANKS.params(TENSORS), np.random.default_rng(0)


def test_the_first_of_equal_logits_is_chosen():
    assert top_k(np.array([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]]), 2).tolist() == [[1, 2], [0, 1]]


@pytest.mark.parametrize("pre_softmax", [False, True])
def test_the_routers_gradient_is_a_derivative(pre_softmax):
    """The weights of the chosen experts, and both losses, as functions of the logits."""
    c = ExpertsConfig(4, 2, pre_softmax, moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.2)
    context = LayerContext(auxiliary=AuxiliaryLosses(2, 6))
    logits, dweights = RNG.normal(size=(2, 3, 4)), RNG.normal(size=(2, 3, 2))

    def value(logits):
        routing = route(logits, c)
        losses = losses_of_whole(logits, routing, c, context)
        return np.stack([(routing.weights * dweights).sum() + losses.values @ [0.3, 0.2]])

    routing = route(logits, c)
    dlogits = route_backward(dweights, routing, c) + router_losses_backward(
        routing.probs, losses_of_whole(logits, routing, c, context), c)
    gradient_is_right(dlogits, value, logits, 1.0)


@given(st.integers(1, 4), st.integers(1, 2), st.data())
def test_what_travels_to_experts_comes_back(e, each, data):
    """Copies arrive in the order of their experts."""
    counts = [np.array(data.draw(st.lists(st.integers(0, 3), min_size=e * each, max_size=e * each))) for _ in range(e)]
    labels = [np.repeat(np.arange(e * each), own) for own in counts]
    arrived = send_to_experts(labels, counts)
    for rank, found in enumerate(arrived):
        assert found.tolist() == sorted(found.tolist()) and (found // each == rank).all()
    for sent, back in zip(labels, return_from_experts(arrived, counts), strict=True):
        assert (sent == back).all()


def test_a_capacity_drops_the_last_copies_of_an_expert():
    """Of four tokens that all choose expert 0 first, a factor of 1 keeps two; dropped copies add nothing."""
    ids = np.array([[[0, 1], [0, 1], [0, 2], [0, 3]]])
    order = order_of(ids, ExpertsConfig(4, 2, moe_expert_capacity_factor=1.0))
    assert order.copies.tolist() == [0, 2, 1, 3, 5, 7] and order.counts.tolist() == [2, 2, 1, 1]
    y = combine(np.ones((6, 1)), np.ones(ids.shape), order)
    assert y[0, :, 0].tolist() == [2, 2, 1, 1]


# ---- the wrong ways, shown to be wrong ------------------------------------------------------------------------------


def test_a_loss_over_microbatches_depends_on_their_number():
    """The same eight sequences in one, two, four microbatches have three losses; the mean over sequences has one."""
    routing = route(np.random.default_rng(1).normal(size=(8, 4, 3)), ExpertsConfig(3, 2))
    usual = [balance_of_microbatches(routing.probs, routing.ids, parts) for parts in (1, 2, 4)]
    assert min(abs(np.diff(usual))) > 1e-3
    each = [balance_of_microbatches(routing.probs[i:i + 1], routing.ids[i:i + 1], 1) for i in range(8)]
    close(np.array(sum(each) / 8), np.array(balance_of_microbatches(routing.probs, routing.ids, 8)))


def test_averaged_gradients_are_too_large_for_experts():
    """Gradients of the mean over two ranks' own means: divided by two, those of experts are twice what they must be."""
    x, dy = TWO_RANKS.array("x", 4, 4, 4), TWO_RANKS.array("dy", 4, 4, 4)
    _, whole = experts_backward(dy, PARAMS, experts_forward(x, PARAMS, MODEL)[1], MODEL)
    shards = deal(PARAMS, TENSORS, 2)
    _, caches = dealt_experts_forward(np.split(x, 2), shards, MODEL, [LayerContext()] * 2)
    _, local = dealt_experts_backward(np.split(2 * dy, 2), shards, caches, MODEL)   # each divides by its own samples
    wrong = averaged_gradients(local)
    close(wrong[0].router, whole.router)
    close(wrong[1].experts.w_in, 2 * whole.experts.w_in[2:])


def test_the_routers_gradient_is_partial_under_sequence_parallelism():
    """Without the sum over t ranks each router would learn from its own positions alone (Megatron-LM issue 599)."""
    x, dy, region = TWO_RANKS.x(), TWO_RANKS.x("dy"), TWO_RANKS.region
    _, whole = experts_backward(dy, PARAMS, experts_forward(x, PARAMS, MODEL)[1], MODEL)
    shards = split(PARAMS, TENSORS, 2)
    _, cache = sharded_experts_forward(np.split(x, 2, 1), shards, MODEL, region)
    _, grads = sharded_experts_backward(np.split(dy, 2, 1), shards, cache, MODEL, region)
    assert abs(grads[0].router - whole.router).max() > 0.1
    close(grads[0].router + grads[1].router, whole.router)
    close(region.complete(grads, TENSORS)[1].router, whole.router)
