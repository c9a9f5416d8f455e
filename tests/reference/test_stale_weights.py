"""Pipelines without a flush: how late their gradients are, and of which model they are the gradients."""

import numpy as np
from hypothesis import given, strategies as st

from reference.config import ModelConfig
from reference.models.model import model_tensors
from reference.models.stage import join_stages
from reference.parallel.pipeline import split_into_stages
from reference.parallel.stages import layers_of_stage
from reference.parallel.stale_weights import NEWEST, STASHED, VERTICAL_SYNC, WAYS, late_updates, train_without_flush
from reference.params import leaves, tree_map
from reference.schedules.generators import make
from reference.training.trainer import loss_and_gradients
from tests.strategies import cases, close, trees_close

RATE = 0.1
UNTIED = ModelConfig(4, 8, 2, 11, 5, hidden_dropout=0, attention_dropout=0, untie_embeddings_and_output_weights=True)


@st.composite
def pipelines(draw, fewest=1):
    """Draw an untied model, the number of its stages and some microbatches."""
    p = draw(st.integers(fewest, 4))
    return draw(cases(num_layers=p + draw(st.integers(0, 1)), untie_embeddings_and_output_weights=True)), p, \
        draw(st.integers(p, 5))


def trained(drawn, way, rate=RATE):
    """Train without a flush; return the microbatches, the whole parameters at the start, and what training returns."""
    case, p, m = drawn
    batches = [case.batch(f"microbatch {i}", case.b) for i in range(m)]
    start = case.params(model_tensors(case.model))
    layers = [layers_of_stage(stage, p, case.model.num_layers) for stage in range(p)]
    stages = split_into_stages(start, layers, case.model)
    return batches, start, train_without_flush(batches, stages, make("1f1b", p, m), case.model, rate, way)


@given(pipelines())
def test_stashed_weights_give_the_gradient_of_a_model_of_many_ages(drawn):
    """A forward on stage i of p lacks p - 1 - i updates, or all there have been; so each needs p - i versions. Loss and
    gradients of each microbatch are those of one process, with each stage's weights as its forward met.
    """
    case, p, m = drawn
    batches, _, (losses, late, versions) = trained(drawn, STASHED)
    assert all(one.most == p - stage if m >= 2 * p - 1 else one.most <= p - stage for stage, one in enumerate(versions))
    for i, batch in enumerate(batches):
        ways = [late[stage, i] for stage in range(p)]
        for stage, way in enumerate(ways):
            assert late_updates(late, stage, i) == min(i, p - 1 - stage)
            assert way.backward.updates == way.forward.updates
        loss, grads = loss_and_gradients(batch, join_stages([way.forward.params for way in ways]), case.model)
        close(np.stack([losses[i]]), np.stack([loss]))
        trees_close(join_stages([way.grads for way in ways]), grads, 1e-10)


@given(pipelines(fewest=2))
def test_the_newest_weights_give_the_gradient_of_no_model(drawn):
    """The last stage has nothing late, so its gradient is right; before it, the error begins with the first late
    microbatch, and is of the order of the rate.
    """
    case, p, m = drawn
    batches, _, (_, late, versions) = trained(drawn, NEWEST)
    assert {one.most for one in versions} == {1}
    for i, batch in enumerate(batches):
        ways = [late[stage, i] for stage in range(p)]
        _, grads = loss_and_gradients(batch, join_stages([way.forward.params for way in ways]), case.model)
        expected = dict(leaves(grads))
        moved = [way.backward.updates > way.forward.updates for way in ways]
        assert moved == [i > 0 and stage < p - 1 for stage in range(p)]
        for name, grad in leaves(ways[-1].grads):
            close(grad, expected[name], 1e-10)


@given(pipelines())
def test_vertical_sync_is_gradient_descent_that_is_late(drawn):
    """In all stages by p - 1 updates: one process that keeps the last p versions of the whole model does the same."""
    case, p, m = drawn
    batches, start, (losses, late, versions) = trained(drawn, VERTICAL_SYNC)
    models = [start]
    for i, batch in enumerate(batches):
        met = models[max(0, i - (p - 1))]
        assert {late_updates(late, stage, i) for stage in range(p)} == {min(i, p - 1)}
        loss, grads = loss_and_gradients(batch, met, case.model)
        close(np.stack([losses[i]]), np.stack([loss]))
        models.append(tree_map(lambda weight, grad: weight - RATE * grad, models[-1], grads))
    trees_close(join_stages([one.newest.params for one in versions]), models[-1], 1e-10)
    assert {one.most for one in versions} == {min(m, p)}


@given(pipelines(), st.sampled_from(WAYS))
def test_one_stage_is_gradient_descent(drawn, way):
    """With nobody to wait for, all ways train as one process does."""
    case, _, m = drawn
    batches, params, (losses, _, (last,)) = trained((case, 1, m), way)
    for batch, found in zip(batches, losses):
        loss, grads = loss_and_gradients(batch, params, case.model)
        close(np.stack([found]), np.stack([loss]))
        params = tree_map(lambda weight, grad: weight - RATE * grad, params, grads)
    trees_close(last.newest.params, params, 1e-10)
