"""Transports for arrays on a device: all three give the results of MPI on the host, and none is chosen by guessing.

Devices are spies, and NCCL is a fake that checks addresses, counts, codes and streams (tests/fake_cuda.py).
"""
import time
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl.comm.clock import Link, VirtualClock
from mpi_impl.comm.group import Group, Instruments
from mpi_impl.comm.trace import Trace
from mpi_impl.comm.watchdog import Watchdog
from mpi_impl.runtime.arrays import contiguous, dtype_of
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig
from reference.schedules.simulate import Times
from tests.cases import Case, Plan
from tests.fake_cuda import on_gpus
from tests.mpi_impl import test_group
from tests.planted import Bug, assert_caught
from tests.spy import SpyArray, to_host
from tests.training_theorems import training_equals_one_process

RANKS, SEEDS = st.integers(1, 5), st.integers(0, 2**32 - 1)
WAYS = st.sampled_from(["staged", "mpi", "nccl"])
FORMATS = st.sampled_from(["float32", "float64", "float16", "bfloat16"])
LAYOUTS = st.sampled_from(["whole", "columns", "transposed"])


def numbers(rng, shape, form):
    """Draw numbers whose sums are exact in every format and order, so that every transport gives the same bits."""
    return rng.integers(-9, 10, shape).astype(dtype_of(form))


def laid_out(x, layout: str, wrap):
    """Return x as an array of its own, or as a view whose elements are not contiguous."""
    if layout == "columns":
        wider = wrap(np.concatenate([x[..., :1], x, x[..., :1]], -1))
        return wider[..., 1:x.shape[-1] + 1]
    return wrap(x.swapaxes(0, 1).copy()).swapaxes(0, 1) if layout == "transposed" else wrap(x)


@given(WAYS, RANKS, st.integers(1, 3), st.integers(0, 3), st.integers(-1, 2), FORMATS, LAYOUTS, SEEDS)
def test_a_collective_gives_what_it_gives_on_the_host(ranks, way, n, rows, length, axis, form, layout, seed):
    ranks.run(n, collectives_agree, way, rows, length, axis, form, layout, seed)


def collectives_agree(group, way, rows, length, axis, form, layout, seed):
    n, rng = group.size, np.random.default_rng(seed)
    x = numbers(rng, (n, n * rows, n * length, n), form)[group.rank]
    on_host = Group(group.comm, group.name, Instruments())
    with on_gpus(group, way):
        for call in (lambda group, x: group.all_reduce(x, "test"),
                     lambda group, x: group.all_reduce(x, "test", op="max"),
                     lambda group, x: group.all_gather(x, axis, "test"),
                     lambda group, x: group.reduce_scatter(x, axis, "test"),
                     lambda group, x: group.broadcast(x, "test", root=seed % n)):
            given, expected = laid_out(x, layout, SpyArray), x.copy()
            result, expected = call(group, given), call(on_host, expected)
            same(result, expected)
            if result is given and layout == "columns" and length:
                assert (given[..., -1:].get() == expected[..., -1:]).all()
    assert group.ledger.totals == on_host.ledger.totals and group.ledger.calls() == 5


@pytest.mark.parametrize("wrap", [np.array, SpyArray])
def test_only_a_view_with_gaps_is_copied_to_a_buffer(wrap):
    x = np.arange(24.0).reshape(2, 3, 4)
    whole = wrap(x)
    assert contiguous(whole) is whole
    for part in (lambda x: x[:, 1:], lambda x: x[..., ::2], lambda x: x.swapaxes(0, 1), lambda x: x.T):
        buffer = contiguous(part(whole))
        assert buffer.flags.c_contiguous and type(buffer) is type(whole)
        np.testing.assert_array_equal(to_host(buffer), part(x))


def same(on_device, on_host):
    assert isinstance(on_device, SpyArray) and on_device.dtype == on_host.dtype
    np.testing.assert_array_equal(on_device.get(), on_host)


def test_an_overwritten_view_keeps_its_neighbours(ranks):
    for way in ("staged", "mpi", "nccl"):
        ranks.run(3, reduce_columns, way)


def reduce_columns(group, way):
    with on_gpus(group, way):
        x = SpyArray(np.full((3, 4), float(group.rank)))
        group.all_reduce(x[:, 1:3], "test")
        group.broadcast(x[:1, 3:], "test", root=2)
        assert x.get().tolist() == [[group.rank, 3, 3, 2], *[[group.rank, 3, 3, group.rank]] * 2]


POSTS = st.tuples(st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]), st.booleans())


@given(WAYS, RANKS, st.lists(POSTS, min_size=1, max_size=5), st.sampled_from([0, 1, 7, 700]),
       st.sampled_from(["float32", "float64"]), SEEDS)
def test_what_is_posted_gives_what_it_gives_on_the_host(ranks, way, n, posts, length, form, seed):
    """Several under way at once, beside blocking ones; in place or apart; each rank waits in an order of its own."""
    ranks.run(n, check_posts_agree, way, posts, length, form, seed)


def check_posts_agree(group, way, posts, length, form, seed):
    n, rank, on_host = group.size, group.rank, Group(group.comm, group.name, Instruments())
    with on_gpus(group, way):
        waiting = []
        for i, (operation, in_place) in enumerate(posts):
            x = numbers(np.random.default_rng([seed, i]), (n, n * length), form)[rank]
            for one, wrap in ((group, SpyArray), (on_host, np.array)):
                whole = wrap(x)
                part = whole[rank * length:(rank + 1) * length]
                part = part if in_place else part * 1
                pending = (one.post_all_reduce(whole, f"{i}") if operation == "all_reduce" else
                           one.post_all_gather(part, whole, f"{i}") if operation == "all_gather" else
                           one.post_reduce_scatter(whole, part, f"{i}"))
                waiting.append((i, pending, part if operation == "reduce_scatter" else whole))
            total = group.all_reduce(SpyArray(x[:1] * 0 + 1), "beside")
            assert total.get().tolist() == [n] * len(x[:1])
        order = Random(seed + rank).sample(range(len(posts)), len(posts))
        for i in order:
            (_, found, out), (_, expected, _) = waiting[2 * i:2 * i + 2]
            assert found.poll() in (True, False)
            assert found.wait() is out and found.poll() and found.wait() is out
            same(out, expected.wait())
    del group.ledger.totals[next(entry for entry in group.ledger.totals if entry.reason == "beside")]
    assert group.ledger.totals == on_host.ledger.totals


def test_what_is_posted_and_polled_is_there(ranks):
    ranks.run(3, poll_until_over)


def poll_until_over(group):
    with on_gpus(group, "nccl"):
        x = SpyArray(np.ones(5))
        pending = group.post_all_reduce(x, "test")
        while not pending.poll():
            pass
        assert x.get().tolist() == [3] * 5
        x[...] = 7.0
        assert pending.wait().get().tolist() == [7] * 5


@settings(max_examples=settings().max_examples // 2)
@given(WAYS, st.integers(2, 5), FORMATS, st.sampled_from([0, 1, 5000]), SEEDS)
def test_messages_arrive(ranks, way, n, form, size, seed):
    """By MPI, whatever the way: sent and received across."""
    ranks.run(n, messages, way, form, size, seed)


def messages(group, way, form, size, seed):
    n, rank = group.size, group.rank
    xs = numbers(np.random.default_rng(seed), (n, 2, size), form)
    with on_gpus(group, way) as cupy:
        left, right = (rank - 1) % n, (rank + 1) % n
        sent = [group.post_send(SpyArray(xs[rank, 0]), right, 1, "test"),
                group.post_send(SpyArray(np.stack([xs[rank, 1]] * 2, 1))[:, 1], left, 2, "test")]
        got = [group.post_receive(SpyArray(np.zeros(size, xs.dtype)), right, 2, "test"),
               group.post_receive(SpyArray(np.zeros((size, 2), xs.dtype))[:, 0], left, 1, "test")]
        same(got[1].wait(), xs[left, 0])
        same(got[0].wait(), xs[right, 1])
        for one in sent:
            one.wait()
        assert cupy.cuda.nccl.alive == 0
    assert group.ledger.calls(operation="send") == 2


def test_groups_of_a_rank_share_its_second_stream_and_are_freed(ranks):
    ranks.run(4, several_groups)


def several_groups(group):
    with on_gpus(group, "nccl") as cupy:
        rows, columns = group.split(group.rank // 2, "rows"), group.split(group.rank % 2, "columns")
        xs = [SpyArray(np.full(3, 2.0**group.rank)) for _ in range(3)]
        rows.warm_up(xs[0])
        columns.warm_up(xs[0])
        pending = [one.post_all_reduce(x, "test") for one, x in zip((rows, columns, rows), xs)]
        assert len(cupy.streams) == 2 and cupy.cuda.nccl.alive == 2
        r = group.rank
        for i, expected in ((2, 2**r + 2**(r ^ 1)), (1, 2**r + 2**(r ^ 2)), (0, 2**r + 2**(r ^ 1))):
            assert pending[i].wait().get().tolist() == [expected] * 3
        rows.free()
        columns.free()
        assert cupy.cuda.nccl.alive == 0


def test_the_virtual_clock_goes_by_nccl_as_by_mpi(ranks):
    for way in ("nccl", "staged"):
        assert ranks.run(2, read_the_clock, way) == [[12.0, 23.0]] * 2


def read_the_clock(group, way):
    """Return the times at which two collectives of 16 bytes end: ranks call the first at 0 and 10 seconds, and post the
    second at 20 and 21.
    """
    clock = VirtualClock(Link(latency=0.5, bandwidth=16), Times())
    watched, readings = Group(group.comm, "world", Instruments(trace=Trace(clock, recording=True))), []
    with on_gpus(watched, way):
        clock.seconds = 10.0 * group.rank
        watched.all_reduce(SpyArray(np.ones(2)), "test")
        readings.append(clock.seconds)
        clock.seconds = 20.0 + group.rank
        watched.post_all_reduce(SpyArray(np.ones(2)), "posted").wait()
        readings.append(clock.seconds)
    assert [one.name for one in watched.trace.slices] == ["test", "posted"]
    return readings


def test_a_device_that_must_finish_for_a_message_is_not_waited_for_without_a_limit(ranks):
    """It may wait for other ranks itself, by NCCL. What is on the host is there."""
    ranks.run(2, check_waits_for_messages)


def check_waits_for_messages(group):
    heard = []

    class Listener(Watchdog):
        def waiting(self, group, reason, ranks):
            heard.append(reason)
            return super().waiting(group, reason, ranks)

    watched, other = Group(group.comm, "world", Instruments(watchdog=Listener())), 1 - group.rank
    with on_gpus(watched, "nccl"):
        for wrap, expected in ((SpyArray, ["test", "test"]), (np.array, [])):
            sent, got = wrap(np.ones(2)), wrap(np.zeros(2))
            pending = [watched.post_send(sent, other, 1, "test"), watched.post_receive(got, other, 1, "test")]
            assert heard == expected
            for one in pending:
                one.wait()
            heard.clear()


def test_a_device_that_must_finish_for_the_loss_is_not_either():
    said = []
    world = SimpleNamespace(watchdog=Watchdog(0.05, said.append), name="world", others=[1])
    trainer = SimpleNamespace(topology=SimpleNamespace(world=world))
    device = SimpleNamespace(get=lambda: time.sleep(0.3) or np.array([3.0]))
    assert Trainer.on_host(trainer, device) == 3.0 and said == ["rank 1 for 0.05 seconds (world group: loss)"]


@pytest.mark.parametrize("form", ["float16", "bfloat16"])
def test_nccl_rounds_halves_at_every_hop_and_the_other_ways_once(ranks, form):
    """1 + e + e, where e is a little less than half of the gap behind 1: once too little, twice enough."""
    once, often = [ranks.run(3, small_ones, form, way)[0] for way in (None, "nccl")]
    assert once > often == 1
    for way in ("staged", "mpi"):
        assert ranks.run(3, small_ones, form, way) == [once] * 3


def small_ones(group, form, way):
    """Return the sum of rank 0's 1 and the others' small numbers; without a transport it is computed on the host."""
    dtype = dtype_of(form)
    gap = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[form]
    x = np.array([1 if group.rank == 0 else 0.45 * gap], dtype)
    if way is None:
        return float(group.all_reduce(x, "test")[0])
    with on_gpus(group, way):
        return float(group.all_reduce(SpyArray(x), "test").get()[0])


def test_who_posts_a_copy_need_not_keep_it(ranks):
    ranks.run(3, gather_a_copy)


def gather_a_copy(group):
    with on_gpus(group, "nccl"):
        out = SpyArray(np.zeros(2 * group.size))
        pending = group.post_all_gather(SpyArray(np.full(2, 1.0 + group.rank)), out, "test")
        assert pending.wait().get().sum() == group.size * (group.size + 1)


def test_what_is_posted_holds_up_nobody_before_it_is_waited_for(ranks):
    ranks.run(3, overlap)


def overlap(group):
    with on_gpus(group, "nccl") as cupy:
        pending = group.post_all_reduce(SpyArray(np.ones(3)), "test")
        assert not any(stream.is_current for stream in cupy.streams.values() if stream.waiting)
        assert sum(len(stream.waiting) for stream in cupy.streams.values()) == 1
        pending.wait()
        assert not any(stream.waiting for stream in cupy.streams.values())


def test_all_communicators_are_there_before_anything_is_posted(ranks):
    """The last and the first stage sum the tied embedding's gradient while those of other tensors are on their way."""
    ranks.run(4, train_with_nccl)


def train_with_nccl(group):
    case = Case(1, ModelConfig(2, 8, 2, 11, 6, make_vocab_size_divisible_by=4), 2, 6, seed=3)
    with on_gpus(group, "nccl"):
        training_equals_one_process(group, case, 1, 2, plan=Plan(2, bucket_size=200), wrap=SpyArray)


# ---- each of these would hang a GPU, or compute something else on it now and then -----------------------------------

TRANSPORTS = "mpi_impl.comm.transports"
NCCL, BUFFERS, ARRAYS = f"{TRANSPORTS}.nccl", f"{TRANSPORTS}.buffers", "mpi_impl.runtime.arrays"
PINNED = "mpi_impl.runtime.pinned"
SEVERAL = [("all_reduce", False), ("all_gather", True), ("reduce_scatter", True), ("reduce_scatter", False)]
BUGS = {
    "too many elements": (Bug(NCCL, "address(out), out.size,", "address(out), x.size,"), "blocking"),
    "too few elements": (Bug(NCCL, "address(x), address(out), x.size, self._code(x), stream",
                             "address(x), address(out), x.size - 1, self._code(x), stream"), "blocking"),
    "another root": (Bug(NCCL, "self._code(x), root,", "self._code(x), 0,"), "blocking"),
    "another operation": (Bug(NCCL, "self._code(x), self._op(op)", "self._code(x), self._op('sum')"), "blocking"),
    "another code": (Bug(NCCL, "{x.dtype.name.upper()}", "FLOAT32"), "blocking"),
    "a view handed to NCCL": (Bug(ARRAYS, "return x if x.flags.c_contiguous else x.copy()", "return x"), "columns"),
    "the parts along the wrong axis": (
        Bug(BUFFERS, "np.split(out, len(pieces), axis)", "np.split(out, len(pieces), 0)"), "columns"),
    "pieces that are not one after the other": (
        Bug(BUFFERS, "prod(out.shape[:axis % out.ndim]) == 1", "True"), "textbook"),
    "begun before it is computed": (
        Bug(NCCL, "side.wait_event(self.nccl.mark(self._current()))", "self.nccl.mark(self._current())"), "posted"),
    "read before it has come": (Bug(NCCL, "self._current().wait_event(end)", "None"), "copy"),
    "an event before what it shall mark": (
        Bug(NCCL, "begin(x, out, side)\n        end = self.nccl.mark(side)",
            "end = self.nccl.mark(side)\n        begin(x, out, side)"), "copy"),
    "the posted on the first stream": (Bug(NCCL, "side = self.nccl.side\n", "side = self._current()\n"), "overlap"),
    "memory let go of": (
        Bug(NCCL, "wait_event(end), None, x)", "wait_event(end), None)"), "copy"),
    "communicators kept": (Bug("mpi_impl.comm.group", "self.transports.free()", "pass"), "groups"),
    "communicators made when they are needed": (
        Bug("mpi_impl.parallel.model_state", "group.warm_up(self.device_prototype)", "pass"), "training"),
    "MPI ahead of the device": (Bug(f"{TRANSPORTS}.mpi", "        finish_device()\n", "        pass\n"), "direct"),
    "a view handed to MPI": (Bug(ARRAYS, "return x if x.flags.c_contiguous else x.copy()", "return x"), "by MPI"),
    "device memory in a posted collective of MPI": (
        Bug(f"{TRANSPORTS}.choice", "StagedPosts(PinnedStaging(), self.choose), *self.by_mpi", "*self.by_mpi"),
        "posted by MPI"),
    "pinned memory used anew": (Bug(f"{TRANSPORTS}.staging", "        finish_device()  ", "        pass  "), "staged"),
    "arrays of any size pinned": (
        Bug(f"{TRANSPORTS}.staging", "pinned.pinned_like(x) if x.nbytes <= pinned.PIECE else super().like(x)",
            "pinned.pinned_like(x)"), "in pieces"),
    "a pinned piece used anew": (Bug(PINNED, "        end.synchronize()    ", "        pass    "), "in pieces"),
    "pieces let go of": (Bug(PINNED, "        for _, end in both:\n            end.synchronize()", "        pass"),
                         "in pieces"),
    "a piece read before it has arrived": (Bug(PINNED, "    end.synchronize()\n    return", "    return"), "in pieces"),
    "a piece written before it was read": (Bug(PINNED, "cycle(both)", "cycle(both[:1])"), "in pieces"),
}
ACTS = {
    "blocking": (collectives_agree, "nccl", 1, 1, 1, "bfloat16", "whole", 1),
    "columns": (collectives_agree, "nccl", 2, 2, 1, "float32", "columns", 1),
    "textbook": (test_group.collectives_agree, list(np.arange(64.0).reshape(4, 4, 4)), 1),
    "posted": (check_posts_agree, "nccl", SEVERAL, 7, "float64", 1),
    "direct": (collectives_agree, "mpi", 1, 1, 0, "float16", "whole", 1),
    "posted by MPI": (check_posts_agree, "mpi", SEVERAL, 7, "float64", 1),
    "by MPI": (collectives_agree, "mpi", 2, 2, 1, "float32", "columns", 1),
    "staged": (collectives_agree, "staged", 1, 1, 0, "float16", "whole", 1),
    "in pieces": (collectives_agree, "staged", 3, 3, 0, "float64", "whole", 1),
    "groups": (several_groups,),
    "copy": (gather_a_copy,),
    "training": (train_with_nccl,),
    "overlap": (overlap,),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_fault_is_found(ranks, name):
    bug, act = BUGS[name]
    assert_caught(ranks, 4, bug, *ACTS[act])
