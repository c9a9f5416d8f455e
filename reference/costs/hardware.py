"""Speeds of a device: matrix products, memory traffic, messages to others.

A profile is data: a file of shardlab/plan/hardware/, or the measurements of benchmarks/calibrate.py. With a plan it
gives the time of a step (reference/costs/step_time.py).
"""
from bisect import bisect
from collections import Counter
from dataclasses import dataclass, fields
from functools import cache
from math import inf, log
from typing import NamedTuple

from reference.comm.ring import Link
from reference.errors import UserError


@dataclass(frozen=True)
class Passes:
    """The number of passes of an element through memory outside of matrix products: (forward, backward).

    A kernel that computes for longer than it reads and writes counts as several more passes.
    """

    outside: tuple[float, float]     # of [b, s, h], for a layer: norms, dropout, residual sums
    inside: tuple[float, float]      # of [b, s, h/t], for a layer: biases, copies of heads; GELU, of 4h/t columns
    scores: tuple[float, float]      # of [b, a/t, s, s], for a layer: scale, mask, softmax and dropout
    embedding: tuple[float, float]   # of [b, s, h]: tables, dropout, and the gradient of the table
    logits: tuple[float, float]      # of [b, s, V/t]: cross-entropy


@dataclass(frozen=True)
class Sharded:
    """The part of the hardware that an implementation of ZeRO-3 reaches: by default all its links, and no overlap."""

    bandwidth: float = inf      # bytes a second, at most, that one group's gathers and scatters move out of a server
    hidden: float = 0.0         # share of their time that overlaps with computing, if a microbatch computes as long


@dataclass(frozen=True)
class Hardware:
    """A kind of device, the number in a server, and the efficiency of programs on them. Times are in seconds."""

    name: str
    about: str                                   # its description, and the source of the numbers
    peak: float                                  # FLOP/s of matrix products, by the data sheet
    memory: float                                # bytes
    reserved: float                              # bytes of these that no model can use
    bandwidth: float                             # bytes a second to and from its memory, as measured
    element_bytes: int                           # of parameters, gradients, activations and messages
    efficiency: tuple[tuple[float, float], ...]  # of products: size, share of the peak; see `size_of_product`
    attention: tuple[float, float]               # share of the peak in attention's own products, forward and backward
    passes: Passes
    optimizer: float                             # bytes through memory that a step of Adam takes, for each parameter
    overhead: tuple[float, float]                # of a layer of any size, forward and backward
    server: int                                  # devices in one
    inside: Link                                 # between two devices of a server
    between: Link                                # between servers: the bandwidth is a server's, which its devices share
    sharded: Sharded = Sharded()
    hidden: float = 0.0                          # as in `sharded`, of all other messages between replicas
    half: str = "fp16"                           # the 16 bits to train in, fp16 or bf16, where element_bytes is 2
    jitter: float = 0.0                          # standard deviation of a replica's time for a step, as a share of it

    def __post_init__(self):
        for name in ("peak", "memory", "bandwidth", "element_bytes", "server"):
            if not 0 < getattr(self, name) < inf:
                raise UserError(f"The hardware's {name} is {getattr(self, name)}, but must be a number above 0.")
        if self.half not in ("fp16", "bf16"):
            raise UserError(f"The hardware's half is {self.half!r}, but must be fp16 or bf16.")
        if self.server % 1:
            raise UserError(f"The hardware's server has {self.server} devices, but must have a whole number of them.")
        if not self.memory > self.reserved >= 0:
            raise UserError(f"The hardware's reserved is {self.reserved:g} bytes, but must be at least 0, and less "
                            f"than its memory, {self.memory:g}.")
        sizes = [size for size, _ in self.efficiency]
        positive = all(0 < x < inf for point in self.efficiency for x in point)
        if not sizes or sizes != sorted(set(sizes)) or not positive:
            raise UserError("The hardware's efficiency is a list of [size, share of the peak], from small sizes to "
                            f"large ones, and all above 0, but it is {self.efficiency}.")
        check_pair("attention", self.attention)
        if 0 in self.attention:
            raise UserError(f"The hardware's attention is {self.attention}, but must be above 0.")
        check_pair("overhead", self.overhead)
        for field in fields(Passes):
            check_pair(field.name, getattr(self.passes, field.name))
        if not (0 <= self.hidden <= 1 and 0 <= self.jitter < inf and 0 <= self.optimizer < inf):
            raise UserError(f"The hardware's hidden is {self.hidden}, its jitter {self.jitter} and its optimizer "
                            f"{self.optimizer}, but none may be below 0 or infinite, nor hidden above 1.")
        if not (self.sharded.bandwidth > 0 and 0 <= self.sharded.hidden <= 1):
            raise UserError(f"The hardware's sharded is {self.sharded}, but its bandwidth must be above 0, and its "
                            "hidden from 0 to 1.")
        for link in (self.inside, self.between):
            if not (link.bandwidth > 0 and 0 <= link.latency < inf):      # infinite: messages cost nothing
                raise UserError(f"The hardware has a link with {link}, but a bandwidth must be above 0, and a latency "
                                "not below.")

    def share_of_peak(self, size: float) -> float:
        """Interpolate the fraction of the peak for products of this size, linearly in the logarithm of the size."""
        sizes = [size for size, _ in self.efficiency]
        i = bisect(sizes, size)
        if i in (0, len(sizes)):
            return self.efficiency[min(i, len(sizes) - 1)][1]
        (left, low), (right, high) = self.efficiency[i - 1:i + 1]
        return low + (high - low) * log(size / left) / log(right / left)

    def product(self, n: int, k: int, m: int) -> float:
        """Return the seconds of [n, k] @ [k, m]."""
        return 2 * n * k * m / (self.peak * self.share_of_peak(size_of_product(n, k, m)))

    def stream(self, elements: float, passes: float) -> float:
        """Return the seconds in which `elements` go `passes` times through memory."""
        return elements * passes * self.element_bytes / self.bandwidth


def check_pair(name: str, pair: tuple[float, float]) -> None:
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(0 <= x < inf for x in pair)):
        raise UserError(f"The hardware's {name} is {pair}, but must be two numbers, [forward, backward], neither below "
                        "0.")


def size_of_product(n: int, k: int, m: int) -> float:
    """Return the side of the square product with the same FLOPs per element: 3 / (1/n + 1/k + 1/m).

    [n, k] @ [k, m] takes 2 n k m FLOPs, and n k + k m + n m elements are read and written. A narrow product is as slow
    as a small one.
    """
    return 3 / (1 / n + 1 / k + 1 / m)


# ---- placement of ranks ---------------------------------------------------------------------------------------------


class RankGroup(NamedTuple):
    """Groups of ranks in a world, all of one size, each rank `stride` behind the one before."""

    ranks: int
    stride: int
    world: int


@cache
def groups_that_leave(group: RankGroup, server: int) -> int:
    """Return the largest number of these groups that have members both in a server and outside it.

    Where sizes do not divide one another, groups are split in different ways: the busiest server counts.
    """
    found = Counter[int]()
    for first in range(0, group.world, group.ranks * group.stride):
        for start in range(first, first + group.stride):
            servers = {rank // server for rank in range(start, start + group.ranks * group.stride, group.stride)}
            found.update(servers if len(servers) > 1 else ())
    return max(found.values(), default=0)


def slowest_link(hardware: Hardware, group: RankGroup, limit: float = inf) -> Link:
    """Return the slowest link from member to member when all groups of the world communicate at the same time.

    Inside a server every device has links of its own. Traffic out of a server crosses once for each group that leaves
    it, whatever its members there, and these groups share the server's bandwidth: each reaches `limit` at most.
    """
    inside, between = hardware.inside, hardware.between
    if not (groups := groups_that_leave(group, hardware.server)):
        return inside
    return Link(max(inside.latency, between.latency), min(inside.bandwidth, between.bandwidth / groups, limit))


def collective_time(hardware: Hardware, operation: str, group: RankGroup, size: float, limit: float = inf) -> float:
    """Return the seconds for `size` bytes in a ring, which is as fast as its slowest link."""
    if group.ranks == 1:
        return 0.0
    return slowest_link(hardware, group, limit).seconds(operation, group.ranks, size)
