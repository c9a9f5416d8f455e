"""Lab 1: each mistake loses the right points, with a message that explains it."""
import pytest

from tests.deep import one_fast_of
from tests.labs.submissions import assert_loses, lost_checks, marks_of

LAB = "lab1_collectives"

MISTAKES = {
    "sends first, receives later": (
        "pass_on", "return group.exchange(x, (group.rank + 1) % group.size, (group.rank - 1) % group.size)",
        "group.send(x, (group.rank + 1) % group.size)\n    return group.receive((group.rank - 1) % group.size)",
        {"check_pass_on"}, "0 -> 1 -> 0"),
    "passes x to the rank before": (
        "pass_on", "exchange(x, (group.rank + 1) % group.size, (group.rank - 1)",
        "exchange(x, (group.rank - 1) % group.size, (group.rank + 1)", {"check_pass_on"}, "rank r passes its array on"),
    "joins chunks as they came": (
        "all_gather", "[chunks[rank] for rank in range(group.size)]", "list(chunks.values())",
        {"check_all_gather", "check_all_gather_cost"}, "expected"),
    "one round too few": (
        "reduce_scatter", "for step in range(1, group.size):", "for step in range(1, group.size - 1):",
        {"check_reduce_scatter", "check_reduce_scatter_cost"}, "chunk"),
    "only where chunks are even": (
        "reduce_scatter", "chunks = np.array_split(x, group.size)", "chunks = np.split(x, group.size)",
        {"check_reduce_scatter", "check_reduce_scatter_cost"}, "equal"),
    "shape forgotten": ("all_reduce", ".reshape(x.shape)", "", {"check_all_reduce"}, "shape"),
    "added the other way round": (
        "all_reduce_in_order", "group.receive(group.rank - 1) + x ",
        "group.receive(group.rank - 1) * 1.0000000000000003 + x ", {"check_in_order", "check_in_order_cost"}, "order"),
}


@pytest.mark.parametrize("mistake", one_fast_of(len(MISTAKES), MISTAKES))
def test_a_mistake_loses_its_points(mistake):
    assert_loses(LAB, mistake, *MISTAKES[mistake])


def test_too_much_sent_loses_the_points_for_the_cost_alone():
    found = marks_of(LAB, all_gather="""
import numpy as np
def all_gather(group, chunk):
    chunks = {group.rank: chunk}
    for step in range(1, group.size):       # everyone to everyone, and twice
        for again in range(2):
            other = group.exchange(chunk, (group.rank + step) % group.size, (group.rank - step) % group.size)
        chunks[(group.rank - step) % group.size] = other
    return np.concatenate([chunks[rank] for rank in range(group.size)])
""")
    assert lost_checks(found) == {"check_all_gather_cost"}
    assert "are enough" in found["check_all_gather_cost"].said


def test_one_rank_that_does_the_work_for_all_loses_the_points_for_the_cost():
    """It sends no more than a ring, all ranks together, and the bits are right."""
    found = marks_of(LAB, all_reduce_in_order="""
def all_reduce_in_order(group, x):
    if group.rank > 0:
        group.send(x, 0)
        return group.receive(0)
    for rank in range(1, group.size):
        x = x + group.receive(rank)
    for rank in range(1, group.size):
        group.send(x, rank)
    return x
""")
    assert lost_checks(found) == {"check_in_order_cost"} and "are enough" in found["check_in_order_cost"].said
