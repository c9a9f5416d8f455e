"""The broker of a run: collectives are NumPy's, a send waits for its receiver, and whatever is sent is counted."""
import numpy as np
import pytest
from hypothesis import given, strategies as st

from course.grading.broker import Broker, find_cycle
from course.grading.lab_group import DTYPES, OPERATIONS

RANKS = st.integers(1, 8)
SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)


def perform(broker, requests, order=None):
    """Let each rank begin its operation, in this order. Return the replies that have come, by rank."""
    replies = {}
    for rank in order or range(len(requests)):
        for reply in broker.begin(rank, *requests[rank], *[None] * (4 - len(requests[rank]))):
            assert reply.rank not in replies, "an operation has ended twice"
            replies[reply.rank] = reply
    return replies


def results(requests, order=None):
    """Return the ranks' results, and the broker, after doing it twice: parts of elements add up. Assert that no
    operation is left, and none has failed.
    """
    broker = Broker(len(requests), OPERATIONS)
    for _ in range(2):
        replies = perform(broker, requests, order)
    assert len(replies) == len(requests) and not broker.waiting and not any(one.error for one in replies.values())
    return [replies[rank].value for rank in range(len(requests))], broker


def told(*xs) -> int:
    """Return how many numbers arrays tell: without elements, all of their lengths but the 0."""
    return sum(x.size or max(x.ndim - 1, 0) for x in xs)


@given(RANKS, SHAPES, st.sampled_from(DTYPES[:-1]), st.sampled_from(["sum", "max"]), st.data())
def test_collectives_are_numpys(n, shape, dtype, op, data):
    """With arrays whose sums are exact; those that are gathered may differ in length."""
    axis, order = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.permutations(range(n)))
    xs = list(np.random.default_rng([n, *shape]).integers(-50, 50, (n, *shape)).astype(dtype))
    parts = [np.take(x, range(data.draw(st.integers(0, shape[axis]))), axis) for x in xs]
    before = np.copy(xs)
    for operation, inputs, option, right, elements in (
            ("all_reduce", xs, op, [np.sum(xs, 0) if op == "sum" else np.max(xs, 0)] * n, 2 * told(xs[0])),
            ("reduce_scatter", xs, axis, np.array_split(sum(xs), n, axis), told(xs[0])),
            ("all_gather", parts, axis, [np.concatenate(parts, axis)] * n, told(*parts))):
        found, broker = results([(operation, x, option) for x in inputs], order)
        assert all(map(np.array_equal, found, right)) and np.array_equal(before, xs)
        assert broker.sent == [2 * elements * (n - 1) // n] * n and broker.messages == [2 * (n > 1)] * n


@given(RANKS, st.lists(st.integers(0, 4), max_size=6).map(tuple), st.sampled_from(DTYPES), st.integers(0, 8),
       st.randoms())
def test_what_is_exchanged_arrives_in_shape_and_kind(n, shape, dtype, shift, shuffled):
    """Whatever its shape, to any rank, oneself included; to oneself it counts for nothing."""
    requests = [("exchange", np.full(shape, rank).astype(dtype), (rank + shift) % n, (rank - shift) % n)
                for rank in range(n)]
    found, broker = results(requests, shuffled.sample(range(n), n))
    for rank, got in enumerate(found):
        right = np.full(shape, (rank - shift) % n).astype(dtype)
        assert np.array_equal(got, right) and (got.shape, got.dtype) == (right.shape, right.dtype)
    assert broker.sent == [2 * told(requests[0][1]) if shift % n else 0] * n


def test_a_send_waits_for_its_receiver_however_small_it_is():
    broker = Broker(2, OPERATIONS)
    assert broker.begin(0, "send", np.ones(0), 1, None) == [] and broker.messages == [0, 0]
    ended = {reply.rank: reply.value for reply in broker.begin(1, "receive", None, 0, None)}
    assert ended[0] is None and ended[1].size == 0 and broker.messages == [1, 0]


def test_a_cycle_is_found_without_the_ranks_that_lead_to_it():
    assert find_cycle({0: 1, 1: 2, 2: 3, 3: 1}) == [1, 2, 3] and find_cycle({0: 1, 1: 2}) == []


TWO, THREE = np.ones(2), np.ones(3)


@pytest.mark.parametrize("requests, words", [
    ([("send", TWO, 0)], "with itself"), ([("exchange", TWO, 0, 0.5)], "there is no rank 0.5"),
    ([("send", np.ones(3_000_000), 1)], "too large"),
    ([("all_reduce", TWO, "sum"), ("all_reduce", THREE, "sum")], "rank 0 has passed float64 [2], rank 1 has"),
    ([("all_reduce", TWO, "max"), ("all_reduce", TWO, "sum")], "with the same op"),
    ([("barrier", None), ("all_gather", TWO, 0)], "rank 0 is in barrier, rank 1 in all_gather"),
    ([("all_gather", TWO, 1)] * 2, "out of bounds")], ids=repr)
def test_what_cannot_be_done_is_reported_to_all_that_ask_for_it(requests, words):
    replies = perform(Broker(2, OPERATIONS), requests)
    assert all(replies[rank].error == "ValueError" and words in replies[rank].sentence for rank in range(len(requests)))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_not_allowed_is_refused_and_neither_done_nor_counted(operation):
    broker = Broker(2, set(OPERATIONS) - {operation})
    reply, = broker.begin(0, operation, TWO, 1, 1)
    assert reply.error == "PermissionError" and not broker.waiting and broker.sent == [0, 0]
