"""The instruments that watch a rank's communication."""
from dataclasses import dataclass, field

from mpi_impl.comm.hosts import Hosts
from mpi_impl.comm.ledger import Ledger
from mpi_impl.comm.trace import Trace
from mpi_impl.comm.transports.staging import DevicePath
from mpi_impl.comm.watchdog import Watchdog


@dataclass
class Instruments:
    """Instruments that all groups of a rank share, the path of its arrays on a device, and the hosts of all ranks."""

    ledger: Ledger = field(default_factory=Ledger)
    trace: Trace = field(default_factory=Trace)
    watchdog: Watchdog = field(default_factory=Watchdog)
    device_path: DevicePath = DevicePath()
    hosts: Hosts = field(default_factory=Hosts)
    compare_calls: bool = True      # of all ranks, which takes a message each: agreement.py
