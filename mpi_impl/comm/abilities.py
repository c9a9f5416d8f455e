"""Trials of what Shardlab uses of MPI, beyond messages and sums of NumPy's arrays. The ranks of a group make them.

A trial reports on each rank whether it worked there. An MPI that lacks it may also fail in any way, or wait forever: so
`shardlab doctor` gives each trial ranks of its own, and a time limit (launch/trial.py).
"""
import threading
import time

import numpy as np
from mpi4py import MPI

from mpi_impl.comm.group import Group
from mpi_impl.comm.mpi_library import reads_devices
from mpi_impl.comm.transports.shared_memory import SharedMemoryTransport

FOR_THREAD, FOR_MAIN = 1, 2     # tags


def threads(group: Group) -> bool:
    """Let a thread receive and answer while the main thread waits in MPI for what only comes after that answer."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return False
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size

    def pass_on() -> None:
        time.sleep(0.2)     # the main thread waits by now
        group.comm.Send(bytes(1), after, FOR_THREAD)
        group.comm.Recv(bytearray(1), before, FOR_THREAD)
        group.comm.Send(bytes(1), after, FOR_MAIN)

    thread = threading.Thread(target=pass_on)
    thread.start()
    group.comm.Recv(bytearray(1), before, FOR_MAIN)
    thread.join()
    return True


def shared_memory(group: Group) -> bool:
    """Add up in memory that all ranks of this machine read and write."""
    transport, x = SharedMemoryTransport(group.comm), np.full(1000, group.rank + 1.0)
    if not transport.takes(x):
        return False
    transport.all_reduce(x, "sum")
    return bool((x == sum(range(1, group.size + 1))).all())


def device_memory(_: Group) -> bool:
    """Ask MPI whether it reads a GPU's memory, which a machine without one cannot try."""
    return reads_devices()


TRIALS = {trial.__name__: trial for trial in (threads, shared_memory, device_memory)}
