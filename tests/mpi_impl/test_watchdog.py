"""A wait has a time limit; what is no wait has none."""
import math
import threading
import time
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest

from mpi_impl.comm import watchdog
from mpi_impl.comm.ending import SPEAKS, elect_speaker
from mpi_impl.comm.group import Group, Instruments
from mpi_impl.comm.heartbeats import Ring, long_work
from mpi_impl.comm.hosts import Hosts
from mpi_impl.comm.mpi_library import attribute_key
from mpi_impl.comm.watchdog import Watchdog, listed

SOON = 10   # seconds, on a busy machine


class Story:
    """The messages of a watchdog, with their times."""

    def __init__(self, limit):
        self.said, self.heard = [], threading.Event()
        self.watchdog = Watchdog(limit, self.hear)

    def hear(self, words):
        self.said.append(words)
        self.heard.set()


def test_a_wait_that_is_too_long_is_told_once():
    story = Story(0.2)
    began = time.monotonic()
    with story.watchdog.waiting("pipeline", "receive activation", [3]):
        assert story.heard.wait(SOON) and time.monotonic() - began >= 0.2
        time.sleep(0.5)
    assert story.said == ["rank 3 for 0.2 seconds (pipeline group: receive activation)"]


def test_many_short_waits_are_no_long_one():
    story = Story(0.3)
    for _ in range(20):
        with story.watchdog.waiting("tensor", "mlp output", [1]):
            time.sleep(0.04)
    assert not story.said


def test_a_rank_that_computes_does_not_wait():
    story = Story(0.2)
    with story.watchdog.waiting("tensor", "mlp output", [1]):
        pass
    time.sleep(0.6)
    assert not story.said


def test_an_error_ends_a_wait_too():
    story = Story(0.2)
    with pytest.raises(ZeroDivisionError), story.watchdog.waiting("tensor", "mlp output", [1]):
        raise ZeroDivisionError
    time.sleep(0.5)
    assert not story.said


class Clock:
    """Time that passes in sleep alone."""

    def __init__(self, stopped_at=math.inf):
        self.now, self.stopped_at = 0.0, stopped_at

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        stopped = self.now <= self.stopped_at < self.now + seconds
        self.now += seconds + (1000 if stopped else 0)


@pytest.mark.parametrize("since, stopped_at, end", [
    (0, math.inf, 10), (0.25, math.inf, 10.25), (0.75, math.inf, 10.75), (0, 3, 1014), (0, 9.5, 1020),
])
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


def test_without_a_limit_no_thread_is_started():
    before = threading.active_count()
    Watchdog()
    assert threading.active_count() == before


@pytest.mark.parametrize("ranks, words", [
    ([4], "rank 4"), ([1, 3], "ranks 1 and 3"), ([1, 3, 5], "ranks 1, 3 and 5"),
    (range(1, 512), "511 ranks from 1 to 511"),
])
def test_ranks_are_listed(ranks, words):
    assert listed(ranks) == words


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


@pytest.mark.parametrize("delays, speaker", [
    ([0, 0, 0, 0], 0), ([0.25, 0.25, 0, 0.25], 2), ([0.8, 0.8, 0.8, 0], 3), ([0.8, 0, 0, 0.8], 1),
])
def test_of_all_that_give_up_one_speaks(ranks, delays, speaker):
    """The first, or the lowest of those that are first together; whoever comes later has heard of it."""
    assert [i for i, speaks in enumerate(ranks.run(4, speak, delays)) if speaks] == [speaker]


@pytest.mark.parametrize("hosts, delays, speakers", [
    ([0, 0, 1, 1], [0, 0, 0, 0], [0, 2]), ([0, 0, 1, 1], [0.8, 0, 0.8, 0], [1, 3]),
    ([0, 1, 0, 1], [0.8, 0, 0, 0], [1, 2]), ([0, 0, 1, 1], [0, 0, 0.8, 0.8], [0, 2]),
])
def test_on_several_hosts_one_speaks_on_each(ranks, hosts, delays, speakers):
    """For the link between them may be what has failed: nothing is sent there, and nothing is awaited from there."""
    assert [i for i, speaks in enumerate(ranks.run(4, speak, delays, hosts)) if speaks] == speakers


class Listener(Watchdog):
    """Writes down what the rank waits for."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def waiting(self, group, reason, ranks):
        self.heard.append((reason, list(ranks)))
        return super().waiting(group, reason, ranks)


POSTS = {
    "a posted sum": lambda group: group.post_all_reduce(np.ones(2), "a posted sum"),
    "a posted gathering": lambda group: group.post_all_gather(np.ones(2), np.ones(4), "a posted gathering"),
    "pieces of a posted sum": lambda group: group.post_reduce_scatter(np.ones(4), np.ones(2), "pieces of a posted sum"),
}


@pytest.mark.parametrize("reason", POSTS)
def test_a_rank_that_does_not_post_is_told_of(ranks, reason):
    """Rank 1 does not post until rank 0 has given up."""
    assert ranks.run(2, one_comes, post, reason)[0] == [f"rank 1 for 0.2 seconds (world group: {reason})"]


def post(watched, reason):
    POSTS[reason](watched).wait()


@pytest.mark.parametrize("shares", [False, True])
def test_a_rank_that_does_not_come_to_shared_memory_is_told_of(ranks, shares):
    """The ranks share memory already, or are about to make it."""
    assert ranks.run(2, one_comes, sum_many, "a large sum", shares)[0] == [
        "rank 1 for 0.2 seconds (world group: a large sum)"]


def sum_many(watched, reason):
    assert (watched.all_reduce(np.ones(5000), reason) == 2).all()


def one_comes(group, act, reason, shares=False):
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


TOLD = ["rank 2 for 1 seconds (world group: a sign of life)"]


@pytest.mark.parametrize("act, silent, said", [
    ("broadcast_object", None, []), ("collect_objects", 2, TOLD),
    *(pytest.param(*more, marks=pytest.mark.deep)
      for more in [("collect_objects", None, []), ("broadcast_object", 2, TOLD)])])
def test_work_may_be_long_while_heartbeats_are_heard(ranks, act, silent, said):
    """A rank that sends none is told of by the next one, though it only waits, and nobody for it. None is left."""
    assert ranks.run(4, work_long, act, silent) == [[], [], [], said]


def work_long(group, act, silent):
    """Return the messages of each rank's watchdog while rank 0 works for longer than the limit."""
    said, fresh = [], group.split(0, "fresh")
    watched = Group(fresh.comm, "world", Instruments(watchdog=Watchdog(1.0, said.append)))
    with patch.object(Ring, "beat", lambda _: None) if group.rank == silent else nullcontext():
        getattr(watched, act)(lambda: time.sleep(3 if group.rank == 0 else 0))
    group.allgather_objects(None)
    left = fresh.comm.Iprobe()
    fresh.free()
    return said + left * ["a heartbeat that nobody received"]


def test_long_works_follow_one_another(ranks):
    """And stand in one another: the heartbeats of each are told apart, however late a rank is. None is left."""
    assert ranks.run(3, work_on, 12) == [[]] * 3


def work_on(group, works):
    """Let rank 1 end each work late, so that it hears rank 0's heartbeats of the next work already."""
    said, fresh, end = [], group.split(0, "fresh"), Ring.end

    def end_late(ring):
        for _ in range(10 * (group.rank == 1)):
            time.sleep(0.002)
            ring.heard()
        end(ring)

    watched = Group(fresh.comm, "world", Instruments(watchdog=Watchdog(2.0, said.append)))
    with patch.object(Ring, "end", end_late):
        for n in range(works):
            with long_work(watched) if n % 3 == 0 else nullcontext():
                assert watched.broadcast_object(partial(int, n)) == n
    group.allgather_objects(None)
    left = fresh.comm.Iprobe()
    fresh.free()
    return said + left * ["a heartbeat that nobody received"]


def test_every_wait_is_watched(ranks):
    """Each thing that a group of two does names its reason and the other rank; nothing waits unseen."""
    for rank, heard in enumerate(ranks.run(2, everything)):
        words = ["a sum", "a gathering", "pieces of a sum", "one's own", "a posted sum", "a posted gathering",
                 "pieces of a posted sum", "send a message"]
        expected = words if rank == 0 else [*words[:-1], "receive a message"]
        assert heard == [(word, [1 - rank]) for word in [*expected, "every rank's word", "the half groups"]] + [
            ("the both group", [0, 1])]


def test_what_takes_what_time_it_takes_has_a_limit_only_with_a_reason(ranks):
    """To prepare data may take hours, and the others wait for it: no watchdog hears of that. With a reason it does: who
    waits for the first rank, and for all others.
    """
    for rank, heard in enumerate(ranks.run(3, wait_for_words)):
        others = [r for r in (2, 1, 0) if r != rank]
        assert heard == [("a file", others[:1]), ("all files", others)]


def wait_for_words(group):
    """Return what the watchdog heard in a group of three whose first rank is rank 2 of the world."""
    listener = Listener()
    turned = group.subgroup([2, 1, 0], "turned")
    watched = Group(turned.comm, "turned", Instruments(watchdog=listener))
    for reason in ((), ("a file",)):
        assert watched.broadcast_object(lambda: group.rank, *reason) == 2
    for reason in ((), ("all files",)):
        assert watched.collect_objects(lambda: group.rank, *reason) == [2, 1, 0]
    turned.free()
    return listener.heard


def everything(group):
    """Perform every operation of a group once; return what its watchdog heard."""
    listener = Listener()
    watched = Group(group.comm, "world", Instruments(watchdog=listener))
    watched.all_reduce(np.ones(2), "a sum")
    watched.all_gather(np.ones(2), 0, "a gathering")
    watched.reduce_scatter(np.ones(2), 0, "pieces of a sum")
    watched.broadcast(np.ones(2), "one's own")
    for begin in POSTS.values():
        begin(watched).wait()
    post = watched.post_send if group.rank == 0 else watched.post_receive
    post(np.ones(2), 1 - group.rank, 0, "a message").wait()
    watched.allgather_objects(None)
    watched.split(group.rank, "half").free()
    watched.subgroup([0, 1], "both").free()
    return listener.heard
