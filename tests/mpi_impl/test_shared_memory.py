"""Shared memory: which arrays take this way, and which ranks cannot.

That collectives are the textbook's this way is in test_collectives.py.
"""
import math
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

from mpi_impl.comm.group import Group
from mpi_impl.comm.mpi_library import attribute_key
from mpi_impl.comm.transports import shared_memory
from mpi_impl.comm.transports.shared_memory import Board
from tests.collective_theorems import sharing
from tests.launching import launch, write_program

# MPI passes large messages on one machine by reading the other process's memory, which not every machine permits.
NO_SINGLE_COPY = {"MPIR_CVAR_CH4_CMA_ENABLE": "0",                      # MPICH
                  "OMPI_MCA_smsc": "^cma,knem,xpmem",                   # Open MPI 5
                  "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}   # and 4


def board_of(group):
    """Return the memory that the group's ranks share, and its window; None if they have not needed any yet."""
    return group.comm.Get_attr(attribute_key("shared memory"))


@pytest.mark.parametrize("elements, shares", [(31, False), (32, True)])
def test_small_arrays_go_by_mpi(ranks, elements, shares):
    ranks.run(2, which_way, elements, shares)


def which_way(group, elements, shares):
    part = group.split(0, "part")
    assert (part.all_reduce(np.ones(elements), "test") == 2).all()
    assert (board_of(part) is not None) == shares
    assert not shares or board_of(part)[0].barriers > 0
    part.free()


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
