"""The executor: whatever the schedule, every message arrives where it is needed, unchanged, and none is left over."""
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpi_impl.parallel.pipeline import Pipeline, tag
from reference.config import ParallelConfig
from reference.errors import UserError
from reference.schedules.actions import Action, Receive, Schedule, needs, result
from reference.schedules.generators import evaluation_schedule, one_f_one_b
from reference.schedules.validate import validate
from tests.reference.test_schedules import placements, schedules
from tests.training_theorems import connected, every_message_arrives


@st.composite
def shuffled_schedules(draw, most_ranks):
    """Draw a schedule with any stages on any ranks, in any order."""
    return draw(orders(draw(placements(most_ranks)), draw(st.integers(1, 4))))


@st.composite
def orders(draw, placement, m):
    """Draw a schedule of this placement: microbatches in any order, each backward whole or split, each W any time after
    its I.

    Actions are drawn in an order that one process could follow, each after those that it needs, and a rank keeps the
    order of its own. So the schedule never deadlocks.
    """
    random, stages = Random(draw(st.integers(0, 2**32))), sum(map(len, placement))
    left = [Action(stage, kind, i) for stage in range(stages) for i in range(m)
            for kind in "F" + random.choice(["B", "IW"])]
    done, order = set(), []
    while left:
        action = random.choice([a for a in left if all(before in done for before in prerequisites(a, stages))])
        left.remove(action)
        done |= {action, result(action)}
        order.append(action)
    return Schedule(tuple(tuple(a for a in order if a.stage in held) for held in placement))


def prerequisites(action, stages):
    """Return the actions that must come before an action, of its own stage and of a neighbour."""
    own = {"F": [], "B": ["F"], "I": ["F"], "W": ["I"]}[action.kind]
    need = needs(action, stages)
    return [action._replace(kind=kind) for kind in own] + ([need] if need else [])


@st.composite
def plays(draw):
    """Draw a schedule, the ranks' configuration, and the shape and type of the messages."""
    t = draw(st.integers(1, 3), "t")
    most = 8 // t
    schedule = draw(st.one_of(schedules(most=most), shuffled_schedules(most),
                              st.builds(evaluation_schedule, placements(most), st.integers(1, 5))))
    d = draw(st.integers(1, most // schedule.p), "d")
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 3)), t * draw(st.integers(1, 3)))
    config = ParallelConfig(t, schedule.p, d, scatter_gather_tensors_in_pipeline=draw(st.booleans(), "scatter/gather"))
    return schedule, config, shape, draw(st.sampled_from(["f", "d"]), "dtype")


@given(plays())
def test_any_schedule_is_played(ranks, play):
    """Of any generator, on any placement, in any order: each action gets what it needs, once, in its turn."""
    schedule, config, shape, dtype = play
    validate(schedule)
    ranks.run(config.world_size, every_message_arrives, schedule, config, shape, dtype)


def test_receives_are_posted_early_and_sends_let_go_of(ranks):
    """While a rank does an action, the next two receives are posted already, or as many as are left. As a rank of 1F1B
    is at most p microbatches ahead, it holds no more messages than that, however many it sends.
    """
    for r, seen in enumerate(ranks.run(3, messages_at_each_action, one_f_one_b(3, 40))):
        for posted, left, sent in seen:
            assert posted == min(2, left), f"rank {r} has posted {posted} of the {left} receives to come"
            assert sent <= 6


def messages_at_each_action(group, schedule):
    """Return for each action of this rank the posted receives, those it has yet to wait for, and the unfinished sends.
    """
    seen = []
    with connected(group, ParallelConfig(pipeline_model_parallel_size=schedule.p)) as topology:
        pipeline = Pipeline(schedule, topology)

        def act(action, x):
            left = pipeline.steps[pipeline.steps.index(action) + 1:]
            seen.append((len(pipeline.posted), sum(isinstance(step, Receive) for step in left), len(pipeline.sent)))
            return np.zeros(10)

        pipeline.play(dict.fromkeys("FB", act), np.empty(0), (10,))
    return seen


@given(shuffled_schedules(8))
def test_tags_are_the_results_own(schedule):
    """No two results have the same tag, whoever gets them; and tags are small, for MPI has a largest one."""
    actions = {result(action) for actions in schedule.ranks for action in actions if action.kind != "W"}
    tags = {tag(action, schedule.stages) for action in actions}
    assert len(tags) == len(actions) and min(tags) >= 0
    assert max(tags) < 2 * schedule.stages * schedule.microbatches


@given(schedules(most=8))
def test_more_messages_than_mpi_has_tags_for_are_refused(schedule):
    """Exactly where the largest tag of a result is more than MPI's."""
    largest = max(tag(action, schedule.stages) for actions in schedule.ranks for action in actions)
    group = SimpleNamespace(rank=0, largest_tag=largest)
    topology = SimpleNamespace(pipeline=group, tensor=None, config=ParallelConfig())
    Pipeline(schedule, topology)
    group.largest_tag -= 1
    with pytest.raises(UserError, match=f"{schedule.microbatches} microbatches through {schedule.stages} stages"):
        Pipeline(schedule, topology)
