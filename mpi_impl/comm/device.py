"""The devices of the ranks: a CPU core, or a CUDA GPU, by CuPy, for each; and the path of arrays from GPU to GPU."""
import socket
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpi_impl.comm.group import Group
from mpi_impl.comm.mpi_library import library, reads_devices
from mpi_impl.comm.transports import BACKENDS
from mpi_impl.comm.transports.nccl import NCCL, SHARES_GPUS, blocks_of_a_call, most_ranks
from mpi_impl.comm.transports.staging import DevicePath, PinnedStaging
from mpi_impl.comm.watchdog import listed
from mpi_impl.runtime.advice import typed
from reference.errors import UserError
from reference.params import HOST

WITHOUT = "or leave --device out, to compute on CPU cores."
MPS_ENABLED = 133       # cudaDevAttrMpsEnabled
UNFORCED = "or leave --distributed-backend out, and what is there is used."


class Device(NamedTuple):
    """A device that a rank computes on."""

    like: Any                           # an empty array of the library that its arrays belong to
    description: str                    # for a person; "" for CPU cores
    path: DevicePath = DevicePath()     # of its arrays, to other ranks
    memory: "Memory | None" = None      # its own; None if it is the machine's
    gpus: Sequence[str] = ()            # the names of all GPUs of the run, each once


class Memory(NamedTuple):
    """The free memory of a GPU."""

    where: str      # an address that no other GPU in the world has
    size: int       # bytes


class RankDevice(NamedTuple):
    """The GPU of a rank, and the libraries next to it."""

    gpu: str                # its address
    name: str               # its model
    nccl: int               # the version of CuPy's NCCL, as 23007 for 2.30.7; 0 if there is none
    mpi: bool               # whether MPI is CUDA-aware
    multiprocessors: int
    mps: bool               # whether ranks that share it compute at the same time, by NVIDIA's Multi-Process Service


def device_of(name: str, ranks: Group, backend: str | None = None) -> Device:
    """Return this rank's device. All ranks call this. A rank takes the GPU of its number on its machine; if there are
    more ranks than GPUs, some share one. `backend` is one of BACKENDS, or None for the first that is possible.

    Raise UserError, on all ranks, if one of them has no CuPy or no GPU, or cannot use the backend.
    """
    if name == "cpu":
        return Device(HOST, "")
    local, _ = ranks.place_on_machine()
    gpus = ranks.collect_objects(gpus_here, "which GPUs there are")
    index = local % len(gpus[ranks.rank])
    gpu, model = gpus[ranks.rank][index]
    import cupy
    devices = ranks.allgather_objects(RankDevice(gpu, model, nccl_version(), reads_devices(), *sharing_of(index)))
    backend = backend_of(devices, backend)
    cupy.cuda.Device(index).use()
    free, _ = cupy.cuda.runtime.memGetInfo()
    names = {device.gpu: device.name for device in devices}
    return Device(cupy.empty(0), describe(devices, backend), path_of(devices, backend), Memory(gpu, free),
                  list(names.values()))


def gpus_here() -> list[tuple[str, str]]:
    """Return the GPUs that this machine lets a rank see, each with its model. Raise UserError if there are none, or no
    library to use them.
    """
    try:
        import cupy
    except ImportError as error:
        problem = "that is not installed" if error.name == "cupy" else f"that cannot be loaded ({error})"
        raise UserError(f"--device is cuda, which needs CuPy, and {problem}. Install it into this environment, as in "
                        f"`{typed('pip')} install 'cupy-cuda12x[ctk]'` (or cupy-cuda13x, whichever CUDA the machine "
                        f"has), {WITHOUT}") from None
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise UserError(f"--device is cuda, but CUDA finds no GPU on this machine ({error}). Start the run where there "
                        f"is one, {WITHOUT}") from None
    # By its address on the machine's bus: if a rank may see only one of them, that is its number 0.
    return [(f"{machine_id()} {runtime.deviceGetPCIBusId(i)}",
             runtime.getDeviceProperties(i)["name"].decode()) for i in range(count)]


def machine_id() -> str:
    """Return the id of this boot of the machine's kernel, as NCCL does: containers on two machines may share a host
    name, and those on one may have several.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def nccl_version() -> int:
    """Return the version of CuPy's NCCL, or 0. Without it CuPy warns on every rank, in many lines; the run says it in
    one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from cupy.cuda import nccl
    return nccl.get_version() if nccl.available else 0


def sharing_of(index: int) -> tuple[int, bool]:
    """Return how many multiprocessors a GPU has, and whether MPS lets its ranks compute at the same time."""
    from cupy.cuda import runtime
    try:
        mps = bool(runtime.deviceGetAttribute(MPS_ENABLED, index))
    except runtime.CUDARuntimeError:        # of a CUDA that does not know the question
        mps = False
    return runtime.getDeviceProperties(index)["multiProcessorCount"], mps


# ---- how their arrays get from GPU to GPU ---------------------------------------------------------------------------


def backend_of(devices: Sequence[RankDevice], asked: str | None) -> str:
    """Return one of BACKENDS, the same on all ranks. Raise UserError if the one that is asked for cannot be used."""
    problems = {"nccl": without_nccl(devices), "mpi": without_mpi(devices), "staged": ""}
    if asked is None:
        shared = len(sharers(devices)) > 1      # where NCCL is slower than anything else
        return next(name for name in BACKENDS if not problems[name] and not (shared and name == "nccl"))
    if problems[asked]:
        raise UserError(f"--distributed-backend is {asked}, {problems[asked]}, {UNFORCED}")
    return asked


def sharers(devices: Sequence[RankDevice]) -> list[int]:
    """Return the ranks on the GPU that most ranks share."""
    together: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        together.setdefault(device.gpu, []).append(rank)
    return max(together.values(), key=len)


def without_nccl(devices: Sequence[RankDevice]) -> str:
    """Return why NCCL cannot be used, and what would help; "" if it can."""
    lacking = [rank for rank, device in enumerate(devices) if not device.nccl]
    if lacking:
        return (f"but CuPy finds no NCCL on {listed(lacking)}. Install it into this environment, as in "
                f"`{typed('pip')} install nvidia-nccl-cu12` (or nvidia-nccl-cu13, whichever CUDA CuPy was made for)")
    shared = sharers(devices)
    if len(shared) == 1:
        return ""
    where, oldest = f"{listed(shared)} share one", min(device.nccl for device in devices)
    if oldest < SHARES_GPUS:
        return (f"which needs a GPU for each rank, but {where}: from 2.30 on it allows that, and this is "
                f"{dotted(oldest)}. Install a newer one, as in `{typed('pip')} install -U 'nvidia-nccl-cu12>=2.30'` "
                f"(or nvidia-nccl-cu13), start a rank for each of the {counted(devices)}")
    if not blocks_for(devices, shared):
        return (f"whose calls wait on the GPU for those of other ranks, but {where}, and it has room for those of "
                f"{most_ranks(devices[shared[0]].multiprocessors)}. Start fewer ranks")
    return ""


def blocks_for(devices: Sequence[RankDevice], shared: Sequence[int]) -> int:
    """Return the thread blocks that a collective may take, the same on all ranks, where these share a GPU."""
    return blocks_of_a_call(min(device.multiprocessors for device in devices), len(shared))


def dotted(version: int) -> str:
    """Return NCCL's version as people write it: 2.30.7 for 23007."""
    return f"{version // 10_000}.{version // 100 % 100}.{version % 100}"


def without_mpi(devices: Sequence[RankDevice]) -> str:
    """Return the same for MPI on GPUs."""
    if all(device.mpi for device in devices):
        return ""
    return f"but {library()} is not CUDA-aware: it cannot read a GPU's memory. Use an MPI that was built so"


def path_of(devices: Sequence[RankDevice], backend: str) -> DevicePath:
    """Return the path of this rank's arrays, once it has chosen its GPU. With NCCL, MPI's path is there, too."""
    direct, shared = backend != "staged" and not without_mpi(devices), sharers(devices)
    nccl = NCCL(blocks_for(devices, shared) if len(shared) > 1 else None) if backend == "nccl" else None
    return DevicePath(None if direct else PinnedStaging(), nccl)


def describe(devices: Sequence[RankDevice], backend: str) -> str:
    """Describe the devices of all ranks, and the path of their arrays."""
    gpus, names = counted(devices), sorted({device.name for device in devices})
    is_shared = len(sharers(devices)) > 1
    shared = f", which {len(devices)} ranks share" if is_shared else ""
    by_mpi = "through pinned host memory" if backend == "staged" or without_mpi(devices) else "by MPI, from GPU to GPU"
    ways = f"; collectives go by NCCL, messages {by_mpi}" if backend == "nccl" else f"; messages go {by_mpi}"
    trial = f".\n{tried_out(devices)}" if is_shared and backend == "nccl" else ""
    return f"computing on {gpus} ({', '.join(names)}){shared}{ways if len(devices) > 1 else ''}{trial}"


def tried_out(devices: Sequence[RankDevice]) -> str:
    """Say what NCCL between ranks that share a GPU shows."""
    turns = "" if all(device.mps for device in devices) else (
        " Without MPS the ranks take turns on the GPU, and each call waits for everybody's turn: right, but slow. "
        "`shardlab run --mps` lets them compute at the same time")
    return ("NCCL lets ranks share a GPU to be tried out: which calls are made, in which order, and what they compute "
            f"is as on several GPUs; how long they take is not.{turns}")


def counted(devices: Sequence[RankDevice]) -> str:
    """Return how many GPUs there are, in words."""
    gpus = {device.gpu for device in devices}
    return f"{len(gpus)} GPUs" if len(gpus) > 1 else "1 GPU"
