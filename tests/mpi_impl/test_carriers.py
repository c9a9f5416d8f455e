"""Transports for arrays on a device: what is between them and the device's queue, and faults that would be rare there.

That all three give the textbook's results is in test_collectives.py. Devices are spies, and NCCL is a fake that checks
addresses, counts, codes and streams (tests/fake_cuda.py).
"""
import time
from types import SimpleNamespace

import numpy as np
import pytest

from mpi_impl.comm.clock import Link, VirtualClock
from mpi_impl.comm.group import Group, Instruments
from mpi_impl.comm.trace import Trace
from mpi_impl.comm.watchdog import Watchdog
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig
from reference.schedules.simulate import Times
from tests.cases import Case, Plan
from tests.collective_theorems import collectives_are_the_textbooks, posted_are_the_textbooks
from tests.fake_cuda import on_gpus
from tests.mpi_impl.test_waits import Listener
from tests.planted import Bug, assert_caught
from tests.spy import SpyArray
from tests.training_theorems import training_equals_one_process


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
    listener, other = Listener(), 1 - group.rank
    watched = Group(group.comm, "world", Instruments(watchdog=listener))
    with on_gpus(watched, "nccl"):
        for wrap, expected in ((SpyArray, 2 * [("test", [other])]), (np.array, [])):
            sent, got = wrap(np.ones(2)), wrap(np.zeros(2))
            pending = [watched.post_send(sent, other, 1, "test"), watched.post_receive(got, other, 1, "test")]
            assert listener.heard == expected
            for one in pending:
                one.wait()
            listener.heard.clear()


def test_a_device_that_must_finish_for_the_loss_is_not_either():
    said = []
    world = SimpleNamespace(watchdog=Watchdog(0.05, said.append), name="world", others=[1])
    trainer = SimpleNamespace(topology=SimpleNamespace(world=world))
    device = SimpleNamespace(get=lambda: time.sleep(0.3) or np.array([3.0]))
    assert Trainer.on_host(trainer, device) == 3.0 and said == ["rank 1 for 0.05 seconds (world group: loss)"]


def gather_a_copy(group):
    """Post a copy that nobody keeps."""
    with on_gpus(group, "nccl"):
        out = SpyArray(np.zeros(2 * group.size))
        pending = group.post_all_gather(SpyArray(np.full(2, 1.0 + group.rank)), out, "test")
        assert pending.wait().get().sum() == group.size * (group.size + 1)


def overlap(group):
    """Hold up nobody before the wait for what is posted."""
    with on_gpus(group, "nccl") as cupy:
        pending = group.post_all_reduce(SpyArray(np.ones(3)), "test")
        assert not any(stream.is_current for stream in cupy.streams.values() if stream.waiting)
        assert sum(len(stream.waiting) for stream in cupy.streams.values()) == 1
        pending.wait()
        assert not any(stream.waiting for stream in cupy.streams.values())


def train_with_nccl(group):
    """Train with all communicators made before anything is posted: the last and the first stage sum the tied
    embedding's gradient while those of other tensors are on their way.
    """
    case = Case(1, ModelConfig(2, 8, 2, 11, 6, make_vocab_size_divisible_by=4), 2, 6, seed=3)
    with on_gpus(group, "nccl"):
        training_equals_one_process(group, case, 1, 2, plan=Plan(2, bucket_size=200), wrap=SpyArray)


def gather_in_a_group(group):
    """Give back what a group of ranks has made of NCCL."""
    with on_gpus(group, "nccl") as cupy:
        part = group.split(group.rank // 2, "part")
        assert part.all_reduce(SpyArray(np.ones(2)), "test").get().tolist() == [2, 2] and cupy.cuda.nccl.alive == 1
        part.free()
        assert cupy.cuda.nccl.alive == 0


# ---- each of these would hang a GPU, or compute something else on it now and then -----------------------------------

TRANSPORTS = "mpi_impl.comm.transports"
NCCL, BUFFERS, ARRAYS = f"{TRANSPORTS}.nccl", f"{TRANSPORTS}.buffers", "mpi_impl.runtime.arrays"
PINNED = "mpi_impl.runtime.pinned"
SEVERAL = [("all_reduce", False), ("all_gather", True), ("reduce_scatter", True), ("reduce_scatter", False)]
BUGS = {
    "another root": (Bug(NCCL, "self._code(x), root, self._current()", "self._code(x), 0, self._current()"),
                     "blocking"),
    "the sum where the part was": (Bug(NCCL, "address(out if root == self.rank else piece)", "address(piece)"),
                                   "uneven"),
    "parts of the sender's own array": (Bug(NCCL, "address(x if root == self.rank else piece)", "address(x)"),
                                        "uneven"),
    "another code": (Bug(NCCL, "{x.dtype.name.upper()}", "FLOAT32"), "blocking"),
    "a view handed to NCCL": (Bug(ARRAYS, "return x if x.flags.c_contiguous else x.copy()", "return x"), "columns"),
    "pieces that are not one after the other": (
        Bug(BUFFERS, "prod(out.shape[:axis % out.ndim]) == 1", "True"), "host"),
    "begun before it is computed": (
        Bug(NCCL, "side.wait_event(self.nccl.mark(self._current()))", "self.nccl.mark(self._current())"), "posted"),
    "read before it has come": (Bug(NCCL, "self._current().wait_event(end)", "None"), "copy"),
    "the posted on the first stream": (Bug(NCCL, "side = self.nccl.side\n", "side = self._current()\n"), "overlap"),
    "memory let go of": (
        Bug(NCCL, "wait_event(end), None, x)", "wait_event(end), None)"), "copy"),
    "communicators kept": (Bug("mpi_impl.comm.group", "self.transports.free()", "pass"), "groups"),
    "communicators made when they are needed": (
        Bug("mpi_impl.parallel.model_state", "group.warm_up(self.device_prototype)", "pass"), "training"),
    "MPI ahead of the device": (Bug(f"{TRANSPORTS}.mpi", "        finish_device()\n", "        pass\n"), "direct"),
    "device memory in a posted collective of MPI": (
        Bug(f"{TRANSPORTS}.choice", "StagedPosts(PinnedStaging(), self.choose), *self.by_mpi", "*self.by_mpi"),
        "posted by MPI"),
    "pinned memory reused": (Bug(f"{TRANSPORTS}.staging", "        finish_device()  ", "        pass  "), "staged"),
    "arrays of any size pinned": (
        Bug(f"{TRANSPORTS}.staging", "pinned.pinned_like(x) if x.nbytes <= pinned.PIECE else super().like(x)",
            "pinned.pinned_like(x)"), "in pieces"),
    "a pinned piece reused": (Bug(PINNED, "        end.synchronize()    ", "        pass    "), "in pieces"),
    "a piece written before it was read": (Bug(PINNED, "cycle(both)", "cycle(both[:1])"), "in pieces"),
}
ACTS = {
    "blocking": (collectives_are_the_textbooks, "nccl", "bfloat16", (1, 1, 1), "whole", 1, 1),
    "columns": (collectives_are_the_textbooks, "nccl", "float32", (2, 2, 1), "columns", 1, 1),
    "host": (collectives_are_the_textbooks, "host", "float64", (1, 1, 1), "whole", 1, 1),
    "posted": (posted_are_the_textbooks, "nccl", SEVERAL, 7, "float64", 1),
    "uneven": (posted_are_the_textbooks, "nccl", SEVERAL, 7, "float64", 1, True),
    "direct": (collectives_are_the_textbooks, "cuda-aware", "float16", (1, 1, 0), "whole", 1, 1),
    "posted by MPI": (posted_are_the_textbooks, "cuda-aware", SEVERAL, 7, "float64", 1),
    "staged": (collectives_are_the_textbooks, "staged", "float16", (1, 1, 0), "whole", 1, 1),
    "in pieces": (collectives_are_the_textbooks, "staged", "float64", (3, 3, 0), "whole", 1, 1),
    "groups": (gather_in_a_group,),
    "copy": (gather_a_copy,),
    "training": (train_with_nccl,),
    "overlap": (overlap,),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_fault_is_found(ranks, name):
    """And without it the act passes."""
    bug, act = BUGS[name]
    assert_caught(ranks, 4, bug, *ACTS[act])
