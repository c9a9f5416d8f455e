"""The broker of a run: collectives are NumPy's, a send waits for its receiver, and whatever is sent is counted."""
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from grading.broker import Broker, find_cycle
from grading.lab_group import DTYPES, OPERATIONS, LabGroup

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
    """Return the ranks' results, and the broker. Assert that no operation is left, and none has failed."""
    broker = Broker(len(requests), OPERATIONS)
    replies = perform(broker, requests, order)
    assert len(replies) == len(requests) and not broker.waiting and not any(one.error for one in replies.values())
    return [replies[rank].value for rank in range(len(requests))], broker


def told(shape) -> int:
    """Return how many numbers an array of this shape tells: without elements, all lengths but the 0."""
    return int(np.prod(shape)) or max(len(shape) - 1, 0)


def random(n, shape, dtype="float64", seed=0):
    """Draw an array for each rank, with sums that are exact."""
    return list(np.random.default_rng([seed, n, *shape]).integers(-50, 50, (n, *shape)).astype(dtype))


@given(RANKS, SHAPES, st.sampled_from(DTYPES[:-1]), st.sampled_from(["sum", "max"]), st.randoms())
@settings(max_examples=40)
def test_all_reduce_is_numpys(n, shape, dtype, op, shuffled):
    xs = random(n, shape, dtype)
    before, order = np.copy(xs), shuffled.sample(range(n), n)
    found, broker = results([("all_reduce", x, op) for x in xs], order)
    right = np.sum(xs, 0) if op == "sum" else np.max(xs, 0)
    assert all(np.array_equal(one, right) and one.dtype == dtype for one in found) and np.array_equal(before, xs)
    assert broker.sent == [2 * told(xs[0].shape) * (n - 1) // n] * n and broker.messages == [int(n > 1)] * n


@given(RANKS, st.integers(0, 2), st.data())
@settings(max_examples=40)
def test_all_gather_joins_what_may_differ_in_length(n, axis, data):
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    shapes = [(2,) * axis + (length,) + (3,) * (2 - axis) for length in lengths]
    xs = [random(1, shape, seed=rank)[0] for rank, shape in enumerate(shapes)]
    found, broker = results([("all_gather", x, axis) for x in xs])
    assert all(np.array_equal(one, np.concatenate(xs, axis)) for one in found)
    assert broker.sent == [sum(told(x.shape) for x in xs) * (n - 1) // n] * n


@given(RANKS, st.integers(0, 11), st.integers(0, 1))
@settings(max_examples=40)
def test_reduce_scatter_gives_the_piece_of_array_split(n, length, axis):
    xs = random(n, (length, 3) if axis == 0 else (3, length))
    found, broker = results([("reduce_scatter", x, axis) for x in xs])
    assert all(np.array_equal(one, right) for one, right in zip(found, np.array_split(sum(xs), n, axis)))
    assert broker.sent == [told(xs[0].shape) * (n - 1) // n] * n


@given(RANKS, st.lists(st.integers(0, 4), max_size=6).map(tuple), st.sampled_from(DTYPES), st.integers(0, 8),
       st.randoms())
@settings(max_examples=60)
def test_what_is_exchanged_arrives_in_shape_and_kind(n, shape, dtype, shift, shuffled):
    """Whatever its shape, to any rank, oneself included; to oneself it counts for nothing."""
    requests = [("exchange", np.full(shape, rank).astype(dtype), (rank + shift) % n, (rank - shift) % n)
                for rank in range(n)]
    found, broker = results(requests, shuffled.sample(range(n), n))
    for rank, got in enumerate(found):
        assert np.array_equal(got, np.full(shape, (rank - shift) % n).astype(dtype))
        assert got.shape == shape and got.dtype == dtype
    assert broker.sent == [told(shape) if shift % n else 0] * n


@pytest.mark.parametrize("elements", [0, 1, 100_000])
def test_a_send_waits_for_its_receiver_however_small_it_is(elements):
    broker = Broker(2, OPERATIONS)
    assert broker.begin(0, "send", np.ones(elements), 1, None) == [] and broker.messages == [0, 0]
    ended = {reply.rank: reply.value for reply in broker.begin(1, "receive", None, 0, None)}
    assert ended[0] is None and np.array_equal(ended[1], np.ones(elements)) and broker.messages == [1, 0]


def test_a_circle_of_sends_waits_and_is_described():
    broker = Broker(3, OPERATIONS)
    assert perform(broker, [("send", np.zeros(0), (rank + 1) % 3) for rank in range(3)], [2, 0, 1]) == {}
    assert broker.describe_waits() == ["rank 0 waits to send to rank 1.", "rank 1 waits to send to rank 2.",
                                       "rank 2 waits to send to rank 0.",
                                       "They wait in a cycle: 0 -> 1 -> 2 -> 0. One rank must go first."]


def test_a_circle_is_found_wherever_it_is():
    assert find_cycle({0: 1, 1: 2, 2: 3, 3: 1}) == [1, 2, 3]
    assert find_cycle({0: 1, 1: 2}) == [] and find_cycle({}) == []


@given(st.integers(2, 8), st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_many_small_collectives_cost_what_one_large_one_costs(n, lengths):
    """Else arrays of one element would be sent for nothing: each of them alone is less than a whole element a rank."""
    for operation, times in (("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", n)):
        broker = Broker(n, OPERATIONS)
        for length in lengths:
            perform(broker, [(operation, np.ones(length), "sum" if operation == "all_reduce" else 0)] * n)
        assert broker.sent == [times * sum(lengths) * (n - 1) // n] * n and broker.messages == [len(lengths)] * n


def test_an_array_without_elements_is_not_free_if_its_shape_tells_something():
    broker = Broker(2, OPERATIONS)
    perform(broker, [("send", np.empty((0, 1234, 77)), 1), ("receive", None, 0)])
    assert broker.sent == [2, 0]
    for operation, option, numbers in (("all_gather", 0, 3), ("all_reduce", "sum", 3), ("reduce_scatter", 0, 1)):
        broker = Broker(2, OPERATIONS)
        for _ in range(3):
            perform(broker, [(operation, np.empty((5, 0)), option)] * 2)
        assert broker.sent == [numbers] * 2


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_not_allowed_is_refused_and_neither_done_nor_counted(operation):
    allowed = [name for name in OPERATIONS if name != operation]
    broker = Broker(2, allowed)
    reply, = broker.begin(0, operation, np.ones(2), 1, 1)
    assert reply.error == "PermissionError" and not broker.waiting and broker.sent == [0, 0]
    assert f"group.{operation} may not be used here. This task allows: {allowed[0]}, " in reply.sentence


@pytest.mark.parametrize("request_, words", [
    (("send", np.ones(2), 0), "with itself, and wait for ever"), (("receive", None, 0), "with itself"),
    (("send", np.ones(2), 2), "there is no rank 2"), (("receive", None, -1), "there is no rank -1"),
    (("exchange", np.ones(2), 0, 0.5), "there is no rank 0.5"), (("send", np.ones(2), "0"), "there is no rank 0"),
    (("receive", None, None), "there is no rank None"), (("exchange", np.ones(2), 1), "there is no rank None"),
    (("send", np.ones(3_000_000), 1), "24,000,000 bytes is too large"),
], ids=repr)
def test_what_cannot_be_done_is_reported(request_, words):
    replies = perform(Broker(2, OPERATIONS), [request_])
    assert replies[0].error == "ValueError" and words in replies[0].sentence


@pytest.mark.parametrize("first, second, words", [
    (("all_reduce", np.ones(2), "sum"), ("all_reduce", np.ones(3), "sum"), "rank 0 has passed float64 [2], rank 1 has"),
    (("all_reduce", np.ones(2), "min"), ("all_reduce", np.ones(2), "min"), "op is 'min', but must be"),
    (("all_reduce", np.ones(2), "max"), ("all_reduce", np.ones(2), "sum"), "with the same op"),
    (("barrier", None), ("all_gather", np.ones(2), 0), "rank 0 is in barrier, rank 1 in all_gather"),
    (("all_gather", np.ones(2), 1), ("all_gather", np.ones(2), 1), "out of bounds"),
    (("reduce_scatter", np.ones(2), "x"), ("reduce_scatter", np.ones(2), "x"), ""),
])
def test_ranks_that_disagree_are_told_so_all_of_them(first, second, words):
    replies = perform(Broker(2, OPERATIONS), [first, second])
    assert [replies[rank].error for rank in (0, 1)] == ["ValueError"] * 2 and words in replies[1].sentence


@pytest.mark.parametrize("x", ["text", None, np.ones(2, complex), [[1], [1, 2]], np.ones((1,) * 7), [None],
                               np.ones(2, "float16")], ids=repr)
def test_what_no_array_is_cannot_be_sent(x):
    group = LabGroup(0, 2, lambda *_: pytest.fail("it was asked for"))
    with pytest.raises((TypeError, ValueError), match="cannot be sent|inhomogeneous"):
        group.exchange(x, 1, 1)
