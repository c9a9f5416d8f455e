"""Where the ranks compute: each on a CPU core, or on a CUDA GPU, by CuPy; and how their arrays get from GPU to GPU."""
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpi_impl.comm.group import Group
from mpi_impl.comm.mpi_library import library, reads_devices
from mpi_impl.comm.transports.nccl import NCCL
from mpi_impl.comm.transports.staging import BACKENDS, DevicePath, PinnedStaging
from mpi_impl.comm.watchdog import listed
from reference.errors import UserError
from reference.params import HOST

WITHOUT = "or leave --device out, to compute on CPU cores."
UNFORCED = "or leave --distributed-backend out, and what is there is used."


class Device(NamedTuple):
    """What a rank computes on."""

    like: Any                           # an empty array of the library that its arrays shall belong to
    description: str                 # for a person; "" for CPU cores
    path: DevicePath = DevicePath()     # of its arrays, to other ranks
    memory: "Memory | None" = None      # its own; None if it is the machine's
    gpus: Sequence[str] = ()            # the names of all GPUs of the run, each once


class Memory(NamedTuple):
    """That is to be had."""

    where: str      # no two GPUs in the world have the same
    size: int       # bytes that are free


class Seat(NamedTuple):
    """What a rank finds where it computes."""

    gpu: str                # as above
    name: str               # of such GPUs
    nccl: bool              # whether CuPy has NCCL
    mpi: bool               # whether MPI is CUDA-aware


def device_of(name: str, ranks: Group, backend: str | None = None) -> Device:
    """This rank's device, called by all ranks. A rank takes the GPU of its number on its machine; where there are more
    ranks than GPUs, some share one. `backend` is one of BACKENDS, if it shall not be chosen here.

    Raises UserError, on all ranks alike, if one of them has no CuPy or no GPU, or cannot use the backend.
    """
    if name == "cpu":
        return Device(HOST, "")
    local, _ = ranks.place_on_machine()
    gpus = ranks.collect_objects(gpus_here, "which GPUs there are")
    index = local % len(gpus[ranks.rank])
    gpu, model = gpus[ranks.rank][index]
    seats = ranks.allgather_objects(Seat(gpu, model, has_nccl(), reads_devices()))
    backend = backend_of(seats, backend)
    import cupy
    cupy.cuda.Device(index).use()
    free, _ = cupy.cuda.runtime.memGetInfo()
    names = {seat.gpu: seat.name for seat in seats}
    return Device(cupy.empty(0), describe(seats, backend), path_of(seats, backend), Memory(gpu, free),
                  list(names.values()))


def gpus_here() -> list[tuple[str, str]]:
    """Which GPUs this machine lets a rank see, each with its name. Raises UserError if there are none, or nothing to
    use them with.
    """
    try:
        import cupy
    except ImportError as error:
        problem = "that is not installed" if error.name == "cupy" else f"that cannot be loaded ({error})"
        raise UserError(f"--device is cuda, which needs CuPy, and {problem}. Install it into this environment, as in "
                        "`pip install 'cupy-cuda12x[ctk]'` (or cupy-cuda13x, whichever CUDA the machine has), "
                        f"{WITHOUT}") from None
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise UserError(f"--device is cuda, but CUDA finds no GPU on this machine ({error}). Start the run where there "
                        f"is one, {WITHOUT}") from None
    # By its address on the machine's bus: for a rank that may see one of them only, that is number 0.
    return [(f"{socket.gethostname()} {runtime.deviceGetPCIBusId(i)}",
             runtime.getDeviceProperties(i)["name"].decode()) for i in range(count)]


def has_nccl() -> bool:
    from cupy.cuda import nccl
    return nccl.available


# ---- how their arrays get from GPU to GPU ---------------------------------------------------------------------------


def backend_of(seats: Sequence[Seat], asked: str | None) -> str:
    """Of BACKENDS; the same on all ranks. Raises UserError if the one that is asked for cannot be used."""
    problems = {"nccl": without_nccl(seats), "mpi": without_mpi(seats), "staged": ""}
    if asked is None:
        return next(name for name in BACKENDS if not problems[name])
    if problems[asked]:
        raise UserError(f"--distributed-backend is {asked}, {problems[asked]}, {UNFORCED}")
    return asked


def without_nccl(seats: Sequence[Seat]) -> str:
    """Why NCCL cannot be used, and what would help; "" if it can."""
    for seat in seats:
        sharing = [rank for rank, other in enumerate(seats) if other.gpu == seat.gpu]
        if len(sharing) > 1:
            return (f"which needs a GPU for each rank, but {listed(sharing)} share one. Start a rank for each of the "
                    f"{counted(seats)}")
    lacking = [rank for rank, seat in enumerate(seats) if not seat.nccl]
    if lacking:
        return (f"but CuPy finds no NCCL on {listed(lacking)}. Install it into this environment, as in `pip install "
                "nvidia-nccl-cu12` (or nvidia-nccl-cu13, whichever CUDA CuPy was made for)")
    return ""


def without_mpi(seats: Sequence[Seat]) -> str:
    """The same of MPI, on GPUs."""
    if all(seat.mpi for seat in seats):
        return ""
    return f"but {library()} is not CUDA-aware: it cannot read a GPU's memory. Use an MPI that was built so"


def path_of(seats: Sequence[Seat], backend: str) -> DevicePath:
    """Return the path of this rank's arrays, once it has chosen its GPU. Beside NCCL, MPI has the rank's messages."""
    direct = backend != "staged" and not without_mpi(seats)
    return DevicePath(None if direct else PinnedStaging(), NCCL() if backend == "nccl" else None)


def describe(seats: Sequence[Seat], backend: str) -> str:
    gpus, names = counted(seats), sorted({seat.name for seat in seats})
    shared = f", which {len(seats)} ranks share" if len(seats) > len({seat.gpu for seat in seats}) else ""
    by_mpi = "through pinned host memory" if backend == "staged" or without_mpi(seats) else "by MPI, from GPU to GPU"
    ways = f"; collectives go by NCCL, messages {by_mpi}" if backend == "nccl" else f"; messages go {by_mpi}"
    return f"computing on {gpus} ({', '.join(names)}){shared}{ways if len(seats) > 1 else ''}"


def counted(seats: Sequence[Seat]) -> str:
    gpus = {seat.gpu for seat in seats}
    return f"{len(gpus)} GPUs" if len(gpus) > 1 else "1 GPU"
