"""Groups of ranks: topology puts every rank in its place, results and refusals are shared, halves are added up exactly.

That collectives are the textbook's is in test_collectives.py.
"""
import time
from functools import partial
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, strategies as st
from mpi4py import MPI

from mpi_impl.comm.group import Group
from mpi_impl.comm.ledger import Entry, Ledger, Total, ring_bytes, wire_bytes
from reference.config import ParallelConfig
from reference.errors import UserError
from shardlab.predict.group import survey
from shardlab.report.page import senders
from tests.strategies import instances
from tests.training_theorems import connected


@pytest.mark.parametrize("failing", [(), (3, 1)])
def test_what_ranks_find_out_is_what_all_know(ranks, failing):
    """What the first rank finds, or each, in rank order; or the first failing rank's error, on every rank."""
    ranks.run(4, agree, failing)


def agree(group, failing):
    def look(first_alone):
        assert group.rank == 0 or not first_alone, "only the first rank looks"
        if group.rank in failing or first_alone and failing:
            raise UserError(f"There is no file {group.rank}.")
        return group.rank ** 2

    on_first = [0, 1, 4, 9] if group.rank == 0 else []
    for share, expected, failed in ((partial(group.broadcast_object, lambda: look(True)), 0, 0),
                                    (partial(group.collect_objects, lambda: look(False)), [0, 1, 4, 9],
                                     min(failing, default=None)),
                                    (partial(group.collect_on_first, lambda: look(False), "test"), on_first,
                                     min(failing, default=None))):
        try:
            assert share() == expected and not failing
        except UserError as error:
            assert failing and str(error) == f"There is no file {failed}."
    assert group.any_rank(group.rank in failing) is bool(failing)


@pytest.mark.parametrize("choices", [dict(t=2, zero_stage=1, num_distributed_optimizer_instances=2),
                                     dict(p=2, expert_model_parallel_size=2), dict(context_parallel_size=2)])
def test_every_communicator_is_given_back(ranks, choices):
    """MPI has some thousands, and a notebook connects again and again. The world's own stays."""
    ranks.run(8, connect_and_disconnect, choices)


def connect_and_disconnect(group, choices):
    colors, split = [], Group.split
    with (mock.patch.object(Group, "split", lambda self, color, name: colors.append(color) or split(self, color, name)),
          connected(group, ParallelConfig.for_world(group.size, **{"t": 1} | choices)) as topology):
        made = [one for name, one in vars(topology).items() if isinstance(one, Group) and name != "world"]
    assert min(colors) >= 0, "MPI knows no others, even if some library takes them"
    assert len(made) > 4 and all(one.comm == MPI.COMM_NULL for one in made) and group.comm != MPI.COMM_NULL


@given(st.data())
def test_the_first_and_the_last_of_a_pipeline_share_the_embedding(ranks, data):
    """Each pipeline's own two, first before last; ranks between them have no such group. And a pipeline's order is that
    of its stages, the ranks that split a replica's states are neighbours; and a report knows all groups.
    """
    t = data.draw(st.integers(1, 8), "t")
    p = data.draw(st.integers(1, 8 // t), "p")
    c = data.draw(st.integers(1, 8 // (t * p)), "c")
    d = data.draw(st.integers(1, 8 // (t * p * c)), "d")
    e = data.draw(st.sampled_from([n for n in range(1, c * d + 1) if c * d % n == 0]), "e")
    hybrid = data.draw(instances(c * d, zero_stage=1), "instances") if e == 1 else 1
    config = ParallelConfig(t, p, d, context_parallel_size=c, expert_model_parallel_size=e, zero_stage=1,
                            num_distributed_optimizer_instances=hybrid)
    colors = survey(config)
    for rank, found in enumerate(ranks.run(t * p * c * d, members, config)):
        assert all(list(senders.members(rank, name, colors)) == group for name, group in found.items())
        ends = [found["pipeline"][0], found["pipeline"][-1]]
        assert found["pipeline"] == [rank % (t * c * d) + t * c * d * stage for stage in range(p)]
        assert found.get("embedding") == (ends if p > 1 and rank in ends else None)
        replicas, n = found.get("replicas", found["data"]), c * d // hybrid
        assert hybrid == 1 or found["shards"] in [replicas[first:first + n] for first in range(0, c * d, n)]


def members(group, parallel):
    """Return the world ranks in each of this rank's groups, by the groups' names."""
    with connected(group, parallel) as topology:
        me, found = np.array([group.rank]), {}
        for part in (topology.tensor, topology.context, topology.data, topology.replicas, topology.pipeline,
                     topology.model, topology.embedding, topology.expert, topology.expert_replicas, topology.holders,
                     topology.shards, topology.instances):
            if part is not None:
                found[part.name] = part.all_gather(me, 0, "test").tolist()
                assert found[part.name][part.rank] == group.rank
        return found


def test_messages_travel_while_ranks_compute_alone(ranks):
    """MPI is called by the calls of a group of one, too, between which a layer computes."""
    assert ranks.run(2, receive_during_calls_of_one_rank) == [True, True]


def receive_during_calls_of_one_rank(group):
    """Report whether a long message arrives before the rank waits for it."""
    alone, received, other = group.split(group.rank, "alone"), np.zeros(1 << 20), 1 - group.rank
    posted = [group.post_receive(received, other, 0, "test"), group.post_send(np.ones(1 << 20), other, 0, "test")]
    deadline = time.monotonic() + 10
    while not received[-1] and time.monotonic() < deadline:
        alone.all_reduce(np.ones(1), "test")
    arrived = bool(received[-1])
    for pending in posted:
        pending.wait()
    alone.free()
    return arrived


def test_arrays_that_do_not_fit_are_refused(ranks):
    """MPI would write where nobody asked it to, or take a float64 for two float32, without a word. And halves are not
    added up in the background: gradients are float32.
    """
    ranks.run(2, misfits)


def misfits(group):
    gather, scatter = group.post_all_gather, group.post_reduce_scatter
    for post, x, out in [(gather, np.ones(3), np.ones(4)), (gather, np.ones(2), np.ones(6)),
                         (scatter, np.ones(4), np.ones(4)), (scatter, np.ones(4), np.ones(1)),
                         (gather, np.ones(2, "f"), np.ones(4)), (scatter, np.ones(4), np.ones(2, "f"))]:
        with pytest.raises(AssertionError, match="elements|cannot become"):
            post(x, out, "test")
    for post, x, out in [(gather, np.ones(3), np.ones(4)), (scatter, np.ones(4), np.ones(3))]:
        with pytest.raises(AssertionError, match=f"elements are not 2 . 2, of which rank {group.rank} has 3"):
            post(x, out, "test", [2, 2])
    x = np.ones(4, np.float16)
    for post in (lambda: group.post_all_reduce(x, "test"), lambda: scatter(x, x[:2], "test")):
        with pytest.raises(AssertionError, match="blocking"):
            post()


def test_ring_bytes_are_those_of_the_papers():
    """An all-reduce of N elements over n ranks sends 2 (n-1)/n N elements from each; halves of it send half. Ledgers
    add up entry by entry, and a phase ends where the one around it goes on.
    """
    ledger, other = Ledger(), Ledger()
    with ledger.phase("backward"):
        with pytest.raises(ZeroDivisionError), ledger.phase("forward"):
            for operation in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
                ledger.record(operation, "tensor", 8, "test", 1000, "float32")
            raise ZeroDivisionError
        ledger.record("broadcast", "tensor", 8, "test", 2000, "int64", 0.25)
    assert list(ledger.totals)[0] == Entry("all_reduce", "tensor", 8, "forward", "test", "float32")
    assert [ring_bytes(e, t) for e, t in ledger.totals.items()] == [7000, 3500, 3500, 3500, 14000]
    *_, (last, _) = ledger.totals.items()
    assert last.phase == "backward" and wire_bytes(last, ledger.totals[last]) == 16000
    other.record("send", "pipeline", 2, "test", 8, "float32")
    for _ in range(2):
        other.add(ledger)
    assert other.totals[last] == Total(2, 4000) and other.crossing[last] == 2 * ledger.crossing[last] > 0
    assert len(other.totals) == 6 and [entry.phase for entry in other.totals][0] == "outside a step"
    assert ring_bytes(Entry("all_reduce", "tensor", 1, "", "", "float32"), Total(1, 1000)) == 0
