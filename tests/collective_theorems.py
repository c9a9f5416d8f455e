"""The theorems of communication between ranks, whichever way arrays travel: collectives are the textbook's, posted ones
too, and messages find their receives. Ranks import this.
"""
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from random import Random
from unittest import mock

import numpy as np

from mpi_impl.comm.transports import shared_memory
from mpi_impl.runtime.arrays import dtype_of, is_half
from reference.comm import collectives
from reference.exact.array import ExactArray, as_exact, random_array
from tests.cases import close
from tests.fake_cuda import on_gpus
from tests.rank_theorems import as_is
from tests.spy import SpyArray, to_host

WIDE, HALVES = ("float64", "float32"), ("float16", "bfloat16")
OPERATIONS = ("sum", "max", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


@dataclass(frozen=True)
class Way:
    """A way for arrays to travel."""

    name: str
    forms: tuple[str, ...]              # "exact" is that of exact numbers
    wrap: Callable = as_is              # puts an array of the host where it starts from
    enter: Callable = nullcontext       # of a group: `with` it yields the group to use, or nothing
    in_order: bool = False              # whether sums are those in the order of ranks, to the last bit


@contextmanager
def sharing(group, capacity: int, small: int = 0):
    """Provide a group of the same ranks that shares memory for arrays of at least `small` bytes, in pieces of at most
    `capacity`, of which ranks add up parts if they are longer than one.
    """
    with mock.patch.multiple(shared_memory, SMALL=small, CAPACITY=capacity, LITTLE=capacity):
        part = group.split(0, "shared")
        yield part
        part.free()


@contextmanager
def on_devices(group, way: str):
    with on_gpus(group, way):
        yield group


WAYS = {way.name: way for way in (
    Way("host", (*WIDE, *HALVES, "int64"), enter=lambda group: sharing(group, 128, 1 << 40)),
    Way("exact", ("exact",), as_exact),
    Way("shared in pieces", (*WIDE, *HALVES, "int64"), enter=lambda group: sharing(group, 128), in_order=True),
    Way("shared", (*WIDE, *HALVES, "int64"), enter=lambda group: sharing(group, 1 << 16), in_order=True),
    Way("device", (*WIDE, *HALVES), SpyArray),
    Way("staged", (*WIDE, *HALVES), SpyArray, lambda group: on_devices(group, "staged")),
    Way("cuda-aware", (*WIDE, *HALVES), SpyArray, lambda group: on_devices(group, "mpi")),
    Way("nccl", (*WIDE, *HALVES), SpyArray, lambda group: on_devices(group, "nccl")))}


@contextmanager
def travelling(group, way: str):
    """Yield the group whose arrays go this way."""
    with WAYS[way].enter(group) as inside:
        yield inside if inside is not None else group


def numbers(way: str, form: str, seed: int, step: int, shape) -> list:
    """Draw every rank's array, shape[0] of them. NCCL rounds halves in an order of its own: there, sums are exact."""
    if form == "exact":
        return [random_array(shape[1:], seed, step, rank) for rank in range(shape[0])]
    rng = np.random.default_rng([seed, step])
    x = rng.integers(-9, 10, shape) if way == "nccl" else 10 * rng.normal(size=shape)
    return list(x.astype(dtype_of(form)))


def in_rank_order(xs: list, operation: Callable):
    """Combine the ranks' arrays as the textbook does: halves in float32, and rounded once."""
    wide = [x.astype(np.float32) for x in xs] if is_half(xs[0]) else xs
    return collectives.all_reduce(wide, operation)[0].astype(xs[0].dtype)


def same(found, expected, tolerance: float = 0.0) -> None:
    """Assert that an array is on the host as expected: to the last bit, but for this tolerance."""
    found = to_host(found)
    assert type(found) is type(expected) and found.dtype == expected.dtype
    if isinstance(expected, ExactArray):
        close(found, expected)
    elif tolerance:
        close(found, expected, tolerance)
    else:
        np.testing.assert_array_equal(found, expected)


def laid_out(x, layout: str, wrap: Callable):
    """Return x as an array of its own, or as a view whose elements are not contiguous; and the array that it is in."""
    if layout == "columns":
        wider = wrap(np.concatenate([x[..., :1], x, x[..., :1]], -1))
        return wider[..., 1:x.shape[-1] + 1], wider
    whole = wrap(x.swapaxes(0, 1).copy() if layout == "transposed" else x.copy())
    return whole.swapaxes(0, 1) if layout == "transposed" else whole, whole


# ---- collectives ----------------------------------------------------------------------------------------------------


def collectives_are_the_textbooks(group, way: str, form: str, sizes: tuple[int, int, int], layout: str, rounds: int,
                                  seed: int) -> None:
    """Check all operations several times in a row, each rank now and then late: nobody reads what is not there yet, or
    is there no longer. What is overwritten is x alone, and not its neighbours in memory.
    """
    n, (rows, length, axis) = group.size, sizes
    common, own, wrap = Random(seed), Random(seed + 1 + group.rank), WAYS[way].wrap
    tolerance = 0.0 if WAYS[way].in_order else {"float32": 1e-6, "float64": 1e-13}.get(form, 0.0)
    with travelling(group, way) as group:
        for step, operation in enumerate(rounds * common.sample(OPERATIONS, len(OPERATIONS))):
            if own.random() < 0.2:
                time.sleep(own.choice([0.0, 1e-4, 1e-3]))
            xs = numbers(way, form, seed, step, (n, n * rows, n * length, n))
            x, whole = laid_out(xs[group.rank], layout, wrap)
            before, calls, elements = to_host(whole).copy(), group.ledger.calls(), group.ledger.elements()
            one_collective(group, operation, x, xs, axis, seed % n, tolerance)
            if layout == "columns":
                same(to_host(whole)[..., [0, -1]], before[..., [0, -1]])
            assert group.ledger.calls() == calls + 1
            assert group.ledger.elements() == elements + x.size * (n if operation == "all_gather" else 1)
    assert {(entry.operation, entry.group_size) for entry in group.ledger.totals} == {
        (operation, n) for operation in ("all_reduce", *OPERATIONS[2:])}
    assert form == "exact" or {entry.dtype for entry in group.ledger.totals} == {form}


def one_collective(group, operation, x, xs, axis, root, tolerance) -> None:
    n, rank = group.size, group.rank
    if operation in ("sum", "max"):
        assert group.all_reduce(x, "test", operation) is x
        same(x, in_rank_order(xs, np.add if operation == "sum" else np.maximum), tolerance)
    elif operation == "reduce_scatter":
        same(group.reduce_scatter(x, axis, "test"), np.split(in_rank_order(xs, np.add), n, axis)[rank], tolerance)
    elif operation == "all_gather":
        same(group.all_gather(x, axis, "test"), collectives.all_gather(xs, axis)[0])
    elif operation == "broadcast":
        same(group.broadcast(x, "test", root), collectives.broadcast(xs, root)[0])
    else:
        parts = collectives.all_to_all([np.split(one, n, 0) for one in xs])[rank]
        for found, expected in zip(group.all_to_all(np.split(x, n, 0), "test"), parts, strict=True):
            same(found, expected)


# ---- posted ---------------------------------------------------------------------------------------------------------


def posted_are_the_textbooks(group, way: str, posts: list[tuple[str, bool]], length: int, form: str, seed: int,
                             uneven: bool = False) -> None:
    """Check collectives of which several are under way at the same time, beside a blocking one; each rank waits in an
    order of its own. In place, a rank's input of an all-gather, or its output of a reduce-scatter, is a view into the
    whole array, and all wholes are views of one buffer. With `uneven` each has parts of several sizes, none included.
    """
    n, rank, wrap, waiting = group.size, group.rank, WAYS[way].wrap, []
    ends = np.sort(np.random.default_rng(seed + 1).integers(0, n * length + 1, n - 1)) if uneven else (
        length * np.arange(1, n))
    parts = list(map(slice, [0, *ends.tolist()], [*ends.tolist(), n * length]))
    sizes = [part.stop - part.start for part in parts] if uneven else None
    drawn = np.random.default_rng(seed).integers(-1000, 1000, (len(posts), n, n * length))   # they add up exactly
    everyone = as_exact(drawn.astype(float)) if form == "exact" else drawn.astype(dtype_of(form))
    buffer = wrap(everyone[:, rank].copy())
    with travelling(group, way) as group:
        for i, (operation, in_place) in enumerate(posts):
            xs, whole, after = list(everyone[i]), buffer[i], everyone[i, rank].copy()
            part = whole[parts[rank]] if in_place else wrap(xs[rank][parts[rank]].copy())
            out = part if operation == "reduce_scatter" else whole
            if operation == "all_reduce":
                pending = group.post_all_reduce(whole, f"post {i}")
                expected = after = collectives.all_reduce(xs)[rank]
            elif operation == "all_gather":
                pending = group.post_all_gather(part, whole, f"post {i}", sizes)
                expected = after = collectives.all_gather([x[its] for x, its in zip(xs, parts)], 0)[rank]
            else:
                pending = group.post_reduce_scatter(whole, part, f"post {i}", sizes)
                expected = collectives.all_reduce(xs)[rank][parts[rank]]
                after[parts[rank]] = expected if in_place else after[parts[rank]]
            waiting.append((pending, out, expected, whole, after))
            if n == 1:
                same(out, expected)                             # one rank alone waits for nobody
        same(group.all_reduce(wrap(np.ones(2)), "beside"), to_host(wrap(np.full(2, float(n)))))
        Random(seed + rank).shuffle(waiting)
        for i, (pending, out, expected, whole, after) in enumerate(waiting):
            while i % 2 and not pending.poll():
                pass
            if i % 2:
                same(out, expected)                             # it is over, so the result is in its place
            assert pending.poll() in (True, False) and pending.wait() is out
            same(out, expected)
            same(whole, after)
            out[...] = 1.0
            assert pending.poll() and (to_host(pending.wait()) == 1).all()      # it leaves out alone
    totals = {entry.reason: (entry.operation, entry.group_size, *total) for entry, total in group.ledger.totals.items()}
    del totals["beside"]
    assert totals == {f"post {i}": (operation, n, 1, n * length) for i, (operation, _) in enumerate(posts)}


# ---- messages -------------------------------------------------------------------------------------------------------


def messages_find_their_receives(group, way: str, form: str, count: int, size: int, seed: int) -> None:
    """Check messages from every rank to every other, posted in one order and received in another; every other one goes
    from and to a view that is not contiguous.
    """
    wrap = WAYS[way].wrap

    def message(source, to, tag):
        return np.full(size, 100.0 * source + 10 * to + tag).astype("d" if form == "exact" else dtype_of(form))

    def place(x, tag):
        return wrap(np.stack([x] * 2, 1))[:, 1] if tag % 2 else wrap(x)

    others, random = [r for r in range(group.size) if r != group.rank], Random(seed + group.rank)
    sends, receives = ([(other, tag) for other in others for tag in range(count)] for _ in range(2))
    random.shuffle(sends)
    random.shuffle(receives)
    with travelling(group, way) as group:
        waiting = [group.post_receive(place(message(0, 0, 0), tag), source, tag, "test") for source, tag in receives]
        sent = [group.post_send(place(message(group.rank, to, tag), tag), to, tag, "test") for to, tag in sends]
        for pending, (source, tag) in zip(waiting, receives, strict=True):
            same(pending.wait(), to_host(wrap(message(source, group.rank, tag))))
        for pending in sent:
            pending.wait()
            assert pending.poll()
    assert group.ledger.calls(operation="send") == len(sends) and group.ledger.elements() == len(sends) * size
