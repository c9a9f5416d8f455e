"""The hardware's times for products, links and rings; and the groups of ranks that leave a server."""
from dataclasses import replace
from math import log

import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference.comm.ring import RING
from reference.costs.hardware import Link, RankGroup, collective_time, groups_that_leave, size_of_product, slowest_link
from reference.errors import UserError
from tests.plan_cases import IDEAL, REAL

SIDES = st.integers(1, 5000)
RANKS = st.sampled_from((1, 2, 3, 4, 6, 8))


def test_a_server_has_any_whole_number_of_devices():
    assert [replace(IDEAL, server=n).server for n in (1, 3, 8)] == [1, 3, 8]
    with pytest.raises(UserError, match="has 2.5 devices, but must have a whole number"):
        replace(IDEAL, server=2.5)


# ---- products -------------------------------------------------------------------------------------------------------


@given(SIDES, SIDES, SIDES)
def test_a_product_is_as_large_as_the_square_one_with_as_many_flops_for_each_element(n, k, m):
    side = size_of_product(n, k, m)
    assert 2 * n * k * m / (n * k + k * m + n * m) == pytest.approx(2 * side**3 / (3 * side**2))
    assert size_of_product(n, n, n) == pytest.approx(n)


@given(SIDES, SIDES, SIDES)
def test_a_product_takes_its_flops_at_the_share_of_the_peak_of_its_size(n, k, m):
    share = REAL.share_of_peak(size_of_product(n, k, m))
    assert REAL.product(n, k, m) * share * REAL.peak == pytest.approx(2 * n * k * m)
    assert IDEAL.product(n, k, m) * IDEAL.peak == pytest.approx(2 * n * k * m)


@given(st.floats(0.5, 2000))
def test_shares_of_the_peak_lie_on_lines_over_the_logarithm(size):
    """np.interp's, which is constant outside of the table, too."""
    sizes, shares = zip(*REAL.efficiency)
    assert REAL.share_of_peak(size) == pytest.approx(np.interp(log(size), np.log(sizes), shares))


def test_elements_go_through_memory_at_its_bandwidth():
    assert replace(IDEAL, bandwidth=1e3, element_bytes=4).stream(10, 7) == pytest.approx(10 * 7 * 4 / 1e3)


# ---- rings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation, ring", [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)])
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


@given(ranks=RANKS, stride=RANKS, blocks=st.integers(1, 4), server=st.sampled_from((1, 2, 4, 8, 16)))
def test_where_sizes_divide_one_another(ranks, stride, blocks, server):
    """A group fills a part of a server, or servers; or has one rank in each; and the groups share what a server has."""
    reach = ranks * stride
    found = groups_that_leave(RankGroup(ranks, stride, blocks * reach), server)
    if server % reach == 0 or blocks * reach <= server or ranks == 1:
        assert found == 0
    elif stride % server == 0:
        assert found == server
    elif reach % server == 0 and server % stride == 0:
        assert found == stride


def test_a_group_that_a_border_cuts_is_between_servers_though_it_is_small_enough_for_one():
    assert groups_that_leave(RankGroup(6, 1, 6), 8) == groups_that_leave(RankGroup(3, 1, 6), 8) == 0
    assert groups_that_leave(RankGroup(6, 1, 24), 8) == 2 and groups_that_leave(RankGroup(3, 1, 24), 8) == 2


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
        turns = RING[operation](ranks, ranks)
        share = max(1 / REAL.inside.bandwidth, groups / REAL.between.bandwidth)
        assert took == pytest.approx(turns * (max(REAL.inside.latency, REAL.between.latency) + size / ranks * share))
        assert took >= REAL.inside.seconds(operation, ranks, size)


def test_servers_that_are_better_connected_than_their_devices_do_not_make_these_faster():
    between = replace(IDEAL, inside=Link(2.0, 10.0), between=Link(1.0, 1e6))
    assert slowest_link(between, RankGroup(16, 1, 16)) == Link(2.0, 10.0)


# ---- nonsense -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong, says", [
    ({"peak": 0.0}, "peak is 0.0, but must be a number above 0"), ({"server": 2.5}, "whole number"),
    ({"memory": float("nan")}, "memory is nan"), ({"reserved": 80e9}, "less than its memory"),
    ({"reserved": -1.0}, "at least 0"), ({"efficiency": ()}, "efficiency is a list"),
    ({"efficiency": ((64.0, 0.5), (8.0, 0.1))}, "from small sizes"), ({"efficiency": ((64.0, 0.0),)}, "all above 0"),
    ({"attention": (0.4, 0.0)}, "attention is"), ({"attention": 0.4}, "must be two numbers"),
    ({"overhead": (1.0,)}, "must be two numbers"), ({"overhead": (1.0, -1.0)}, "neither below 0"),
    ({"passes": replace(IDEAL.passes, scores=(1.0, 2.0, 3.0))}, "scores is .* two numbers"),
    ({"hidden": 1.5}, "nor hidden above 1"), ({"jitter": -0.1}, "none may be below 0"),
    ({"inside": Link(-1.0, 1.0)}, "a latency not below"), ({"between": Link(1.0, 0.0)}, "bandwidth must be above 0")])
def test_impossible_hardware_is_refused_in_a_sentence(wrong, says):
    with pytest.raises(UserError, match=says):
        replace(IDEAL, **wrong)
