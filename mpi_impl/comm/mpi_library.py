"""The MPI library that this process uses, and facts about its world."""
import atexit
import ctypes
from functools import cache

from mpi4py import MPI

CUDA = 0        # MPIX_GPU_SUPPORT_CUDA


def start() -> None:
    """Start MPI if it has only been loaded: the caller of a pool loads it, to ask for its name."""
    if not MPI.Is_initialized():
        MPI.Init_thread()
        atexit.register(MPI.Finalize)


def library() -> str:
    """Return the name and the version, as in 'Some MPI 5.0.2'."""
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def reads_devices() -> bool:
    """Report whether this MPI is CUDA-aware: whether it reads and writes device memory by itself.

    MPIs have the first of these functions, the second, or both.
    """
    mpi, supported = ctypes.CDLL(MPI.__file__), ctypes.c_int(0)
    if (query := getattr(mpi, "MPIX_GPU_query_support", None)) is not None:
        query(CUDA, ctypes.byref(supported))
    query = getattr(mpi, "MPIX_Query_cuda_support", None)
    return bool(supported.value or query and query())


def largest_tag() -> int:
    """Return the largest number for an array's tag: even tags of MPI's are for arrays, odd ones for their stamps."""
    return (MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) // 2 - 1      # which the world alone knows


@cache
def attribute_key(name: str) -> int:
    """Return the key under which communicators hold what all groups over them share."""
    return MPI.Comm.Create_keyval()


def place_on_machine(comm: MPI.Intracomm) -> tuple[int, int]:
    """Return this rank's number among the communicator's ranks on its machine, and their count. All ranks call this.

    There is no time limit, since a caller inside of a collective has one already.
    """
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    place = here.rank, here.size
    here.Free()
    return place


def make_progress() -> None:
    """Let MPI move what any group has posted: it does so only inside its calls, so this is one that asks for nothing.
    (Imagined ranks post nothing, and MPI need not have started.)
    """
    if MPI.Is_initialized():
        MPI.COMM_WORLD.Iprobe()


def abort(status: int) -> None:
    """End every rank of the world immediately, with this exit status."""
    MPI.COMM_WORLD.Abort(status)
