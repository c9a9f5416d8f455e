"""A pipeline computes what one process does, whatever the schedule."""
import numpy as np
from hypothesis import given, strategies as st

from reference.models.model import model_tensors
from reference.models.stage import join_stages
from reference.parallel.pipeline import in_time, pipeline_gradients, split_into_stages
from reference.parallel.stages import layers_of_stage
from reference.schedules.actions import needs
from reference.schedules.generators import SCHEDULES, make
from reference.training.trainer import loss_and_gradients
from tests.cases import take
from tests.strategies import ANY_MODEL, cases, close, trees_close


@st.composite
def training_schedules(draw):
    """Draw schedules with a backward, for up to 3 ranks and 6 microbatches."""
    name, p = draw(st.sampled_from(sorted(set(SCHEDULES) - {"forward-only"}))), draw(st.integers(1, 3))
    if name == "interleaved":
        return make(name, p, p * draw(st.integers(1, 2)), draw(st.integers(1, 3)))
    return make(name, p, draw(st.integers(1, 6)))


@given(training_schedules(), st.data())
def test_any_schedule_gives_the_gradients_of_one_process(schedule, data):
    """Loss and gradients of the whole batch, from stages of ragged models; both copies of a tied table have them.

    Dropout is on: each microbatch has the masks of its samples, wherever and whenever it is worked on.
    """
    layers = schedule.stages + data.draw(st.integers(0, 2))
    shared = data.draw(st.booleans(), "share layers")
    pipeline_equals_one_process(schedule, data.draw(cases(num_layers=layers, architectures=ANY_MODEL,
                                                          share_layers=shared)))


def pipeline_equals_one_process(schedule, case):
    """Check the loss and all gradients, all copies of a tied table and of a shared block among them."""
    p, m = case.params(model_tensors(case.model)), schedule.microbatches
    whole = case.batch("", m * case.b)
    batches = [take(whole, slice(i * case.b, (i + 1) * case.b)) for i in range(m)]
    layers = [layers_of_stage(stage, schedule.stages, case.model.num_layers) for stage in range(schedule.stages)]
    loss, grads = pipeline_gradients(batches, split_into_stages(p, layers, case.model), schedule, case.model,
                                     case.dropout)
    expected_loss, expected = loss_and_gradients(whole, p, case.model, case.dropout)
    close(np.stack([loss]), np.stack([expected_loss]))
    trees_close(join_stages(grads), expected, 1e-10)
    for stage in grads:
        if case.model.share_layers:
            trees_close(stage.blocks.shared, expected.blocks.shared, 1e-10)
        if stage.embedding.word is not None:
            close(stage.embedding.word, expected.embedding.word, 1e-10)


@given(training_schedules())
def test_the_order_in_time_is_one_that_can_happen(schedule):
    """Every action comes after what it needs, and once."""
    order = in_time(schedule)
    place = {action: i for i, action in enumerate(order)}
    assert len(place) == len(order) == sum(map(len, schedule.ranks))
    for action in order:
        need = needs(action, schedule.stages)
        if need is not None:
            assert place[need if need in place else need._replace(kind="I")] < place[action]
