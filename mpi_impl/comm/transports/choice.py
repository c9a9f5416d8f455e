"""The choice of a transport for each array. Of arrays on GPUs, comm/device.py has decided, once for a run, whether NCCL
moves them.
"""
from functools import cached_property
from typing import Any

from mpi4py import MPI

from mpi_impl.comm.instruments import Instruments
from mpi_impl.comm.transports.halves import HalvesTransport
from mpi_impl.comm.transports.mpi import MPITransport
from mpi_impl.comm.transports.nccl import NcclTransport
from mpi_impl.comm.transports.shared_memory import SharedMemoryTransport
from mpi_impl.comm.transports.staging import PinnedStaging, StagedPosts, StagedTransport
from mpi_impl.comm.transports.transport import LoneRank, Transport
from mpi_impl.runtime.arrays import on_device


class Transports:
    """The transports of one group, the preferred ones first."""

    def __init__(self, comm: MPI.Intracomm, instruments: Instruments):
        self.comm, self.instruments = comm, instruments
        self.mpi = MPITransport(comm)
        self.first: list[Transport] = [LoneRank()] if comm.size == 1 else []
        self.by_mpi: list[Transport] = [HalvesTransport(self.mpi), self.mpi]
        self.on_host = [*self.first, SharedMemoryTransport(comm), *self.by_mpi]

    @cached_property
    def on_device(self) -> list[Transport]:
        """Return the transports of arrays on a device. A run chooses its path before it makes the first such array."""
        from mpi_impl.comm.transports.exact import ExactTransport  # with the arithmetic of proofs

        staging, nccl = self.instruments.device_path
        collectives = [NcclTransport(nccl, self.comm)] if nccl else []
        rest = [StagedTransport(staging, self.choose)] if staging else [
            StagedPosts(PinnedStaging(), self.choose), *self.by_mpi]
        return [*self.first, ExactTransport(self.comm), *collectives, *rest]

    def choose(self, kind: type, x) -> Any:
        """Return the first transport of a kind (Collectives, PostedCollectives or PointToPoint) that takes x.

        For a collective all ranks ask, and choose the same.
        """
        for transport in self.on_device if on_device(x) else self.on_host:
            if isinstance(transport, kind) and transport.takes(x):
                return transport
        raise AssertionError("MPI takes every array")

    def free(self) -> None:
        """Give back what the transports hold. Called by all ranks."""
        for transport in [*self.on_host, *vars(self).get("on_device", [])]:
            transport.free()
