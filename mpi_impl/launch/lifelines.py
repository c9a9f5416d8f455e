"""Lifelines: connections by which the launcher notices that a node of Slurm is lost.

srun waits until Slurm notices, which takes minutes; so do the ranks on other nodes, in MPI. So one rank on each node
connects to the launcher, and says farewell when it ends. A connection that breaks without a farewell means that the
node is lost.
"""
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread

PORT = "SHARDLAB_LIFELINE_PORT"     # where the launcher tells ranks its port
FAREWELL = b"\n"
SECONDS_TO_CONNECT = 5
SECONDS_TO_REPORT = 10              # that srun gets to end by itself, if a rank has failed, and not its node


class Lifelines:
    """The launcher's ends of all lifelines."""

    def __init__(self):
        self.server = socket.create_server(("", 0), backlog=4096)
        self.server.setblocking(False)
        self.settings = {PORT: str(self.server.getsockname()[1])}   # from which ranks learn the port
        self.lost: list[str] = []       # nodes, after srun has had its time

    def accept(self) -> None:
        """Accept all that are new, each in a thread."""
        with suppress(OSError):     # no other is new; or too many files are open, and nodes go without
            while True:
                Thread(target=self.hold, args=self.server.accept()[:1], daemon=True).start()

    def hold(self, line: socket.socket) -> None:
        """Receive the node's name, and then the farewell. A node without power says nothing: the system asks after 5
        silent seconds, and gives up after three questions.
        """
        received = b""
        with suppress(OSError), line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}.items():
                line.setsockopt(socket.IPPROTO_TCP, name, value)
            while more := line.recv(256):
                received += more
        if received and not received.endswith(FAREWELL):    # a stranger says nothing
            time.sleep(SECONDS_TO_REPORT)
            self.lost.append(received.decode(errors="replace"))


@contextmanager
def lifeline() -> Iterator[None]:
    """Hold this node's lifeline inside, if this is the rank that does so. Where it cannot connect, as behind a
    firewall, it is Slurm that notices the loss of a node.
    """
    line = None
    if PORT in os.environ and os.environ.get("SLURM_LOCALID") == "0":
        with suppress(OSError):
            launcher = os.environ["SLURM_LAUNCH_NODE_IPADDR"], int(os.environ[PORT])
            line = socket.create_connection(launcher, SECONDS_TO_CONNECT)
            line.sendall(os.environ["SLURMD_NODENAME"].encode())
    try:
        yield
    finally:
        if line:
            with suppress(OSError):
                line.sendall(FAREWELL)
