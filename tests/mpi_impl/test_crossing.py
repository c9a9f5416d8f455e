"""Traffic inside hosts and between them, counted apart, and the notice about groups that several hosts share."""
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpi_impl.comm.group import Group, Instruments
from mpi_impl.comm.hosts import Hosts, crossing, split_groups
from mpi_impl.comm.ledger import Entry, Ledger, Total, bytes_between_hosts, ring_bytes
from mpi_impl.report.traffic import Line, inside_and_between, table
from reference.costs.volumes import tensor_parallel_traffic

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
BYTES = 8       # of an element


def messages(operation: str, n: int, elements: int, root: int = 0):
    """Return every message (source, target, bytes) of a collective that n ranks play in a ring, step by step; of an
    all-to-all, from each rank to every other.
    """
    if operation == "broadcast":
        return [((root + i) % n, (root + i + 1) % n, BYTES * elements) for i in range(n - 1)]
    if operation == "all_to_all":
        return [(*pair, BYTES * elements / n) for pair in permutations(range(n), 2)]
    rounds = 2 if operation == "all_reduce" else 1      # to add up, and to hand out
    return [(rank, (rank + 1) % n, BYTES * elements / n)
            for _ in range(rounds) for _ in range(n - 1) for rank in range(n)]


def count_bytes(sent, host_of) -> tuple[float, float]:
    """Sum the bytes sent inside hosts, and those sent between them."""
    found = Counter[bool]()
    for source, target, size in sent:
        found[host_of[source] != host_of[target]] += size
    return found[False], found[True]


def parts(ledger: Ledger, entry: Entry) -> tuple[float, ...]:
    """Return one rank's bytes inside hosts and between them, as a report gives them."""
    return inside_and_between(Line(entry, ledger.totals[entry], None, bytes_between_hosts(ledger, entry)))


@given(st.sampled_from(OPERATIONS), st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(1, 100), st.data())
def test_inside_and_between_are_what_a_ring_sends(operation, hosts, elements, data):
    """However the ranks are placed: as many bytes as the messages of the ring, a rank; and together they are all."""
    n, root = len(hosts), data.draw(st.integers(0, len(hosts) - 1)) if operation == "broadcast" else 0
    ledger = Ledger()
    for _ in range(2):
        ledger.record(operation, "tensor", n, "test", elements, "float64", crossing(operation, hosts, root))
    (entry,) = ledger.totals
    expected = count_bytes(2 * messages(operation, n, elements, root), hosts)
    assert n * np.array(parts(ledger, entry)) == pytest.approx(expected)
    assert sum(parts(ledger, entry)) == pytest.approx(ring_bytes(entry, ledger.totals[entry]))


def everything(group, hosts):
    """Perform every operation once over a group whose ranks are on these hosts. Return the bytes inside hosts and
    between them, by operation.
    """
    placed = Hosts(dict(enumerate(hosts)), tuple(f"node{host}" for host in range(max(hosts) + 1)))
    apart = Group(group.comm, group.name, Instruments(hosts=placed))
    n, rank = group.size, group.rank
    apart.all_reduce(np.ones(6), "test")
    apart.all_gather(np.ones(6), 0, "test")
    apart.reduce_scatter(np.ones(6 * n), 0, "test")
    apart.broadcast(np.ones(6), "test", n - 1)
    if rank < n - 1:
        apart.post_send(np.ones(6), rank + 1, 0, "test").wait()
    if rank > 0:
        apart.post_receive(np.ones(6), rank - 1, 0, "test").wait()
    apart.split(rank % 2, "half").all_reduce(np.ones(6), "half")
    return {(entry.operation, entry.group): parts(apart.ledger, entry) for entry in apart.ledger.totals}


@pytest.mark.parametrize("hosts", [[0, 1, 0, 1], [0, 1, 2, 2], [1, 1, 0]])
def test_ranks_count_what_they_send(ranks, hosts):
    """On real ranks, placed in any way, the ledgers of all add up to the messages of rings; and of sends, to sends."""
    n = len(hosts)
    found = ranks.run(n, everything, hosts)
    expected = {("all_reduce", "world"): messages("all_reduce", n, 6),
                ("all_gather", "world"): messages("all_gather", n, 6 * n),
                ("reduce_scatter", "world"): messages("reduce_scatter", n, 6 * n),
                ("broadcast", "world"): messages("broadcast", n, 6, n - 1),
                ("send", "world"): [(rank, rank + 1, 6 * BYTES) for rank in range(n - 1)],
                ("all_reduce", "half"): [(members[source], members[target], size)
                                         for members in (range(0, n, 2), range(1, n, 2))
                                         for source, target, size in messages("all_reduce", len(members), 6)]}
    for what, sent in expected.items():
        together = np.sum([one.get(what, (0, 0)) for one in found], 0)
        assert together == pytest.approx(count_bytes(sent, hosts)), what


def test_on_one_host_nothing_is_told_apart(ranks):
    """A group's ranks are on one machine here, and it says so; a ledger without crossings has no columns for them."""
    (hosts, crossings), *others = ranks.run(3, on_one_host)
    assert list(hosts.of.values()) == [0, 0, 0] and len(hosts.names) == 1 and not hosts.several and not crossings
    assert all(found == (hosts, crossings) for found in others)
    entry = Entry("all_reduce", "tensor", 2, "forward", "test", "float32")
    alone, among = (table([Line(entry, Total(1, 10), None, between)]) for between in (None, 40.0))
    assert "hosts" not in alone and "inside hosts  between hosts" in among


def on_one_host(group):
    apart = Group(group.comm, group.name, Instruments(hosts=group.hosts()))
    apart.all_reduce(np.ones(6), "test")
    return group.hosts(), dict(apart.ledger.crossing)


def hosts_with(*counts: int) -> Hosts:
    placed = [host for host, count in enumerate(counts) for _ in range(count)]
    return Hosts(dict(enumerate(placed)), tuple(f"node{host}" for host in range(len(counts))))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 3))
def test_groups_are_whole_where_t_divides_the_ranks_of_every_host(slots, t, times):
    """And if it does not divide them, at least one is split, and there is a warning."""
    slots = [times * slot for slot in slots]
    slots[-1] += -sum(slots) % t        # t divides the world, or there is no run
    hosts, whole = hosts_with(*slots), all(slot % t == 0 for slot in slots)
    assert (split_groups(list(hosts.of.values()), t) == 0) == whole == (hosts.warning(t) == "")


@pytest.mark.parametrize("counts, t, words", [
    ((6, 6), 4, ["1 of 3", "--tensor-model-parallel-size 2"]), ((3, 3), 2, ["1 of 3", "slots are multiples of 2"])])
def test_a_split_group_is_warned_of(counts, t, words):
    """The warning says what it costs, and what to choose: the largest t that splits none, or other hosts."""
    sentence = hosts_with(*counts).warning(t)
    assert sentence.startswith("warning: ") and all(word in sentence for word in [*words, "8 b s h (t-1)/t"])
    assert 8 * 2 * 3 * 4 * (t - 1) / t == tensor_parallel_traffic(2, 3, 4, t)


@pytest.mark.parametrize("counts, words", [
    ((2, 1), "2 hosts: 2 ranks on node0, 1 rank on node1"), ((1,) * 9, "9 hosts of 1 rank each"),
    ((8, 4) * 8, "16 hosts of 4 to 8 ranks each")])
def test_hosts_are_told(counts, words):
    assert words in hosts_with(*counts).describe(1) and hosts_with(8).describe(8) == ""
