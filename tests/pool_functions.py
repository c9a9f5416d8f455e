"""Functions that the tests of the pool run on ranks, with few imports, since the ranks start again and again."""
import ctypes
import os
import signal
import sys
import time

import numpy as np

from mpi_impl.runtime.mpis import YIELDING


def where_and_what(group, *args):
    return group.rank, group.size, args


def sum_of_ranks(group):
    return group.all_reduce(np.array([float(group.rank)]), "test")[0], group.ledger.calls(reason="test")


def speak(group):
    print(f"rank {group.rank} speaks")
    print("... and warns", file=sys.stderr)


def the_environment(group):
    return os.environ.get("OPENBLAS_NUM_THREADS"), {name: os.environ[name] for name in YIELDING if name in os.environ}


def raise_on(group, culprit, kind):
    print(f"rank {group.rank} was here")
    if group.rank == culprit:
        raise kind("something that went wrong")
    return group.all_reduce(np.ones(1), "test")


def leave_a_message_behind(group):
    """Let rank 0 broadcast and return before rank 1 fails to receive."""
    if group.rank == 1:
        time.sleep(0.1)
        raise ValueError
    group.broadcast(np.array([666.0]), "test")


def broadcast_seven(group):
    return group.broadcast(np.array([7.0 if group.rank == 0 else 0.0]), "test")[0]


def skip_an_all_reduce(group, idler):
    if group.rank != idler:
        group.all_reduce(np.ones(4), "test")


def sleep_in_native_code(group):
    ctypes.PyDLL(None).sleep(60)


def die(group, how):
    if group.rank == 1:
        os._exit(3) if how == "exit" else os.kill(os.getpid(), getattr(signal, how))
    group.all_reduce(np.ones(1), "test")


def give_a_lambda(group):
    return lambda: None


def split_and_free(group, times):
    """Split off and free a subgroup this many times; return its size."""
    for _ in range(times):
        pair = group.split(group.rank // 2, "pair")
        size = pair.size
        pair.free()
    return size


def process_id(group):
    return os.getpid()
