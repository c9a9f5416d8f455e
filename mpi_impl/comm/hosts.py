"""The hosts of a run: which ranks are on which, and how much of their traffic crosses from one to another.

Inside a host ranks share memory, or the fastest links; between hosts there is a network. With Megatron's order of ranks
(topology.py), and hosts that are filled one after the other, the ranks that share a layer are on one host as long as t
divides the number of ranks on each.
"""
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MOST = 8        # hosts that are listed by name


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run. By default all ranks are on one."""

    of: Mapping[int, int] = field(default_factory=dict)     # the host's number of each rank of the world, in order
    names: tuple[str, ...] = ()                             # the hosts' names

    @property
    def several(self) -> bool:
        return len(self.names) > 1

    def crossing(self, operation: str, ranks: Sequence[int], root: int = 0) -> float | None:
        """Return the share of a collective over these ranks of the world that crosses; None on one host."""
        return crossing(operation, [self.of[rank] for rank in ranks], root) if self.several else None

    def describe(self, t: int) -> str:
        """Describe where the ranks are, with a warning if that is slower than it need be; "" on one host."""
        return "\n".join(filter(None, [self.counted(), self.warning(t)])) if self.several else ""

    def counted(self) -> str:
        """Describe how many hosts there are, and how many ranks each has."""
        found = Counter(self.of.values())
        counts = [found[host] for host in range(len(self.names))]
        if len(self.names) > MOST:
            least = f"{min(counts)} to " if len(set(counts)) > 1 else ""
            return f"on {len(self.names)} hosts of {least}{ranks_in_words(max(counts))} each"
        listed = (f"{ranks_in_words(count)} on {name}" for name, count in zip(self.names, counts))
        return f"on {len(self.names)} hosts: {', '.join(listed)}"

    def warning(self, t: int) -> str:
        """Return a warning if tensor-parallel groups of t neighbours are split between hosts; else ""."""
        hosts = list(self.of.values())
        if not (split := split_groups(hosts, t)):
            return ""
        whole = max(size for size in range(1, t) if t % size == 0 and not split_groups(hosts, size))
        smaller = f"--tensor-model-parallel-size {whole}, with which none is, or " if whole > 1 else ""
        return (f"warning: {split} of {len(hosts) // t} tensor-parallel groups of {t} ranks split between hosts: each "
                "layer sends 8 b s h (t-1)/t elements a microbatch, and waits for the network between hosts each time. "
                f"Choose {smaller}a host file whose slots are multiples of {t}.")


def ranks_in_words(n: int) -> str:
    """Return '1 rank' or '2 ranks'."""
    return f"{n} rank{'s' * (n > 1)}"


def crossing(operation: str, hosts: Sequence[int], root: int = 0) -> float:
    """Return the share of a group's traffic that goes from one host to another; `hosts` has each rank's, in order.

    It is a count of a ring's edges. A ring leads from each rank to the next and from the last to the first, and every
    edge carries the same number of bytes: so (edges between hosts)/n of the group's traffic crosses, and that is the
    mean over its ranks. A broadcast begins at its root and does without the one edge that leads back there.
    (MPI may choose trees instead. NCCL orders its rings so that each host is entered once and left once: that is this
    ring, where hosts are filled one after the other.) In an all-to-all every rank sends as much to each other one.
    """
    if operation in ("all_to_all", "all_to_all_rows"):
        n = len(hosts)      # and all pairs of them are n^2
        return (n * n - sum(here * here for here in Counter(hosts).values())) / max(n * n - n, 1)
    edges = [(hosts[i - 1], hosts[i]) for i in range(len(hosts)) if operation != "broadcast" or i != root]
    return sum(source != target for source, target in edges) / max(len(edges), 1)


def split_groups(hosts: Sequence[int], t: int) -> int:
    """Return how many groups of t neighbours are on more than one host."""
    return sum(len(set(hosts[first:first + t])) > 1 for first in range(0, len(hosts), t))
