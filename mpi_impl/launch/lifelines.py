"""Lifelines: connections by which the launcher notices that a node of Slurm is lost.

srun waits until Slurm notices, which takes minutes; so do the ranks on other nodes, in MPI. So one rank on each node
connects to the launcher, and says farewell when it ends. A connection that breaks without a farewell means that the
node is lost.
"""
import os
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PORT = "SHARDLAB_LIFELINE_PORT"     # where the launcher tells ranks its port
FAREWELL = b"\n"
SECONDS_TO_CONNECT = 5
SECONDS_TO_REPORT = 10              # that srun gets to end by itself, if a rank has failed, and not its node

# A node without power says nothing: the system asks after 5 silent seconds, and gives up after three questions.
KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class Lifelines:
    """The launcher's ends of all lifelines. What each has received is its node's name, and then the farewell."""

    def __init__(self):
        self.server, self.selector = socket.create_server(("", 0)), selectors.DefaultSelector()
        self.selector.register(self.server, selectors.EVENT_READ)
        self.broken: list[tuple[float, str]] = []       # when, and whose

    def settings(self) -> dict[str, str]:
        """Return the variable from which ranks learn the port."""
        return {PORT: str(self.server.getsockname()[1])}

    def lost(self) -> list[str]:
        """Return the nodes that have been lost for a while."""
        while ready := self.selector.select(0):
            for key, _ in ready:
                if key.data is None:
                    self.accept()
                elif text := receive(key.fileobj):
                    key.data.extend(text)
                else:
                    self.end(key)
        return [name for since, name in self.broken if time.monotonic() - since > SECONDS_TO_REPORT]

    def accept(self) -> None:
        """Accept a lifeline. With too many open files, the other nodes go without."""
        try:
            line, _ = self.server.accept()
        except OSError:
            self.selector.unregister(self.server)
            return
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE.items():
            with suppress(AttributeError):      # not on this system
                line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.selector.register(line, selectors.EVENT_READ, bytearray())

    def end(self, key: selectors.SelectorKey) -> None:
        """Close a lifeline that has ended, and note a loss. A stranger, who says nothing, is not a node."""
        self.selector.unregister(key.fileobj)
        key.fileobj.close()     # type: ignore[union-attr]
        if key.data and not key.data.endswith(FAREWELL):
            self.broken.append((time.monotonic(), key.data.decode(errors="replace")))


def receive(line) -> bytes:
    """Return what has come, or nothing if the connection has ended in whichever way."""
    with suppress(OSError):
        return line.recv(256)
    return b""


@contextmanager
def lifeline() -> Iterator[None]:
    """Hold this node's lifeline inside, if this is the rank that does so. Without one, as behind a firewall, it is
    Slurm that notices the loss of a node.
    """
    line = None
    if PORT in os.environ and os.environ.get("SLURM_LOCALID") == "0":
        with suppress(OSError, KeyError, ValueError):
            launcher = (os.environ["SLURM_LAUNCH_NODE_IPADDR"], int(os.environ[PORT]))
            line = socket.create_connection(launcher, SECONDS_TO_CONNECT)
            line.sendall(os.environ["SLURMD_NODENAME"].encode())
    try:
        yield
    finally:
        if line:
            with suppress(OSError):
                line.sendall(FAREWELL)
