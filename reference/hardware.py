"""What a device does in a second, as numbers: matrix products, what goes through its memory, messages to others.

A profile is data: a file of mpi_impl/planning/hardware/, or what benchmarks/calibrate.py has measured. From it and from
a plan reference/step_time.py says how long a step takes.
"""
from bisect import bisect
from dataclasses import dataclass
from math import ceil, log
from typing import NamedTuple

from reference.cost import RING
from reference.errors import UserError


@dataclass(frozen=True)
class Link:
    """How long a message takes from one device to another: by default as over 200 Gb/s InfiniBand."""

    latency: float = 5e-6        # seconds
    bandwidth: float = 25e9      # bytes a second

    def seconds(self, operation: str, ranks: int, size: float) -> float:
        """For `size` bytes in one message, or in a collective of so many ranks that runs as a ring."""
        turns = {"send": 1, "all_reduce": 2 * (ranks - 1)}.get(operation, ranks - 1)
        return turns * self.latency + RING[operation](size, ranks) / self.bandwidth


@dataclass(frozen=True)
class Passes:
    """How often an element goes through memory, read or written, in what is no matrix product: (forward, backward).

    A kernel that computes for longer than it reads and writes counts as so many more passes.
    """

    outside: tuple[float, float]     # of [b, s, h], for a layer: norms, dropout, residual sums
    inside: tuple[float, float]      # of [b, s, h/t], for a layer: biases, copies of heads; GELU, of 4h/t columns
    scores: tuple[float, float]      # of [b, a/t, s, s], for a layer: scale, mask, softmax and dropout
    embedding: tuple[float, float]   # of [b, s, h]: tables, dropout, and the gradient of the table
    logits: tuple[float, float]      # of [b, s, V/t]: cross-entropy


@dataclass(frozen=True)
class Hardware:
    """A kind of device, how many of them are in a server, and how well a program uses them. Times are in seconds."""

    name: str
    about: str                                   # what it is, and where the numbers come from
    peak: float                                  # FLOP/s of matrix products, as its maker says
    memory: float                                # bytes
    reserved: float                              # bytes of these that no model gets
    bandwidth: float                             # bytes a second to and from its memory, as is reached
    element_bytes: int                           # of parameters, gradients, activations and messages
    efficiency: tuple[tuple[float, float], ...]  # of products: size, share of the peak; see `size_of_product`
    attention: tuple[float, float]               # share of the peak in attention's own products, forward and backward
    passes: Passes
    optimizer: float                             # bytes through memory that a step of Adam takes, for each parameter
    overhead: tuple[float, float]                # of a layer, forward and backward, however small it is
    server: int                                  # devices in one
    inside: Link                                 # between two devices of a server
    between: Link                                # between servers: the bandwidth is a server's, which its devices share
    hidden: float = 0.0                          # share of the replicas' messages that passes while a rank computes
    jitter: float = 0.0                          # standard deviation of a replica's time for a step, as a share of it

    def __post_init__(self):
        for name in ("peak", "memory", "bandwidth", "element_bytes", "server"):
            if not getattr(self, name) > 0:
                raise UserError(f"The hardware's {name} is {getattr(self, name)}, but must be above 0.")
        if not self.memory > self.reserved >= 0:
            raise UserError(f"The hardware's reserved is {self.reserved:g} bytes, but must be at least 0, and less "
                            f"than its memory, {self.memory:g}.")
        sizes = [size for size, _ in self.efficiency]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] <= 0 or any(share <= 0 for _, share in self.efficiency):
            raise UserError("The hardware's efficiency is a list of [size, share of the peak], from small sizes to "
                            f"large ones, and all above 0, but it is {self.efficiency}.")
        for link in (self.inside, self.between):
            if not (link.bandwidth > 0 and link.latency >= 0):
                raise UserError(f"The hardware has a link with {link}, but a bandwidth must be above 0, and a latency "
                                "not below.")

    def share_of_peak(self, size: float) -> float:
        """That products of this size reach: between two sizes of the table, on a line over the logarithm."""
        sizes = [size for size, _ in self.efficiency]
        i = bisect(sizes, size)
        if i in (0, len(sizes)):
            return self.efficiency[min(i, len(sizes) - 1)][1]
        (left, low), (right, high) = self.efficiency[i - 1:i + 1]
        return low + (high - low) * log(size / left) / log(right / left)

    def product(self, n: int, k: int, m: int) -> float:
        """Seconds of [n, k] @ [k, m]."""
        return 2 * n * k * m / (self.peak * self.share_of_peak(size_of_product(n, k, m)))

    def stream(self, elements: float, passes: float) -> float:
        """Seconds in which so many elements go so often through memory."""
        return elements * passes * self.element_bytes / self.bandwidth


def size_of_product(n: int, k: int, m: int) -> float:
    """The side of the square product that has as many FLOPs for each element: 3 / (1/n + 1/k + 1/m).

    [n, k] @ [k, m] takes 2 n k m FLOPs, and n k + k m + n m elements are read and written. A narrow product is as
    slow as a small one.
    """
    return 3 / (1 / n + 1 / k + 1 / m)


# ---- who is where ---------------------------------------------------------------------------------------------------


class Spread(NamedTuple):
    """Of a group of ranks: the fewest that a server has of it, and how many servers."""

    together: int
    servers: int


def spread(ranks: int, stride: int, server: int) -> Spread:
    """A group of so many ranks, each `stride` behind the one before, where servers have so many ranks each.

    Where strides and servers do not divide one another, groups are cut in different ways, and the worst counts.
    """
    reach = ranks * stride
    if reach <= server and server % reach == 0:
        return Spread(ranks, 1)
    together = max(1, min(ranks, server // stride))
    return Spread(together, ceil(ranks / together))


def collective(hardware: Hardware, operation: str, ranks: int, stride: int, size: float) -> float:
    """Seconds of a collective over `size` bytes, where all groups of the world do the same at once.

    Inside a server every device has links of its own. Between servers a group's ring leaves each of them once,
    whatever its members there, and the rings of all groups that the server has members of share what it has.
    """
    if ranks == 1:
        return 0.0
    together, servers = spread(ranks, stride, hardware.server)
    within = hardware.inside.seconds(operation, ranks, size)
    if servers == 1:
        return within
    rings = max(1, hardware.server // together)
    shared = Link(hardware.between.latency, hardware.between.bandwidth / rings)
    return max(within, shared.seconds(operation, servers, size))


def message(hardware: Hardware, stride: int, size: float) -> float:
    """Seconds of `size` bytes to the rank that is `stride` further, where all of a server send at once."""
    if stride < hardware.server:
        return hardware.inside.seconds("send", 2, size)
    outside = hardware.between
    return outside.latency + size * hardware.server / outside.bandwidth
