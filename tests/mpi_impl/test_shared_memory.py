"""Collectives through shared memory are the textbook's, whoever is slow, and however many pieces an array takes."""
import math
import time
from contextlib import contextmanager
from random import Random
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, strategies as st
from mpi4py import MPI

from mpi_impl.comm.group import Group
from mpi_impl.comm.mpi_library import attribute_key
from mpi_impl.comm.transports import shared_memory
from mpi_impl.comm.transports.shared_memory import Board
from mpi_impl.runtime.arrays import dtype_of
from reference.comm import collectives
from tests.launching import launch, write_program
from tests.strategies import close

SEEDS = st.integers(0, 2**32 - 1)

# MPI passes large messages on one machine by reading the other process's memory, which not every machine permits.
NO_SINGLE_COPY = {"MPIR_CVAR_CH4_CMA_ENABLE": "0",                      # MPICH
                  "OMPI_MCA_smsc": "^cma,knem,xpmem",                   # Open MPI 5
                  "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}   # and 4


@contextmanager
def sharing(group, capacity):
    """Provide a group of the same ranks that shares memory for arrays of every size, in pieces of at most `capacity`
    bytes.
    """
    kept = shared_memory.SMALL, shared_memory.CAPACITY
    shared_memory.SMALL, shared_memory.CAPACITY = 0, capacity
    part = group.split(0, "shared")
    try:
        yield part
    finally:
        part.free()
        shared_memory.SMALL, shared_memory.CAPACITY = kept


@given(st.integers(2, 8), st.integers(1, 40), st.sampled_from([128, 256, 1 << 16]),
       st.sampled_from(["float64", "float32", "int64", "float16", "bfloat16"]), st.integers(1, 12), SEEDS)
def test_collectives_are_the_textbooks(ranks, n, length, capacity, dtype, steps, seed):
    """Several in a row, each rank now and then late: nobody reads what is not there yet, or is there no longer."""
    ranks.run(n, collectives_agree, length, capacity, dtype, steps, seed)


def collectives_agree(group, length, capacity, dtype, steps, seed):
    common, own = Random(seed), Random(seed + 1 + group.rank)
    with sharing(group, capacity) as shared:
        for step in range(steps):
            shape = (shared.size * common.randint(1, 2), length) if common.random() < 0.9 else (0, 3)
            xs = [x.astype(dtype_of(dtype)) for x in
                  10 * np.random.default_rng([seed, step]).normal(size=(shared.size, *shape))]
            if own.random() < 0.2:
                time.sleep(own.choice([0.0, 1e-4, 1e-3]))
            operation = common.choice(["sum", "max", "all_gather", "reduce_scatter", "broadcast"])
            agrees(shared, operation, xs, common.randint(0, 1))
        assert board_of(shared)[0].barriers > 0 or not steps or length == 0 or not xs[0].size


def board_of(group):
    """Return the memory that the group's ranks share, and its window; None if they have not needed any yet."""
    return group.comm.Get_attr(attribute_key("shared memory"))


def agrees(group, operation, xs, axis):
    x = xs[group.rank]
    if operation == "all_gather":
        assert (group.all_gather(x, axis, "test") == collectives.all_gather(xs, axis)[0]).all()
        return
    if operation == "broadcast":
        root = len(xs[0]) % group.size
        assert (group.broadcast(x.copy(), "test", root) == xs[root]).all()
        return
    total = in_rank_order(xs, np.maximum if operation == "max" else np.add)
    if operation == "reduce_scatter":
        assert (group.reduce_scatter(x, 0, "test") == np.split(total, group.size)[group.rank]).all()
    else:
        assert (group.all_reduce(x.copy(), "test", operation) == total).all()


def in_rank_order(xs, combine):
    """Combine the ranks' arrays in rank order: 16-bit ones in float32, and rounded once."""
    wide = [x.astype(np.float32) if x.dtype.itemsize == 2 else x for x in xs]
    total = wide[0]
    for x in wide[1:]:
        total = combine(total, x)
    return total.astype(xs[0].dtype)


@given(st.integers(2, 8), SEEDS)
def test_a_view_is_summed_and_its_neighbours_stay(ranks, n, seed):
    ranks.run(n, reduce_columns, seed)


def reduce_columns(group, seed):
    xs = np.random.default_rng(seed).normal(size=(group.size, 5, 70))
    x = xs[group.rank].copy()
    with sharing(group, 256) as shared:
        shared.all_reduce(x[:, 3:66], "test")
    close(x[:, 3:66], sum(xs)[:, 3:66], 1e-14)
    assert (x[:, :3] == xs[group.rank][:, :3]).all() and (x[:, 66:] == xs[group.rank][:, 66:]).all()


def test_a_message_under_way_arrives_while_its_sender_waits_for_others(tmp_path):
    """Rank 1 comes only when it has what rank 0 sends; and where no rank may read another's memory, a large message
    needs its sender's help.
    """
    program = write_program(tmp_path, """
        from tests.mpi_impl.test_shared_memory import send_and_meet
        send_and_meet(world())
    """)
    assert launch(3, program, env=NO_SINGLE_COPY).returncode == 0


def send_and_meet(group):
    x = np.arange(3_000_000.0)
    with sharing(group, 1 << 16) as shared:
        shared.all_reduce(np.ones(3), "before")
        if shared.rank == 0:
            sent = shared.post_send(x, 1, 0, "test")
        if shared.rank == 1:
            found = shared.post_receive(np.empty_like(x), 0, 0, "test").wait()
            assert (found == x).all()
        assert (shared.all_reduce(np.ones(3), "test") == 3).all()
        if shared.rank == 0:
            sent.wait()


def test_an_arrival_is_counted_between_two_fences():
    """What a rank has written must be seen before its count is; and what others have, only once theirs are. Here the
    other rank comes when this one has waited for it.
    """
    seen = []
    memory = np.zeros(shared_memory.bytes_for(2), np.uint8)

    def other_comes():
        shared.counts[1][0] += 1

    shared = Board(memory, 0, 2, lambda: seen.append([int(count[0]) for count in shared.counts]), other_comes)
    for _ in range(3):
        shared.barrier()
    assert seen == [[0, 0], [1, 1], [1, 1], [2, 2], [2, 2], [3, 3]]


class TwoMachines(MPI.Intracomm):
    """A communicator of which every other rank is said to be on another machine."""

    def Split_type(self, *_):
        return self.Split(self.rank % 2)


def test_ranks_on_several_machines_share_no_memory(ranks):
    ranks.run(4, meet_across_machines)


def meet_across_machines(group):
    apart = Group(TwoMachines(group.comm.Dup()), "apart", group.instruments)
    assert (apart.all_reduce(np.ones(5000), "test") == group.size).all()
    assert board_of(apart) == (None, None)
    apart.free()


def test_where_little_is_left_ranks_share_no_memory(ranks):
    """All of them, whichever has looked."""
    ranks.run(3, meet_in_a_small_container)


def meet_in_a_small_container(group):
    left = 64 << 20 if group.rank == 0 else math.inf
    with mock.patch.object(shared_memory, "shared_memory_left", lambda: left):
        part = group.split(0, "part")
        assert (part.all_reduce(np.ones(5000), "test") == 3).all()
    assert board_of(part) == (None, None)
    part.free()


@pytest.mark.parametrize("elements, shares", [(31, False), (32, True)])
def test_small_arrays_go_by_mpi(ranks, elements, shares):
    ranks.run(2, which_way, elements, shares)


def which_way(group, elements, shares):
    part = group.split(0, "part")
    assert (part.all_reduce(np.ones(elements), "test") == 2).all()
    assert (board_of(part) is not None) == shares
    part.free()
