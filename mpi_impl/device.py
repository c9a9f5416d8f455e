"""Where the ranks compute: each on a CPU core, or on a CUDA GPU, by CuPy."""
import socket
from typing import Any, NamedTuple

from mpi_impl.comm.group import Group
from reference.errors import UserError
from reference.params import HOST

WITHOUT = "or leave --device out, to compute on CPU cores."


class Device(NamedTuple):
    """What a rank computes on."""

    like: Any       # an empty array of the library that its arrays shall belong to
    told: str       # for a person; "" of CPU cores


def device_of(name: str, ranks: Group) -> Device:
    """This rank's device, called by all ranks. A rank takes the GPU of its number on its machine; where there are more
    ranks than GPUs, some share one.

    Raises UserError, on all ranks alike, if one of them has no CuPy or no GPU.
    """
    if name == "cpu":
        return Device(HOST, "")
    with ranks.watchdog.waiting(ranks.name, "who is on which machine", ranks.others):
        local, _ = ranks.place_on_machine()
    gpus = ranks.from_each(names_of_gpus, "which GPUs there are")
    index = local % len(gpus[ranks.rank])
    used = ranks.from_all((socket.gethostname(), index, gpus[ranks.rank][index]))
    import cupy
    cupy.cuda.Device(index).use()
    return Device(cupy.empty(0), told(used))


def names_of_gpus() -> list[str]:
    """Of this machine. Raises UserError if there are none, or nothing to use them with."""
    try:
        import cupy
    except ImportError as error:
        problem = "that is not installed" if error.name == "cupy" else f"that cannot be loaded ({error})"
        raise UserError(f"--device is cuda, which needs CuPy, and {problem}. Install it into this environment, as in "
                        "`pip install cupy-cuda12x` (or cupy-cuda13x, whichever CUDA the machine has), "
                        f"{WITHOUT}") from None
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise UserError(f"--device is cuda, but CUDA finds no GPU on this machine ({error}). Start the run where there "
                        f"is one, {WITHOUT}") from None
    return [runtime.getDeviceProperties(i)["name"].decode() for i in range(count)]


def told(used: list[tuple[str, int, str]]) -> str:
    """`used` is the machine, the number there and the name of every rank's GPU."""
    gpus, names = set(used), sorted({name for _, _, name in used})
    several = f"{len(gpus)} GPUs" if len(gpus) > 1 else "1 GPU"
    shared = f", which {len(used)} ranks share" if len(used) > len(gpus) else ""
    return f"computing on {several} ({', '.join(names)}){shared}; messages go through host memory"
