"""Collectives and messages of real ranks are the textbook's, whichever way arrays travel."""
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl.comm.clock import Link, VirtualClock
from mpi_impl.comm.group import Group, Instruments
from mpi_impl.comm.trace import Trace
from mpi_impl.comm.watchdog import Watchdog
from reference.comm import collectives
from reference.exact.array import as_exact, random_array
from reference.schedules.simulate import Times
from tests.cases import close
from tests.collective_theorems import (WAYS, collectives_are_the_textbooks, messages_find_their_receives,
                                       posted_are_the_textbooks)

SEEDS = st.integers(0, 2**32 - 1)
RANKS = st.integers(1, 8)
LAYOUTS = st.sampled_from(["whole", "columns", "transposed"])
POSTS = st.tuples(st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]), st.booleans())
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def form_of(data, way, *forms):
    """Draw a format that arrays can have on this way, one of these if there are any."""
    return data.draw(st.sampled_from([form for form in WAYS[way].forms if form in (forms or WAYS[way].forms)]))


@EVERY_WAY
@given(data=st.data(), n=RANKS, rows=st.integers(1, 2), length=st.integers(0, 3), axis=st.integers(-1, 2),
       layout=LAYOUTS, seed=SEEDS)
def test_collectives_are_the_textbooks(ranks, way, data, n, rows, length, axis, layout, seed):
    form = form_of(data, way)
    n = min(n, 5) if way == "exact" else n
    ranks.run(n, collectives_are_the_textbooks, way, form, (rows, length, axis), layout, 1 + ("shared" in way), seed)


@EVERY_WAY
@given(data=st.data(), n=RANKS, posts=st.lists(POSTS, min_size=1, max_size=6), length=st.sampled_from([0, 1, 7, 700]),
       seed=SEEDS)
def test_posted_collectives_are_the_textbooks(ranks, way, data, n, posts, length, seed):
    form = form_of(data, way, "float64", "float32", "exact")
    ranks.run(n, posted_are_the_textbooks, way, posts, min(length, 7) if way == "exact" else length, form, seed)


@EVERY_WAY
@settings(max_examples=settings().max_examples // 2)
@given(data=st.data(), n=st.integers(2, 6), count=st.integers(1, 6), size=st.sampled_from([0, 1, 2000, 20_000]),
       seed=SEEDS)
def test_messages_find_their_receives_by_tag(ranks, way, data, n, count, size, seed):
    """Small ones, and some that MPI delivers only when they are received."""
    form = form_of(data, way, "float64", "float32", "exact", "bfloat16")
    ranks.run(n, messages_find_their_receives, way, form, count, min(size, 2000) if way == "exact" else size, seed)


# ---- exact numbers, which have a transport of their own --------------------------------------------------------------


@settings(max_examples=settings().max_examples // 2)
@given(st.integers(2, 6), st.integers(1, 4), st.booleans(), SEEDS)
def test_nothing_is_taken_for_another(ranks, n, count, virtual, seed):
    """Exact messages, posted collectives and the times of virtual clocks are under way together, in two groups."""
    ranks.run(n, everything_together, count, virtual, seed)


def everything_together(group, count, virtual, seed):
    n, rank, waiting = group.size, group.rank, []
    instruments = Instruments(trace=Trace(VirtualClock(Link(), Times()))) if virtual else Instruments()
    groups = [Group(group.comm, "world", instruments).split(0, name) for name in ("one", "other")]
    for one in groups:
        for i in range(count):
            xs, ys = ([random_array((4,), seed, one.name, what, i, source) for source in range(n)] for what in "xy")
            waiting += [(one.post_all_reduce(xs[rank].copy(), "sum"), collectives.all_reduce(xs)[0]),
                        (one.post_send(ys[rank], (rank + 1) % n, i, "test"), ys[rank]),
                        (one.post_receive(as_exact(np.zeros(4)), (rank - 1) % n, i, "test"), ys[rank - 1])]
    Random(seed + rank).shuffle(waiting)
    for pending, expected in waiting:
        found = pending.wait()
        if found is not None:
            close(found, expected)
    for one in groups:
        one.free()


def test_a_message_of_another_shape_is_refused(ranks):
    """NumPy would stretch it without a word."""
    ranks.run(2, receive_too_little)


def receive_too_little(group):
    if group.rank == 0:
        group.post_send(random_array((3,), 1), 1, 0, "test").wait()
    else:
        with pytest.raises(AssertionError, match=r"an array of shape \(3,\) came where one of shape \(2, 3\)"):
            group.post_receive(as_exact(np.zeros((2, 3))), 0, 0, "test").wait()


CALLS = {
    "blocking": lambda group, x: group.all_reduce(x, "test"),
    "posted": lambda group, x: group.post_all_reduce(x, "test").wait(),
    "message": lambda group, x: (group.post_receive(x, 1, 3, "test") if group.rank == 0 else
                                 group.post_send(x, 0, 3, "test")).wait(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_does_not_come_is_missed(ranks, name):
    """By the watchdog, whatever the wait."""
    reason = "receive test" if name == "message" else "test"
    assert ranks.run(2, wait_for_the_other, name)[0] == [f"rank 1 for 0.05 seconds (world group: {reason})"]


def wait_for_the_other(group, name):
    """Let rank 1 wait until rank 0 has given it up, and come then. Return what rank 0 says."""
    said = []

    def give_up(text):
        said.append(text)
        group.comm.send(None, 1, 9)

    if group.rank == 1:
        group.comm.recv(source=0, tag=9)
    limit = Watchdog(0.05, give_up) if group.rank == 0 else Watchdog()
    CALLS[name](Group(group.comm, "world", Instruments(watchdog=limit)), random_array((3,), 1))
    return said
