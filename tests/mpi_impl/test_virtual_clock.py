"""The virtual clock: with durations that are given, ranks read exactly the times that the simulator predicts."""
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpi_impl.comm.clock import DeviceClock, Link, VirtualClock
from mpi_impl.comm.group import Group, Instruments
from mpi_impl.comm.topology import connect, disconnect
from mpi_impl.comm.trace import Trace
from mpi_impl.parallel.pipeline import Pipeline
from reference.config import ParallelConfig
from reference.schedules.actions import Action
from reference.schedules.generators import SCHEDULES, make
from reference.schedules.simulate import Times, simulate

TIME = st.floats(0.01, 10)


def spans(group, schedule, times, steps):
    """Return the times of this rank's clock around each action, when nothing is computed."""
    clock = VirtualClock(Link(times.communication, np.inf), times)
    watched = Group(group.comm, "world", Instruments(trace=Trace(clock, recording=True)))
    topology = connect(watched, ParallelConfig(pipeline_model_parallel_size=group.size))
    clock.seconds = 0.0
    pipeline = Pipeline(schedule, topology)
    for _ in range(steps):
        pipeline.play(dict.fromkeys("FBI", lambda action, x: np.zeros(1)) | {"W": lambda action, x: None},
                      np.zeros(1), (1,))
    disconnect(topology)
    return [(s.name, s.start, s.end) for s in watched.trace.slices if s.stream == "compute"]


@given(st.data())
def test_it_reads_what_the_simulator_says(ranks, data):
    """Any schedule, any durations by stage, to the last bit."""
    name, p = data.draw(st.sampled_from(sorted(SCHEDULES)), "schedule"), data.draw(st.integers(1, 8), "p")
    v = data.draw(st.integers(1, 3), "v") if name in ("interleaved", "forward-only") else None
    m = p * data.draw(st.integers(1, 3)) if name == "interleaved" else data.draw(st.integers(1, 9), "m")
    schedule = make(name, p, m, v)
    by_stage = st.lists(TIME, min_size=schedule.stages, max_size=schedule.stages)
    times = Times(data.draw(by_stage), data.draw(by_stage), data.draw(by_stage), data.draw(st.floats(0, 5)))
    measured = ranks.run(p, spans, schedule, times, 1)
    predicted = [[(str(s.action), s.start, s.end) for s in rank] for rank in simulate(schedule, times).ranks]
    assert measured == predicted


# A collective of 20 numbers in all, which 4 ranks wait for or post.
CALLS = {
    "all_reduce": lambda group: group.all_reduce(np.ones(20), "twenty numbers"),
    "all_gather": lambda group: group.all_gather(np.ones(5), 0, "twenty numbers"),
    "reduce_scatter": lambda group: group.reduce_scatter(np.ones(20), 0, "twenty numbers"),
}
POSTS = {
    "all_reduce": lambda group: group.post_all_reduce(np.ones(20), "twenty numbers"),
    "all_gather": lambda group: group.post_all_gather(np.ones(5), np.ones(20), "twenty numbers"),
    "reduce_scatter": lambda group: group.post_reduce_scatter(np.ones(20), np.ones(5), "twenty numbers"),
}


@pytest.mark.parametrize("operation, takes", [
    ("all_reduce", 6 * 0.5 + 1.5 * 160 / 16), ("all_gather", 3 * 0.5 + 0.75 * 160 / 16),
    ("reduce_scatter", 3 * 0.5 + 0.75 * 160 / 16),
])
def test_a_collective_sets_its_members_to_the_latest(ranks, operation, takes):
    """Plus what a ring takes: of 4 ranks, 6 turns and 3/2 of the bytes for an all-reduce, half of both for others."""
    for readings, slices in ranks.run(4, after_collectives, operation):
        assert readings == [30 + takes, 60 + takes, 200.0]
        assert [(s.stream, s.name, s.end) for s in slices] == [("communication", "twenty numbers", r) for r in readings]


def after_collectives(group, operation):
    """Return the times on this rank's clock after three collectives, and their slices. Ranks call the first at 0, 10,
    20 and 30 seconds; they post the second at 30, 40, 50 and 60 and wait immediately; they post the third and wait long
    after its end.
    """
    clock = VirtualClock(Link(latency=0.5, bandwidth=16), Times())
    watched = Group(group.comm, "world", Instruments(trace=Trace(clock, recording=True)))
    clock.seconds = 10.0 * group.rank
    CALLS[operation](watched)
    readings = [clock.seconds]
    for start, end in ((30.0 + 10 * group.rank, 0.0), (100.0, 200.0)):
        clock.seconds = start
        pending = POSTS[operation](watched)
        clock.seconds = max(start, end)
        pending.wait()
        readings.append(clock.seconds)
    return readings, watched.trace.slices


def test_computing_counts_and_waiting_does_not(ranks):
    """Rank 0 computes for a quarter of a second of CPU time while rank 1 waits for it; then both read rank 0's time."""
    (busy, together, after), (idle, also, later) = ranks.run(2, work_and_meet)
    assert busy > 0.2 > idle
    assert together == also >= busy
    assert max(after, later) < together + 0.1        # what MPI computed while it waited does not count


def test_what_was_computed_before_a_message_counts(ranks):
    """Before a send it is in the stamp; before a wait it is on the clock, though the message came long ago."""
    (stamped, _), (_, waited) = ranks.run(2, compute_then_communicate)
    assert stamped >= 0.1
    assert 0.2 <= waited < stamped + 0.25       # rank 1 computed twice; that it polled and waited does not count


def compute_then_communicate(group):
    """Return the time stamped on rank 0's message, and this rank's time when it has waited for it."""
    clock = VirtualClock(Link(0.0, np.inf))
    watched = Group(group.comm, "world", Instruments(trace=Trace(clock)))
    burn(0.1)
    if group.rank == 0:
        pending = watched.post_send(np.ones(1), 1, 0, "a message")
    else:
        pending = watched.post_receive(np.ones(1), 0, 0, "a message")
        for _ in range(20_000):
            pending.poll()
        burn(0.1)
    pending.wait()
    return pending.stamp[0], clock.seconds


def burn(seconds):
    """Spend this much CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_an_action_takes_what_it_usually_takes(monkeypatch):
    """One that takes five times as long, for a reason of the machine's, takes the median on the clock."""
    cpu = [0.0]
    monkeypatch.setattr("mpi_impl.comm.clock.time.thread_time", lambda: cpu[0])
    clock, ends = VirtualClock(), []
    for took in (1.0, 1.0, 5.0, 1.0):
        with clock.computing(Action(0, "F", 0)):
            cpu[0] += took
        ends.append(clock.now())
    cpu[0] += 0.5                         # no action: it counts as it is
    assert [*ends, clock.now()] == [1.0, 2.0, 3.0, 4.0, 4.5]


def test_it_does_not_go_back_behind_what_it_has_heard(monkeypatch):
    """A message came at 6 seconds, in an action that took 7 instead of 2: it ends when the message was there."""
    cpu = [0.0]
    monkeypatch.setattr("mpi_impl.comm.clock.time.thread_time", lambda: cpu[0])
    clock = VirtualClock()
    for took in (2.0, 2.0):
        with clock.computing(Action(0, "F", 0)):
            cpu[0] += took
    clock.restart()
    with clock.computing(Action(0, "F", 0)):
        cpu[0] += 5.0
        clock.pause()
        clock.reach(6.0)
        clock.resume()
        cpu[0] += 2.0
    assert clock.now() == 6.0


def test_a_devices_clock_is_read_when_its_work_is_done(monkeypatch):
    """A stream with half a second of work: the clock tells the time after it."""
    wall = [0.0]

    def finish():
        wall[0] += 0.5

    cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(synchronize=finish))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr("mpi_impl.comm.clock.time.perf_counter", lambda: wall[0])
    assert DeviceClock().now() == 0.5


def work_and_meet(group):
    """Return the clock's time before a collective, right after it, and when it is next read."""
    clock = VirtualClock(Link(0.0, np.inf))
    watched = Group(group.comm, "world", Instruments(trace=Trace(clock)))
    while group.rank == 0 and clock.now() < 0.25:
        sum(range(1000))
    before = clock.now()
    watched.all_reduce(np.ones(1), "meeting")
    return before, clock.seconds, clock.now()
