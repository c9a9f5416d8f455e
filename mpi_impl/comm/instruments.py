"""The instruments that watch a rank's communication."""
from dataclasses import dataclass, field
from typing import Any

from mpi_impl.comm.hosts import Hosts
from mpi_impl.comm.ledger import Ledger
from mpi_impl.comm.trace import Trace
from mpi_impl.comm.transports.staging import DevicePath
from mpi_impl.comm.watchdog import Watchdog
from reference.params import HOST


@dataclass
class Instruments:
    """Instruments that all groups of a rank share, its device, the path of arrays there, and the hosts of all."""

    ledger: Ledger = field(default_factory=Ledger)
    trace: Trace = field(default_factory=Trace)
    watchdog: Watchdog = field(default_factory=Watchdog)
    like: Any = field(default_factory=lambda: HOST)     # an empty array of the library that its arrays belong to
    device_path: DevicePath = DevicePath()
    hosts: Hosts = field(default_factory=Hosts)
    compare_calls: bool = True      # of all ranks, which takes a message each: agreement.py
