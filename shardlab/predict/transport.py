"""Calls between imagined ranks: each is recorded, and returns immediately."""
from collections.abc import Mapping
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from mpi_impl.comm.transports.transport import AllToAll, Collectives, LoneRank, PointToPoint, PostedCollectives, Request
from reference.costs.hardware import RankGroup, collective_time, slowest_link
from shardlab.predict.meta import is_meta
from shardlab.predict.meta_device import MetaDevice


class Event(NamedTuple):
    """Something that a rank does with others."""

    kind: str                   # 'collective', 'post', 'send', 'receive', 'wait'
    group: str                  # its name
    ranks: tuple[int, ...]      # of the world, in the order of the group; of a message: its sender and its receiver
    call: str                   # the operation; of a message: its tag
    form: str                   # what is sent: the number of elements and their dtype
    reason: str                 # as the ledger has it
    number: int                 # of what was posted, on this rank; waits name it

    def __str__(self):
        return f"{self.call} of {self.form} ({self.reason})"


class Diary:
    """The events of one rank, in order, and the seconds that they take by a profile."""

    def __init__(self, device: MetaDevice, world: int, arrivals: Mapping[str, float]):
        """Take the world's size, and when messages of a pipeline arrive; others do as soon as they can."""
        self.device, self.world, self.arrivals = device, world, arrivals
        self.events: list[Event] = []
        self.groups: list[str] = []     # that the rank has formed, by name
        self.numbers = count()
        self.free = dict[tuple[str, str], float]()      # when the last call of a kind that a group has posted is over

    def seconds(self, operation: str, ranks: tuple[int, ...], nbytes: int) -> float:
        """Return the time of a call on the slowest of its links."""
        if self.device.hardware is None or len(ranks) < 2:
            return 0.0
        group = RankGroup(len(ranks), abs(ranks[1] - ranks[0]), self.world)
        if operation == "send":
            return slowest_link(self.device.hardware, group).seconds("send", 2, nbytes)
        return collective_time(self.device.hardware, operation, group, nbytes)

    def post(self, event: Event, operation: str, nbytes: int) -> Request:
        """Write down a call that goes on in the background, after those of its kind that its group has posted before:
        messages to several ranks share the sender's link, and those from several the receiver's.
        """
        self.events.append(event)
        before = self.free.get((event.kind, event.group), 0.0)
        over = max(self.device.seconds, before) + self.seconds(operation, event.ranks, nbytes)
        self.free[event.kind, event.group] = over
        return Request(lambda: True, partial(self.wait, event, over), None)

    def wait(self, event: Event, over: float) -> None:
        self.events.append(event._replace(kind="wait"))
        if (event.kind, event.group) == ("receive", "pipeline"):
            over = self.arrivals.get(event.call, over)
        self.device.seconds = max(self.device.seconds, over)


class RecordingTransport(Collectives, AllToAll, PointToPoint, PostedCollectives):
    """One group's calls. Of arrays with data, the others are assumed to have the same as this rank."""

    def __init__(self, diary: Diary, name: str, ranks: tuple[int, ...], rank: int):
        self.diary, self.name, self.ranks, self.rank = diary, name, ranks, rank
        self.reason = ""        # of the call under way
        self.lone = LoneRank()

    def choose(self, kind: type, x) -> Any:
        """Return a transport for any array (choice.py)."""
        return self if len(self.ranks) > 1 else self.lone

    def event(self, kind: str, call: str, x, ranks=None, elements=None) -> Event:
        form = f"{x.size if elements is None else elements:,} {x.dtype}"
        return Event(kind, self.name, ranks or self.ranks, call, form, self.reason, next(self.diary.numbers))

    def collective(self, operation: str, x, whole) -> None:
        self.diary.events.append(self.event("collective", operation, whole))
        self.diary.device.seconds += self.diary.seconds(operation, self.ranks, whole.nbytes)

    def all_reduce(self, x, op):
        self.collective("all_reduce", x, x)
        if not is_meta(x) and op == "sum":
            x *= len(self.ranks)

    def all_gather(self, x, out, axis):
        self.collective("all_gather", x, out)
        if not is_meta(x):
            out[...] = x.repeat(len(self.ranks), axis)

    def reduce_scatter(self, x, out, axis):
        self.collective("reduce_scatter", x, x)

    def broadcast(self, x, root):
        self.collective("broadcast", x, x)

    def all_to_all_rows(self, x, sent, out, received):
        self.diary.events.append(self.event("collective", "all_to_all_rows", x, elements=0))
        travelling = (sum(sent) - sent[self.rank]) * x[:1].nbytes        # this rank's own rows do not
        self.diary.device.seconds += self.diary.seconds("all_to_all_rows", self.ranks, travelling)

    def post(self, operation, x, out, sizes=None):
        whole = x if x.size > out.size else out
        return self.diary.post(self.event("post", operation, whole), operation, whole.nbytes)

    def post_send(self, x, to, tag):
        event = self.event("send", f"message {tag // 2}", x, (self.ranks[self.rank], self.ranks[to]))
        return self.diary.post(event, "send", x.nbytes)

    def post_receive(self, x, source, tag):
        event = self.event("receive", f"message {tag // 2}", x, (self.ranks[source], self.ranks[self.rank]))
        return self.diary.post(event, "send", x.nbytes)
