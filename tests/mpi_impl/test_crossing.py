"""Traffic inside hosts and between them, counted apart, and the notice about groups that several hosts share."""
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpi_impl.comm.group import Group, Instruments
from mpi_impl.comm.hosts import Hosts, split_groups
from mpi_impl.comm.ledger import Entry, Ledger, bytes_between_hosts
from shardlab.report.traffic import Line, inside_and_between

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


def everything(group, hosts):
    """Perform every operation once over a group whose ranks are on these hosts. Return the bytes inside hosts and
    between them, by operation.
    """
    placed = Hosts(dict(enumerate(hosts)), tuple(f"node{host}" for host in range(max(hosts) + 1)))
    apart = Group(group.comm, group.name, Instruments(hosts=placed))
    n, rank = group.size, group.rank
    apart.all_reduce(np.ones(6), "test")
    apart.all_gather(np.ones(6), 0, "test")
    apart.broadcast(np.ones(6), "test", n - 1)
    apart.all_to_all([np.ones(6)] * n, "test")
    if rank < n - 1:
        apart.post_send(np.ones(6), rank + 1, 0, "test").wait()
    if rank > 0:
        apart.post_receive(np.ones(6), rank - 1, 0, "test").wait()
    apart.split(rank % 2, "half").all_reduce(np.ones(6), "half")
    return {(entry.operation, entry.group): parts(apart.ledger, entry) for entry in apart.ledger.totals}


@given(st.lists(st.integers(0, 3), min_size=2, max_size=8))
def test_ranks_count_what_they_send(ranks, hosts):
    """However ranks are placed, the ledgers of all add up to the messages of rings; and of sends, to sends."""
    n = len(hosts)
    found = ranks.run(n, everything, hosts)
    expected = {("all_reduce", "world"): messages("all_reduce", n, 6),
                ("all_gather", "world"): messages("all_gather", n, 6 * n),
                ("broadcast", "world"): messages("broadcast", n, 6, n - 1),
                ("all_to_all", "world"): messages("all_to_all", n, 6 * n),
                ("send", "world"): [(rank, rank + 1, 6 * BYTES) for rank in range(n - 1)],
                ("all_reduce", "half"): [(members[source], members[target], size)
                                         for members in (range(0, n, 2), range(1, n, 2))
                                         for source, target, size in messages("all_reduce", len(members), 6)]}
    for what, sent in expected.items():
        together = np.sum([one.get(what, (0, 0)) for one in found], 0)
        assert together == pytest.approx(count_bytes(sent, hosts)), what


def hosts_with(*counts: int) -> Hosts:
    placed = [host for host, count in enumerate(counts) for _ in range(count)]
    return Hosts(dict(enumerate(placed)), tuple(f"node{host}" for host in range(len(counts))))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 3))
def test_groups_are_whole_where_t_divides_the_ranks_of_every_host(slots, t, times):
    """And if it does not divide them, at least one is split, and there is a warning, with what to choose."""
    slots = [times * slot for slot in slots]
    slots[-1] += -sum(slots) % t        # t divides the world, or there is no run
    hosts, whole = hosts_with(*slots), all(slot % t == 0 for slot in slots)
    assert (split_groups(list(hosts.of.values()), t) == 0) == whole == (hosts.warning(t) == "")
    assert whole or "--tensor-model-parallel-size" in hosts.warning(t) or f"multiples of {t}" in hosts.warning(t)
