"""CuPy's streams, events, pinned memory and NCCL, as far as the project uses them, over the memory of spies.

NCCL's calls have CuPy's signatures: addresses, counts and codes are plain numbers, and here they are looked at. What is
put on a second stream is done as late as it may be, when somebody waits for it; until then its result is nonsense. So
who forgets a wait on either side, lets go of the memory too early or changes it, is found out.

Ranks are real, and what they say to one another goes by MPI.
"""
import itertools
import os
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest import mock

import ml_dtypes
import numpy as np
from mpi4py import MPI

from mpi_impl.comm.transports.nccl import NCCL
from mpi_impl.comm.transports.staging import DevicePath, PinnedStaging
from mpi_impl.runtime import pinned
from tests import spy
from tests.installed import installed
from tests.spy import LENT, NONSENSE, QUEUE, SpyArray

# As in CuPy 14.2, from 0 on.
FORMATS = "INT8 UINT8 INT32 UINT32 INT64 UINT64 FLOAT16 FLOAT32 FLOAT64 BFLOAT16".split()
CODES = {name: code for code, name in enumerate(FORMATS)}
OPS = {name: code for code, name in enumerate("SUM PROD MAX MIN AVG".split())}
DTYPES = {code: np.dtype(ml_dtypes.bfloat16 if name == "BFLOAT16" else name.lower()) for name, code in CODES.items()}
UFUNCS = {OPS["SUM"]: np.add, OPS["MAX"]: np.maximum}
MEETING = 20_000                              # tags of the world, for those that make a communicator


class FakeCuda:
    """`with fake_cuda() as cupy:` this is what `import cupy` gives."""

    class CUDARuntimeError(Exception):
        pass

    def __init__(self, gpus: int = 1, nccl: int = 22907, free: int = 10**12, multiprocessors: int = 132,
                 mps: bool | None = False):
        """Imitate a machine with this many GPUs, and NCCL of this version, 0 for none. CUDA may not know about MPS."""
        self.gpus, self.free, self.used, self.pool = gpus, free, 0, 0
        self.multiprocessors, self.mps = multiprocessors, mps
        self.streams: dict[int, FakeStream] = {}
        self.current = FakeStream(self, is_current=True)
        self.cuda = SimpleNamespace(
            runtime=self, Device=self.device, Stream=lambda non_blocking: FakeStream(self),
            Event=FakeEvent, get_current_stream=lambda: self.current, alloc_pinned_memory=pinned_memory,
            nccl=FakeNccl(self, nccl) if nccl else SimpleNamespace(available=False))

    def device(self, i):
        return SimpleNamespace(use=lambda: setattr(self, "used", i))

    def empty(self, shape):
        return SpyArray(np.empty(shape))

    def get_default_memory_pool(self):
        return SimpleNamespace(total_bytes=lambda: self.pool)

    # cupy.cuda.runtime

    def getDeviceCount(self):
        if self.gpus == 0:
            raise self.CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return self.gpus

    def getDeviceProperties(self, i):
        return {"name": b"A GPU", "multiProcessorCount": self.multiprocessors}

    def deviceGetAttribute(self, attribute, i):
        if self.mps is None:
            raise self.CUDARuntimeError("cudaErrorInvalidValue: invalid argument")
        return int(self.mps and attribute == 133)

    def deviceGetPCIBusId(self, i):
        return f"0000:{i:02d}:00.0"

    def memGetInfo(self):
        return self.free, 2 * self.free


@contextmanager
def fake_cuda(**machine):
    fake = FakeCuda(**machine)
    with installed({"cupy": fake, "cupy.cuda": fake.cuda}):
        QUEUE.faults.clear()
        yield fake
        assert not QUEUE.faults, QUEUE.faults


@contextmanager
def on_gpus(group, way: str):
    """Let the group's arrays on a device go one of three ways, in `with on_gpus(group, way) as cupy:`."""
    with fake_cuda(gpus=group.size) as cupy, mock.patch.object(pinned, "PIECE", 64):
        cupy.used = group.rank
        group.instruments.device_path = {"staged": lambda: DevicePath(PinnedStaging()), "mpi": lambda: DevicePath(None),
                                         "nccl": lambda: DevicePath(PinnedStaging(), NCCL())}[way]()
        group.transports.mpi.comm = CudaAwareOpenMPI(group.comm)
        yield cupy
        group.transports.mpi.comm = group.comm
        for transport in group.transports.on_device:
            transport.free()
        del group.transports.on_device
        assert cupy.cuda.nccl.alive == 0


class CudaAwareOpenMPI:
    """A communicator of Open MPI, which does not know device memory in nonblocking collectives: it would crash there.
    """

    def __init__(self, comm):
        self.comm = comm

    def __getattr__(self, name):
        call = getattr(self.comm, name)
        return partial(refuse_devices, call) if name in NONBLOCKING else call


NONBLOCKING = ("Iallreduce", "Iallgather", "Iallgatherv", "Ireduce_scatter", "Ireduce_scatter_block")


def refuse_devices(call, *buffers):
    assert not any(isinstance(x, SpyArray) for x in buffers), "device memory in a nonblocking collective of Open MPI"
    return call(*buffers)


def pinned_memory(nbytes: int) -> spy.Pinned:
    assert nbytes <= pinned.PIECE, f"{nbytes} bytes would be pinned for good, and more by rounding up"
    return spy.Pinned(nbytes)


# ---- streams --------------------------------------------------------------------------------------------------------


class FakeStream:
    """Spies compute on the current one, at once. On another nothing is done until somebody waits for it."""

    def __init__(self, cupy: FakeCuda, is_current: bool = False):
        self.is_current, self.ptr = is_current, id(self)
        cupy.streams[self.ptr] = self
        self.waiting: list = []         # what has begun here and is not over, in order
        self.knows = -1                 # how much of what was launched on the current stream is done before what comes

    def record(self, event):
        event.before, event.launched = list(self.waiting), QUEUE.launched if self.is_current else -1
        return event

    def wait_event(self, event) -> None:
        self.knows = max(self.knows, event.launched)
        if self.is_current:
            event.synchronize()

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        for call in list(self.waiting):
            call.end()
        if self.is_current:
            QUEUE.finish()


class FakeEvent:
    def __init__(self, *, disable_timing=False):
        self.before, self.launched = [], -1

    def record(self) -> None:
        """Mark what was launched on the current stream."""
        self.launched = QUEUE.launched

    def synchronize(self) -> None:
        for call in self.before:
            call.end()
        QUEUE.finish(self.launched)

    @property
    def done(self) -> bool:
        return all(call.over or call.arrived() for call in self.before)


# ---- NCCL -----------------------------------------------------------------------------------------------------------


class FakeNccl:
    """cupy.cuda.nccl."""

    available = True

    def __init__(self, cupy: FakeCuda, version: int):
        self.cupy, self.version, self.made = cupy, version, itertools.count()
        self.alive = self.begun = 0     # communicators: those that are there, and all that have been
        self.posted = False             # whether anything has begun on a second stream
        for name, code in (CODES | OPS).items():
            setattr(self, f"NCCL_{name}", code)

    def get_version(self) -> int:
        return self.version

    def groupStart(self) -> None:
        """Let the calls that follow go as one. Here they go one by one."""

    groupEnd = groupStart

    def share(self, ranks: int) -> None:
        """Refuse a GPU that this many ranks share, as NCCL does; where it would let them wait for ever, fail, too."""
        if ranks == 1:
            return
        if self.version < 23000 or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            raise RuntimeError("NCCL_ERROR_INVALID_USAGE: Duplicate GPU detected")
        calls = ranks * 2       # one on each stream of a rank
        assert calls * int(os.environ["NCCL_MAX_CTAS"]) < self.cupy.multiprocessors, "kernels wait for room on the GPU"

    def get_unique_id(self) -> bytes:
        """Return an id that says which rank to ask, and for which communicator."""
        return np.array([MPI.COMM_WORLD.rank, MEETING + next(self.made)], np.int64).tobytes().ljust(128, b"-")

    def NcclCommunicator(self, ndev, commId, rank):
        return FakeCommunicator(self, ndev, commId, rank)


class FakeCommunicator:
    """NcclCommunicator, with its positional arguments."""

    def __init__(self, nccl: FakeNccl, ndev: int, commId: bytes, rank: int):
        assert len(commId) == 128 and 0 <= rank < ndev
        assert not nccl.posted, "a communicator needs a device on which no call waits for other ranks"
        world, (host, tag) = MPI.COMM_WORLD, np.frombuffer(commId[:16], np.int64).tolist()
        world.send((rank, (world.rank, nccl.cupy.used)), host, tag)
        if world.rank == host:
            assert rank == 0, "the first rank makes the id"
            found = dict(world.recv(tag=tag) for _ in range(ndev))
            members = [found[i] for i in range(ndev)]       # each number once
            for member, _ in members:
                world.send(members, member, tag + 5000)
        members, gpus = zip(*world.recv(source=host, tag=tag + 5000))
        nccl.share(max(map(gpus.count, gpus)))
        self.comm = world.Create_group(world.group.Incl(members), tag)
        self.nccl, self.rank, self.size = nccl, rank, ndev
        nccl.begun += 1
        nccl.alive += 1

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        send, receive = Place(sendbuf, count, datatype), Place(recvbuf, count, datatype)
        Call(self, "allReduce", (count, datatype, op), send, receive, recvbuf, stream, lambda xs: total(xs, op))

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):
        send, receive = Place(sendbuf, count, datatype), Place(recvbuf, count * self.size, datatype)
        Call(self, "allGather", (count, datatype), send, receive, recvbuf + self.rank * send.nbytes, stream, np.ravel)

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):
        send, receive = Place(sendbuf, recvcount * self.size, datatype), Place(recvbuf, recvcount, datatype)
        Call(self, "reduceScatter", (recvcount, datatype, op), send, receive, recvbuf - self.rank * receive.nbytes,
             stream, lambda xs: total(xs, op).reshape(self.size, -1)[self.rank])

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
        send, receive = Place(sendbuff, count, datatype), Place(recvbuff, count, datatype)
        Call(self, "broadcast", (count, datatype, root), send, receive, recvbuff, stream, lambda xs: xs[root])

    def reduce(self, sendbuff, recvbuff, count, datatype, op, root, stream):
        send, receive = Place(sendbuff, count, datatype), Place(recvbuff, count, datatype)
        Call(self, "reduce", (count, datatype, op, root), send, receive, recvbuff, stream,
             lambda xs: total(xs, op) if self.rank == root else xs[self.rank])

    def destroy(self):
        self.comm.Free()
        self.nccl.alive -= 1


class Call:
    """One rank's call of NCCL on a stream."""

    over = False

    def __init__(self, communicator, name, codes, send, receive, own, stream, result):
        """Post the call. `codes` are identical on all ranks; `result` is a function of all that they sent [size, sent].

        Where the memory of `send` and `receive` overlaps, send is at the address `own`.
        """
        comm, self.name, self.send, self.receive, self.result = communicator.comm, name, send, receive, result
        self.mine = send.elements().copy()
        self.in_place = np.may_share_memory(send.elements(), receive.elements())
        assert not self.in_place or send.address == own, "NCCL would read what it has overwritten"
        self.says = np.array([*name.encode().ljust(16), *codes])
        self.said = np.empty((comm.size, len(self.says)), self.says.dtype)
        self.theirs = np.empty((comm.size, send.count), send.dtype)
        self.requests = [comm.Iallgather(self.says, self.said),
                         comm.Iallgather(as_bytes(self.mine), as_bytes(self.theirs))]
        self.nccl, self.stream = communicator.nccl, communicator.nccl.cupy.streams[stream]
        if self.stream.is_current:
            self.end()
            QUEUE.launched += 1
        else:
            self.begin()

    def begin(self) -> None:
        assert self.stream.knows >= QUEUE.launched, "NCCL would begin before the device has computed what is sent"
        self.stream.waiting.append(self)
        self.nccl.posted = True
        as_bytes(self.receive.elements())[...] = NONSENSE
        if self.in_place:
            self.send.elements()[...] = self.mine       # which NCCL has yet to read

    def arrived(self) -> bool:
        """Report whether the call has ended. Calls of a stream end in the order in which they began."""
        if not self.over and self.stream.waiting[0] is self and MPI.Request.Testall(self.requests):
            self.end()
        return self.over

    def end(self) -> None:
        if self.over:
            return
        self.over = True
        self.requests[0].Wait()
        assert (self.said == self.said[0]).all(), f"NCCL would hang, or mix up memory: ranks differ in {self.name}"
        self.requests[1].Wait()
        assert (as_bytes(self.send.elements()) == as_bytes(self.mine)).all(), "what was sent has changed on the way"
        self.receive.elements()[...] = self.result(self.theirs)
        if not self.stream.is_current:
            self.stream.waiting.remove(self)


class Place:
    """Some elements at an address that a spy gave away."""

    def __init__(self, address: int, count: int, code: int):
        lent, self.dtype = max(LENT[address], key=lambda lent: lent.nbytes), DTYPES[code]
        self.address, self.count, self.nbytes, self.owner = address, count, count * self.dtype.itemsize, lent.owner
        assert lent.dtype == self.dtype, f"the code of {self.dtype} for memory of {lent.dtype}"
        assert lent.nbytes >= self.nbytes, f"{count} elements in {lent.nbytes} bytes"

    def elements(self) -> np.ndarray:
        owner = self.owner()
        assert owner is not None, "the memory was let go of, and may be anyone's by now"
        start = self.address - owner.__array_interface__["data"][0]
        return as_bytes(owner.ravel("K"))[start:start + self.nbytes].view(self.dtype)


def as_bytes(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1).view(np.uint8)


def total(theirs, op):
    """Reduce in rank order and round after every operand, as a ring does."""
    found = theirs[0]
    for one in theirs[1:]:
        found = UFUNCS[op](found, one)
    return found
