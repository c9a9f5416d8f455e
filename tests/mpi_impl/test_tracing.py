"""--trace: what is written at the end of a run."""
import json
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpi_impl.comm.clock import VirtualClock, WallClock
from mpi_impl.comm.group import Group, Instruments
from mpi_impl.comm.topology import connect, disconnect
from mpi_impl.comm.trace import Trace
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.reports.timelines import gantt
from mpi_impl.reports.timelines.gantt import draw_timelines
from mpi_impl.reports.timelines.timelines import measured_times, slices_of
from mpi_impl.reports.timelines.tracing import KEPT, TracedSteps
from mpi_impl.training.trainer import Trainer
from reference.batches import GPTBatch
from reference.config import ModelConfig, ParallelConfig
from reference.optimizer import OptimizerConfig
from reference.parallel.stages import schedule_of
from reference.precision import Precision
from reference.schedules.generators import SCHEDULES, make
from reference.schedules.simulate import Times, simulate
from tests.deep import every_other_deep

TIME = st.floats(0.1, 10)
MICROBATCHES = 4


@given(st.data())
def test_times_are_read_off_a_timeline(data):
    """They are medians over two steps, by stage; an undivided backward gives the sum of I and W."""
    name, p = data.draw(st.sampled_from(sorted(set(SCHEDULES) - {"forward-only"}))), data.draw(st.integers(1, 4))
    schedule = make(name, p, p * 2, 2 if name == "interleaved" else None)
    by_stage = st.lists(TIME, min_size=schedule.stages, max_size=schedule.stages)
    times = Times(data.draw(by_stage), data.draw(by_stage), data.draw(by_stage), 0.5)
    found = measured_times([[own, own] for own in slices_of(simulate(schedule, times))], schedule, 0.5)
    for action in {action for actions in schedule.ranks for action in actions}:
        assert found.of(action) == pytest.approx(times.of(action))
    assert found.communication == 0.5


@pytest.mark.parametrize("clock, t, p, d, steps", every_other_deep([
    (VirtualClock, 2, 2, 2, 2), (WallClock, 2, 2, 2, 2), (WallClock, 1, 4, 1, KEPT + 2),
    (VirtualClock, 1, 4, 1, KEPT + 2), (WallClock, 1, 1, 1, 1), (VirtualClock, 1, 1, 1, 1)]))
def test_the_last_steps_of_all_ranks_are_written(ranks, tmp_path, clock, t, p, d, steps):
    """A process for each rank, and in it every action of the last steps, once a step; and a picture."""
    began, (measured, predicted) = ranks.run(t * p * d, trace_steps, str(tmp_path), clock, t, p, steps)[0]
    starts = [s.start for slices in measured.ranks for s in slices if s.action]
    assert measured.name == "measured, last step" and measured.ranks[0][0].start >= began
    assert len(starts) == 2 * p * MICROBATCHES == sum(map(len, predicted.ranks))
    events = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    for rank in range(t * p * d):
        names = [event["name"] for event in events if event["pid"] == rank + 1 and event["cat"] in "FB"]
        stage = rank // (t * d)
        assert sorted(names) == sorted(min(steps, KEPT) * [f"{stage}{kind}{i}" for kind in "FB"
                                                           for i in range(MICROBATCHES)])
    updates = [event for event in events if event["name"] == "optimizer" and event["cat"] == "other"]
    assert len(updates) == t * p * d * min(steps, KEPT)
    assert all(event["tid"] == event["pid"] for event in updates), "the stream of computation is the first of each rank"
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def trace_steps(group, folder, clock, t, p, steps):
    """Run some steps of a small GPT, and after each an evaluation, which belongs to no step.

    Return when the last step began, and the panels of the picture.
    """
    watched = Group(group.comm, "world", Instruments(trace=Trace(clock(), recording=True)))
    topology = connect(watched, ParallelConfig.for_world(group.size, t, p))
    trainer = Trainer(ModelState(ModelConfig(4, 8, 2, 16, 8), topology, 1, Precision("float32")),
                      OptimizerConfig(1e-3, 10))
    tokens = np.arange(16).reshape(2, 8)
    batch = [GPTBatch(tokens, tokens)] * MICROBATCHES, 2 * MICROBATCHES * topology.data.size
    traced_steps = TracedSteps(topology)
    for _ in range(steps):
        began = watched.trace.clock.now()
        with traced_steps.step():
            trainer.step(*batch)
        trainer.evaluate(*batch)
    panels = []
    with patch.object(gantt, "draw_timelines", lambda path, found: (panels.extend(found), draw_timelines(path, found))):
        traced_steps.write(folder, schedule_of(topology.config, MICROBATCHES), 1024)
    disconnect(topology)
    return began, panels


def test_a_step_begins_at_one_time(ranks):
    """However long a rank has been busy with what is no part of a step: checking it, for instance."""
    starts = ranks.run(3, starts_of_steps)
    assert starts[0][0] >= 100 and starts == [starts[0]] * 3


def test_a_clock_of_its_own_replaces_the_runs_for_a_step(ranks):
    """And no longer: the steps after it carry no time stamps."""
    assert ranks.run(2, clocks_of_a_step) == [("VirtualClock", "WallClock", "communication")] * 2


def clocks_of_a_step(group):
    """Return the clocks in a step and after it, and the kind of what was traced."""
    watched = Group(group.comm, "world", Instruments())
    topology = connect(watched, ParallelConfig(2))
    steps = TracedSteps(topology, VirtualClock())
    with steps.step():
        inside = type(watched.trace.clock).__name__
        topology.tensor.all_reduce(np.ones(1), "a sum")
    after = type(watched.trace.clock).__name__
    topology.tensor.all_reduce(np.ones(1), "another sum")
    disconnect(topology)
    (slice,) = steps.steps[-1]
    return inside, after, slice.kind


def starts_of_steps(group):
    clock = VirtualClock(times=Times())
    watched = Group(group.comm, "world", Instruments(trace=Trace(clock)))
    topology = connect(watched, ParallelConfig(pipeline_model_parallel_size=3))
    traced, starts = TracedSteps(topology), []
    for _ in range(2):
        clock.reach(clock.now() + 100 * (group.rank == 0))
        with traced.step():
            starts.append(clock.now())
    disconnect(topology)
    return starts
