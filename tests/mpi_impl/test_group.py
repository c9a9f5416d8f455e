"""Groups of ranks: topology puts every rank in its place, results and refusals are shared, halves are added up exactly.

That collectives are the textbook's is in test_collectives.py.
"""
import re
import time
from functools import partial
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mpi4py import MPI

from mpi_impl.comm import topology as topology_module
from mpi_impl.comm.group import Group
from mpi_impl.comm.ledger import Entry, Ledger, Total, ring_bytes, wire_bytes
from mpi_impl.comm.topology import Place, place
from mpi_impl.report.page import senders
from mpi_impl.runtime.arrays import dtype_of
from reference.config import ParallelConfig
from reference.errors import UserError
from tests.rank_theorems import as_is
from tests.spy import SpyArray, to_host
from tests.strategies import instances
from tests.training_theorems import connected

RANKS, SEEDS = st.integers(1, 8), st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("failing", [(), (2,), (3, 1)])
def test_what_ranks_find_out_is_what_all_know(ranks, failing):
    """What the first rank finds, or each, in rank order; or the first failing rank's error, on every rank."""
    ranks.run(4, agree, failing)


def agree(group, failing):
    def look(first_alone):
        assert group.rank == 0 or not first_alone, "only the first rank looks"
        if group.rank in failing or first_alone and failing:
            raise UserError(f"There is no file {group.rank}.")
        return group.rank ** 2

    for share, expected, failed in ((partial(group.broadcast_object, lambda: look(True)), 0, 0),
                                    (partial(group.collect_objects, lambda: look(False)), [0, 1, 4, 9],
                                     min(failing, default=None))):
        try:
            assert share() == expected and not failing
        except UserError as error:
            assert failing and str(error) == f"There is no file {failed}."


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_places_are_megatrons(t, c, d, p):
    """Tensor-parallel ranks are neighbours, then context-parallel ones, then data-parallel ones, then stages; every
    place is taken once.
    """
    config = ParallelConfig(t, p, d, context_parallel_size=c)
    places = [place(rank, config) for rank in range(config.world_size)]
    assert places == [Place(i, k, r, stage) for stage in range(p) for r in range(d) for k in range(c) for i in range(t)]


@pytest.mark.parametrize("t, p, c", [(2, 2, 1), (1, 4, 1), (1, 2, 2)])
def test_every_communicator_is_given_back(ranks, t, p, c):
    """MPI has some thousands, and a notebook connects again and again. The world's own stays."""
    ranks.run(4, connect_and_disconnect, t, p, c)


def connect_and_disconnect(group, t, p, c):
    config = ParallelConfig.for_world(group.size, t, p, context_parallel_size=c)
    made, init, split = [], Group.__init__, Group.split
    at_an_end = p > 1 and place(group.rank, config).pipeline in (0, p - 1)
    colors = []
    with (mock.patch.object(Group, "__init__", lambda self, *args: made.append(self) or init(self, *args)),
          mock.patch.object(Group, "split", lambda self, color, name: colors.append(color) or split(self, color, name)),
          connected(group, config)):
        assert len(made) == 4 + at_an_end + 2 * (c > 1)
    assert min(colors) >= 0, "MPI knows no others, even if some library takes them"
    assert all(one.comm == MPI.COMM_NULL for one in made) and group.comm != MPI.COMM_NULL


def test_the_search_for_hosts_happens_once_and_gives_its_communicator_back(ranks):
    ranks.run(2, look_for_hosts)


def look_for_hosts(group):
    """Record what is split off a group's communicator: afterwards it is free, and a second call splits off nothing."""
    pair = group.split(0, "pair")
    comm, made = pair.comm, []
    watched = mock.Mock(wraps=comm)
    watched.Split_type = lambda kind: made.append(comm.Split_type(kind)) or made[-1]
    with mock.patch.object(pair, "comm", watched):
        assert list(pair.hosts().of) == [0, 1] and pair.hosts() is pair.known_hosts()
    assert made == [MPI.COMM_NULL]
    pair.free()


def test_the_table_of_topology(ranks):
    """Each table in the docstring of mpi_impl/comm/topology.py: names and members."""
    tables = topology_module.__doc__.split("With ")[1:]
    assert [table.partition(":")[0] for table in tables] == ["t = p = d = 2", "t = c = d = 2", "d = 4, p = e = 2",
                                                               "t = 2, d = 4 in 2 instances"]
    configs = [ParallelConfig(2, 2, 2), ParallelConfig(2, 1, 2, context_parallel_size=2),
               ParallelConfig(1, 2, 4, expert_model_parallel_size=2),
               ParallelConfig(2, 1, 4, zero_stage=1, num_distributed_optimizer_instances=2)]
    for table, config, others in zip(tables, configs, [{"embedding"}, set(), {"embedding"}, set()]):
        found = ranks.run(8, members, config)
        for name, line in re.findall(r" {9}([a-z][a-z ]*?|data) +((?:\[[\d ]+\])+)", table.replace(":", " " * 20)):
            groups = [list(map(int, part.split())) for part in re.findall(r"\[([\d ]+)\]", line)]
            assert [each.pop(name) for each in found] == [
                next(group for group in groups if rank in group) for rank in range(8)]
        assert [each.keys() for each in found] == [others] * 8      # all others were in the table


@settings(max_examples=40)
@given(st.data())
def test_the_first_and_the_last_of_a_pipeline_share_the_embedding(ranks, data):
    """Each pipeline's own two, first before last; ranks between them have no such group. And a pipeline's order is that
    of its stages; and a report knows all groups."""
    t = data.draw(st.integers(1, 8), "t")
    p = data.draw(st.integers(1, 8 // t), "p")
    c = data.draw(st.integers(1, 8 // (t * p)), "c")
    d = data.draw(st.integers(1, 8 // (t * p * c)), "d")
    e = data.draw(st.sampled_from([n for n in range(1, c * d + 1) if c * d % n == 0]), "e")
    hybrid = data.draw(instances(c * d, zero_stage=1), "instances") if e == 1 else 1
    config = ParallelConfig(t, p, d, context_parallel_size=c, expert_model_parallel_size=e, zero_stage=1,
                            num_distributed_optimizer_instances=hybrid)
    for rank, found in enumerate(ranks.run(t * p * c * d, members, config)):
        assert all(senders.members(rank, name, config) == group for name, group in found.items())
        ends = [found["pipeline"][0], found["pipeline"][-1]]
        assert found["pipeline"] == [rank % (t * c * d) + t * c * d * stage for stage in range(p)]
        assert found.get("embedding") == (ends if p > 1 and rank in ends else None)
        assert len(found["model"]) == t * p and set(found["pipeline"]) | set(found["tensor"]) <= set(found["model"])
        replicas = found.get("replicas", found["data"])
        assert len(replicas) == c * d and set(replicas) & set(found["model"]) == {rank}
        assert set(found["data"]) | set(found.get("context", [])) <= set(replicas)
        if hybrid > 1:      # neighbours among the replicas, and their counterparts
            shards, n = found["shards"], c * d // hybrid
            assert shards in [replicas[first:first + n] for first in range(0, c * d, n)]
            assert found["instances"] == replicas[shards.index(rank)::n]


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
    """MPI would write where nobody asked it to, or take a float64 for two float32, without a word."""
    ranks.run(2, misfits)


def misfits(group):
    gather, scatter = group.post_all_gather, group.post_reduce_scatter
    for post, x, out in [(gather, np.ones(3), np.ones(4)), (gather, np.ones(2), np.ones(6)),
                         (scatter, np.ones(4), np.ones(4)), (scatter, np.ones(4), np.ones(1)),
                         (gather, np.ones(2, "f"), np.ones(4)), (scatter, np.ones(4), np.ones(2, "f"))]:
        with pytest.raises(AssertionError, match="elements|cannot become"):
            post(x, out, "test")


# ---- formats of two bytes -------------------------------------------------------------------------------------------


HALVES = st.sampled_from(["float16", "bfloat16"])
ANYTHING = np.arange(2**16, dtype=np.uint16)      # every bit pattern there is


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
@given(RANKS, st.sampled_from([0, 1, 2, 7, 8, 1000]), st.sampled_from(["sum", "max"]), HALVES,
       st.sampled_from(["plain", "any bits", "cancelling"]), SEEDS)
def test_halves_are_added_up_in_float32_in_the_order_of_ranks_and_rounded_once(ranks, n, size, op, name, kind, seed):
    """So every rank has the same bits, whether the size divides or not; infinities and not-a-numbers arrive.

    Where large numbers cancel, another order or another way of rounding is another sum.
    """
    rng, dtype = np.random.default_rng(seed), dtype_of(name)
    xs = list(rng.normal(size=(n, size)).astype(dtype))
    if kind == "any bits":
        xs = list(rng.choice(ANYTHING, (n, size)).view(dtype))
    if kind == "cancelling":
        large = rng.choice([-2.0**15, 0, 2.0**15], (n, size))
        xs = list(np.where(large, large, rng.normal(size=(n, size)) * 2.0**-11).astype(dtype))
    expected = xs[0].astype(np.float32)
    for x in xs[1:]:
        expected = (np.add if op == "sum" else np.maximum)(expected, x.astype(np.float32))
    for found in ranks.run(n, all_reduce_halves, xs, op):
        same_halves(found, expected.astype(dtype))


def same_halves(found, expected):
    """Assert that two arrays have the same bits; any not-a-number equals any other."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    number = ~np.isnan(expected.astype(np.float32))
    assert (np.isnan(found.astype(np.float32)) == ~number).all()
    assert (found.view(np.uint16) == expected.view(np.uint16))[number].all()


def all_reduce_halves(group, xs, op):
    with np.errstate(all="ignore"):
        x = xs[group.rank].copy()
        assert group.all_reduce(x, "test", op) is x
        [(entry, total)] = group.ledger.totals.items()
        assert total == Total(1, x.size) and wire_bytes(entry, total) == 2 * x.size
        return x


@pytest.mark.parametrize("wrap", [as_is, SpyArray])
@given(RANKS, HALVES)
def test_halves_that_are_not_added_up_move_as_they_are(ranks, wrap, n, name):
    """Every bit pattern."""
    ranks.run(n, move_every_bit_pattern, name, wrap)


def move_every_bit_pattern(group, name, wrap):
    n, rank, every = group.size, group.rank, ANYTHING.view(dtype_of(name))
    mine = np.split(every[:2**16 // n * n], n)[rank]
    out, got = (wrap(np.zeros(size, every.dtype)) for size in (n * mine.size, 2**16))
    pending = [group.post_all_gather(wrap(mine), out, "test"), group.post_receive(got, (rank - 1) % n, 1, "test")]
    group.post_send(wrap(every), (rank + 1) % n, 1, "test").wait()
    found = [one.wait() for one in pending]
    found += [group.all_gather(wrap(mine), 0, "test"), group.broadcast(wrap(every.copy()), "test", root=n - 1)]
    for x in map(to_host, found):
        assert (x.view(np.uint16) == ANYTHING[:x.size]).all() and x.size in (2**16, n * mine.size)
    assert {entry.dtype for entry in group.ledger.totals} == {name}


def test_halves_are_not_added_up_in_the_background(ranks):
    """Gradients are float32; MPI would not know what to do with halves."""
    ranks.run(2, check_halves_are_refused)


def check_halves_are_refused(group):
    x = np.ones(4, np.float16)
    for post in (lambda: group.post_all_reduce(x, "test"), lambda: group.post_reduce_scatter(x, x[:2], "test")):
        with pytest.raises(AssertionError, match="blocking"):
            post()


def test_ledgers_add_up_entry_by_entry():
    """Calls and elements, and of these what crosses between hosts."""
    mine, theirs = Ledger(), Ledger()
    for ledger, reasons in ((mine, "aab"), (theirs, "abbc")):
        for reason in reasons:
            ledger.record("send", "pipeline", 2, reason, 8, "float32", 0.25)
    mine.add(theirs)
    assert {entry.reason: tuple(total) for entry, total in mine.totals.items()} == {"a": (3, 24), "b": (3, 24),
                                                                                    "c": (1, 8)}
    assert {entry.reason: crossing for entry, crossing in mine.crossing.items()} == {"a": 6, "b": 6, "c": 2}


def test_a_phase_ends_where_the_one_around_it_goes_on():
    ledger = Ledger()

    def record(reason):
        ledger.record("send", "pipeline", 2, reason, 1, "float32")

    with ledger.phase("backward"):
        with pytest.raises(ZeroDivisionError), ledger.phase("reduction"):
            record("inside")
            raise ZeroDivisionError
        record("behind it")
    record("behind both")
    assert [entry.phase for entry in ledger.totals] == ["reduction", "backward", "outside a step"]


def test_ring_bytes_are_those_of_the_papers():
    """An all-reduce of N elements over n ranks sends 2 (n-1)/n N elements from each; halves of it send half."""
    ledger = Ledger()
    with ledger.phase("forward"):
        for operation in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
            ledger.record(operation, "tensor", 8, "test", 1000, "float32")
    assert list(ledger.totals)[0] == Entry("all_reduce", "tensor", 8, "forward", "test", "float32")
    assert [ring_bytes(e, t) for e, t in ledger.totals.items()] == [7000, 3500, 3500, 3500]
    assert all(t == Total(1, 1000) and wire_bytes(e, t) == 4000 for e, t in ledger.totals.items())
    assert wire_bytes(Entry("broadcast", "tensor", 8, "", "", "int64"), Total(2, 1000)) == 8000
    assert ring_bytes(Entry("all_reduce", "tensor", 1, "", "", "float32"), Total(1, 1000)) == 0
