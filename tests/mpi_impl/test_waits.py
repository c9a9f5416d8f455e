"""Waits for other ranks: each has a time limit, and a virtual clock tells what they would take elsewhere."""
import math
import threading
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, strategies as st
from mpi4py import MPI

from mpi_impl.comm import speaker, watchdog
from mpi_impl.comm.clock import Link, VirtualClock
from mpi_impl.comm.group import Group, Instruments
from mpi_impl.comm.heartbeats import Ring, long_work
from mpi_impl.comm.hosts import Hosts
from mpi_impl.comm.mpi_library import attribute_key
from mpi_impl.comm.speaker import SPEAKS, elect_speaker
from mpi_impl.comm.trace import Trace
from mpi_impl.comm.watchdog import Watchdog
from mpi_impl.parallel.pipeline import Pipeline
from reference.config import ParallelConfig
from reference.exact.array import random_array
from reference.schedules.actions import Action
from reference.schedules.simulate import Times, simulate
from tests.reference.test_schedules import schedules
from tests.training_theorems import connected

SOON = 10   # seconds, on a busy machine

# A collective of 20 numbers in all, which 4 ranks wait for or post.
CALLS = {
    "all_reduce": lambda group, reason: group.all_reduce(np.ones(20), reason),
    "all_gather": lambda group, reason: group.all_gather(np.ones(20 // group.size), 0, reason),
    "reduce_scatter": lambda group, reason: group.reduce_scatter(np.ones(20), 0, reason),
}
POSTS = {
    "all_reduce": lambda group, reason: group.post_all_reduce(np.ones(20), reason),
    "all_gather": lambda group, reason: group.post_all_gather(np.ones(20 // group.size), np.ones(20), reason),
    "reduce_scatter": lambda group, reason: group.post_reduce_scatter(np.ones(20), np.ones(20 // group.size), reason),
}


def test_a_wait_that_is_too_long_is_told_once():
    """And neither many short waits, nor what a rank computes after one, though it ended with an error."""
    said, heard, threads = [], threading.Event(), threading.active_count()
    Watchdog()
    assert threading.active_count() == threads, "without a limit no thread is started"
    dog = Watchdog(0.3, lambda words: (said.append(words), heard.set()))
    for _ in range(20):
        with dog.waiting("tensor", "mlp output", [1]):
            time.sleep(0.02)
    with pytest.raises(ZeroDivisionError), dog.waiting("tensor", "mlp output", [1]):
        raise ZeroDivisionError
    time.sleep(0.5)
    assert not said
    began = time.monotonic()
    with dog.waiting("pipeline", "receive activation", [3]):
        assert heard.wait(SOON) and time.monotonic() - began >= 0.3
        time.sleep(0.5)
    assert said == ["rank 3 for 0.3 seconds (pipeline group: receive activation)"]


class Clock:
    """Time that passes in sleep alone."""

    def __init__(self, stopped_at=math.inf):
        self.now, self.stopped_at = 0.0, stopped_at

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        stopped = self.now <= self.stopped_at < self.now + seconds
        self.now += seconds + (1000 if stopped else 0)


@pytest.mark.parametrize("since, stopped_at, end", [(0.25, math.inf, 10.25), (0, 3, 1014), (0, 9.5, 1020)])
def test_it_is_told_when_the_time_is_up(monkeypatch, since, stopped_at, end):
    """Not at the next of some fixed moments: ranks give up in the order in which they began to wait. And the time in
    which a rank itself was stopped does not count: when a whole job was suspended, nobody is to blame."""
    clock, ended = Clock(stopped_at), []
    monkeypatch.setattr(watchdog, "time", clock)
    dog = Watchdog(give_up=lambda words: ended.append(clock.now))
    dog.limit = 10.0
    clock.now = since
    with dog.waiting("pipeline", "receive gradient", [1]):
        clock.now = 1.0
        dog._watch()
    assert ended == [end]


def speak(group, delays, hosts=None):
    """Let each rank ask, after its delay in seconds, whether it is the speaker; return its answer."""
    apart = group.split(0, "apart")
    if hosts:
        apart.comm.Set_attr(attribute_key("hosts"), Hosts(dict(enumerate(hosts)), tuple(map(str, sorted(set(hosts))))))
    apart.allgather_objects(None)
    time.sleep(delays[group.rank])
    answer = elect_speaker(apart, 0.5)
    apart.allgather_objects(None)
    while apart.comm.Iprobe(tag=SPEAKS):      # what nobody read would be read in a later group
        apart.comm.Recv([None, 0, "B"], tag=SPEAKS)
    apart.free()
    return answer


def speak_at_once(group, hosts):
    """As `speak`, where all ranks have found that nobody speaks before the first one does."""
    def hears(apart, sources, seconds):
        heard = hears_now(apart, sources, seconds)
        if sources == [MPI.ANY_SOURCE]:
            group.allgather_objects(None)
        return heard

    hears_now = speaker._heard_from
    with patch.object(speaker, "_heard_from", hears):
        return speak(group, [0] * 4, hosts)


@pytest.mark.parametrize("hosts, delays, speakers", [
    (None, [0.8, 0.8, 0.8, 0], [3]), (None, [0.8, 0, 0.8, 0.8], [1]), ([0, 1, 0, 1], [0.8, 0, 0, 0.8], [1, 2]),
    ([0, 0, 1, 1], [0, 0.8, 0.8, 1.6], [0, 2])])
def test_of_all_that_give_up_the_first_speaks_on_each_host(ranks, hosts, delays, speakers):
    """Whoever comes later has heard of it. Between hosts the link may be what has failed: nothing is sent there, and
    nothing is awaited from there.
    """
    assert [i for i, speaks in enumerate(ranks.run(4, speak, delays, hosts)) if speaks] == speakers


@pytest.mark.parametrize("hosts, speakers", [(None, [0]), ([0, 0, 1, 1], [0, 2]), ([0, 1, 1, 0], [0, 1])])
def test_of_all_that_give_up_at_once_the_lowest_speaks_on_each_host(ranks, hosts, speakers):
    assert [i for i, speaks in enumerate(ranks.run(4, speak_at_once, hosts)) if speaks] == speakers


class Listener(Watchdog):
    """Writes down what the rank waits for."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def waiting(self, group, reason, ranks):
        self.heard.append((reason, list(ranks)))
        return super().waiting(group, reason, ranks)


def post_sum(watched, reason):
    watched.post_all_reduce(np.ones(2), reason).wait()


def sum_many(watched, reason):
    assert (watched.all_reduce(np.ones(5000), reason) == 2).all()


def sum_exact(watched, reason):
    watched.all_reduce(random_array((3,), 1), reason)


@pytest.mark.parametrize("act, shares", [(post_sum, False), (sum_many, False), (sum_many, True), (sum_exact, False)])
def test_a_rank_that_does_not_come_is_told_of(ranks, act, shares):
    """Rank 1 does not take part until rank 0 has given up: to a posted sum, to shared memory that there is already, or
    that is about to be made, or to the messages of exact numbers.
    """
    assert ranks.run(2, one_comes, act, "a sum", shares)[0] == ["rank 1 for 0.2 seconds (world group: a sum)"]


def one_comes(group, act, reason, shares):
    """Return the messages of rank 0's watchdog while rank 1 does not take part in an operation."""
    said, fresh = [], group.split(0, "fresh")
    if shares:
        sum_many(fresh, "before")

    def give_up(words):
        said.append(words)
        group.comm.Send([None, 0, "B"], 1)

    dog = Watchdog(0.2, give_up) if group.rank == 0 else Watchdog()
    if group.rank == 1:
        group.comm.Recv([None, 0, "B"], 0)
    act(Group(fresh.comm, "world", Instruments(watchdog=dog)), reason)
    fresh.free()
    return said


@pytest.mark.parametrize("act, silent, said", [
    ("broadcast_object", None, []), ("collect_objects", 2, ["rank 2 for 1 seconds (world group: a sign of life)"])])
def test_work_may_be_long_while_heartbeats_are_heard(ranks, act, silent, said):
    """A rank that sends none is told of by the next one, though it only waits, and nobody for it. None is left."""
    assert ranks.run(4, work_long, act, silent) == [[], [], [], said]


@contextmanager
def listened_to(group, limit):
    """Yield a group of the same ranks with this time limit, and what its watchdog says; in the end, what is left."""
    said, fresh = [], group.split(0, "fresh")
    yield Group(fresh.comm, "world", Instruments(watchdog=Watchdog(limit, said.append))), said
    group.allgather_objects(None)
    said += fresh.comm.Iprobe() * ["a heartbeat that nobody received"]
    fresh.free()


def work_long(group, act, silent):
    """Return the messages of each rank's watchdog while rank 0 works for longer than the limit."""
    with listened_to(group, 1.0) as (watched, said), (
            patch.object(Ring, "beat", lambda _: None) if group.rank == silent else nullcontext()):
        getattr(watched, act)(lambda: time.sleep(3 if group.rank == 0 else 0))
    return said


def test_long_works_follow_one_another(ranks):
    """And stand in one another: the heartbeats of each are told apart, however late a rank is. None is left."""
    assert ranks.run(3, work_on, 12) == [[]] * 3


def work_on(group, works):
    """Let rank 1 end each work late, so that it hears rank 0's heartbeats of the next work already."""
    end = Ring.end

    def end_late(ring):
        for _ in range(10 * (group.rank == 1)):
            time.sleep(0.002)
            ring.heard()
        end(ring)

    with listened_to(group, 2.0) as (watched, said), patch.object(Ring, "end", end_late):
        for n in range(works):
            with long_work(watched) if n % 3 == 0 else nullcontext():
                assert watched.broadcast_object(partial(int, n)) == n
    return said


def test_every_wait_is_watched(ranks):
    """Each thing that a group of two does names its reason and the other rank; nothing waits unseen. But what the first
    rank, or each, finds out may take hours: there is no limit to that without a reason.
    """
    for rank, heard in enumerate(ranks.run(2, everything)):
        words = [*CALLS, "one's own", *(f"a posted {operation}" for operation in POSTS),
                 "send a message" if rank == 0 else "receive a message", "every rank's word", "a file", "all files",
                 "the half groups"]
        assert heard == [*((word, [1 - rank]) for word in words), ("the both group", [0, 1])]


def everything(group):
    """Perform every operation of a group once; return what its watchdog heard."""
    listener = Listener()
    watched = Group(group.comm, "world", Instruments(watchdog=listener))
    for operation, call in CALLS.items():
        call(watched, operation)
    watched.broadcast(np.ones(2), "one's own")
    for operation, begin in POSTS.items():
        begin(watched, f"a posted {operation}").wait()
    post = watched.post_send if group.rank == 0 else watched.post_receive
    post(np.ones(2), 1 - group.rank, 0, "a message").wait()
    watched.allgather_objects(None)
    for reasons in ((), ("a file",)):
        watched.broadcast_object(lambda: None, *reasons)
    for reasons in ((), ("all files",)):
        watched.collect_objects(lambda: None, *reasons)
    watched.split(group.rank, "half").free()
    watched.subgroup([0, 1], "both").free()
    return listener.heard


# ---- the virtual clock ----------------------------------------------------------------------------------------------

TIME = st.floats(0.01, 10)


def spans(group, schedule, times):
    """Return the times of this rank's clock around each action, when nothing is computed."""
    clock = VirtualClock(Link(times.communication, np.inf), times)
    watched = Group(group.comm, "world", Instruments(trace=Trace(clock, recording=True)))
    with connected(watched, ParallelConfig(pipeline_model_parallel_size=group.size)) as topology:
        clock.seconds = 0.0
        Pipeline(schedule, topology).play(
            dict.fromkeys("FBI", lambda action, x: np.zeros(1)) | {"W": lambda action, x: None}, np.zeros(1), (1,))
    return [(s.name, s.start, s.end) for s in watched.trace.slices if s.stream == "compute"]


@given(schedules(most=4), st.data())
def test_it_reads_what_the_simulator_says(ranks, schedule, data):
    """Any schedule, any durations by stage, to the last bit."""
    by_stage = st.lists(TIME, min_size=schedule.stages, max_size=schedule.stages)
    times = Times(data.draw(by_stage), data.draw(by_stage), data.draw(by_stage), data.draw(st.floats(0, 5)))
    measured = ranks.run(schedule.p, spans, schedule, times)
    predicted = [[(str(s.action), s.start, s.end) for s in rank] for rank in simulate(schedule, times).ranks]
    assert measured == predicted


@pytest.mark.parametrize("operation, takes", [
    ("all_reduce", 6 * 0.5 + 1.5 * 160 / 16), ("reduce_scatter", 3 * 0.5 + 0.75 * 160 / 16)])
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
    CALLS[operation](watched, "twenty numbers")
    readings = [clock.seconds]
    for start, end in ((30.0 + 10 * group.rank, 0.0), (100.0, 200.0)):
        clock.seconds = start
        pending = POSTS[operation](watched, "twenty numbers")
        clock.seconds = max(start, end)
        pending.wait()
        readings.append(clock.seconds)
    return readings, watched.trace.slices


def test_computing_counts_and_waiting_does_not(ranks):
    """Before a send it is in the stamp; before a wait it is on the clock, though the message came long ago. Ranks that
    meet read the time of the later one; what MPI computed while they waited does not count.
    """
    (stamped, _, together, after), (_, waited, also, later) = ranks.run(2, compute_and_communicate)
    assert stamped >= 0.1
    assert 0.2 <= waited < stamped + 0.25       # rank 1 computed twice; that it polled and waited does not count
    assert together == also >= waited and max(after, later) < together + 0.1


def compute_and_communicate(group):
    """Return the time stamped on rank 0's message, and this rank's time when it has waited for it, right after a
    collective, and when it is next read.
    """
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
    waited = clock.seconds
    watched.all_reduce(np.ones(1), "meeting")
    return pending.stamp[0], waited, clock.seconds, clock.now()


def burn(seconds):
    """Spend this much CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_an_action_takes_what_it_usually_takes(monkeypatch):
    """One that takes five times as long, for a reason of the machine's, takes the median on the clock; but it does not
    go back behind what it has heard: a message came at 6 seconds, in an action that took 7 instead of 1.
    """
    cpu = [0.0]
    monkeypatch.setattr("mpi_impl.comm.clock.time.thread_time", lambda: cpu[0])
    clock, ends = VirtualClock(), []
    for took in (1.0, 1.0, 5.0, 1.0):
        with clock.computing(Action(0, "F", 0)):
            cpu[0] += took
        ends.append(clock.now())
    cpu[0] += 0.5                         # not an action: it counts as it is
    assert [*ends, clock.now()] == [1.0, 2.0, 3.0, 4.0, 4.5]
    clock.restart()
    with clock.computing(Action(0, "F", 0)):
        cpu[0] += 5.0
        clock.pause()
        clock.reach(6.0)
        clock.resume()
        cpu[0] += 2.0
    assert clock.now() == 6.0
