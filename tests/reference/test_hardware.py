"""The hardware's times for products, links and rings; and the groups of ranks that leave a server."""
from dataclasses import replace
from math import log

import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference.comm.ring import RING
from reference.costs.hardware import Link, RankGroup, collective_time, groups_that_leave, size_of_product, slowest_link
from tests.plan_cases import IDEAL, REAL

SIDES = st.integers(1, 5000)
RANKS = st.sampled_from((1, 2, 3, 4, 6, 8))


@given(SIDES, SIDES, SIDES)
def test_a_product_takes_its_flops_at_the_share_of_the_peak_of_its_size(n, k, m):
    """Its size is the side of the square product with as many FLOPs for each element."""
    side = size_of_product(n, k, m)
    assert 2 * n * k * m / (n * k + k * m + n * m) == pytest.approx(2 * side**3 / (3 * side**2))
    assert REAL.product(n, k, m) * REAL.share_of_peak(side) * REAL.peak == pytest.approx(2 * n * k * m)


@given(st.floats(0.5, 2000))
def test_shares_of_the_peak_lie_on_lines_over_the_logarithm(size):
    """np.interp's, which is constant outside of the table, too."""
    sizes, shares = zip(*REAL.efficiency)
    assert REAL.share_of_peak(size) == pytest.approx(np.interp(log(size), np.log(sizes), shares))


@pytest.mark.parametrize("operation, ring", [("all_reduce", 2), ("all_gather", 1)])
@given(ranks=st.integers(1, 9), size=st.integers(0, 10**6))
def test_a_ring_takes_n_minus_1_turns_of_a_share_each(operation, ring, ranks, size):
    link = Link(latency=3.0, bandwidth=100.0)
    assert link.seconds(operation, ranks, size) == pytest.approx(ring * (ranks - 1) * (3.0 + size / ranks / 100.0))
    assert link.seconds("send", 2, size) == pytest.approx(3.0 + size / 100.0)


@given(t=RANKS, d=RANKS, p=RANKS, server=st.integers(1, 20))
def test_groups_that_leave_a_server_are_counted(t, d, p, server):
    """The count is that of a world as an array, whose lines along an axis are groups, and of its servers."""
    world = np.arange(t * d * p).reshape(p, d, t)
    for axis, ranks, stride in ((2, t, 1), (1, d, t), (0, p, t * d)):
        lines = np.moveaxis(world, axis, -1).reshape(-1, ranks) // server
        crossing = [np.unique(line) for line in lines if line.min() < line.max()]
        most = max(np.bincount(np.concatenate(crossing))) if crossing else 0
        assert groups_that_leave(RankGroup(ranks, stride, world.size), server) == most


@given(operation=st.sampled_from(("all_reduce", "all_gather", "reduce_scatter")), ranks=RANKS, stride=RANKS,
       size=st.floats(0, 1e9))
def test_a_collective_is_a_ring_at_the_pace_of_its_slowest_link(operation, ranks, stride, size):
    group = RankGroup(ranks, stride, 2 * ranks * stride)
    groups, took = groups_that_leave(group, REAL.server), collective_time(REAL, operation, group, size)
    if ranks == 1:
        assert took == 0
    elif not groups:
        assert took == REAL.inside.seconds(operation, ranks, size)
    else:
        share = max(1 / REAL.inside.bandwidth, groups / REAL.between.bandwidth)
        turns = RING[operation](ranks, ranks)
        assert took == pytest.approx(turns * (max(REAL.inside.latency, REAL.between.latency) + size / ranks * share))


def test_servers_that_are_better_connected_than_their_devices_do_not_make_these_faster():
    between = replace(IDEAL, inside=Link(2.0, 10.0), between=Link(1.0, 1e6))
    assert slowest_link(between, RankGroup(16, 1, 16)) == Link(2.0, 10.0)
