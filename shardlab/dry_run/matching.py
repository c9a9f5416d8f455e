"""The events of several ranks, matched: every message has a receiver, and no rank waits forever.

Each rank goes through its events as far as it can. A rank that is not among them is taken to be ready. A wait for a
send is over when its receive has been posted: MPI need not buffer (a *rendezvous*), though it does for small messages,
which hides deadlocks until messages grow. All calls of a group but messages come in one order on all of its ranks.
"""
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardlab.predict.transport import Event


class GroupCall(NamedTuple):
    """A call of a group: on each of its ranks it must be the same."""

    group: str
    ranks: tuple[int, ...]
    number: int


class Mail(NamedTuple):
    """The messages of one kind from one rank to another, which arrive in the order in which they were sent."""

    group: str
    ranks: tuple[int, ...]
    call: str


class Matching:
    """Ranks on their way through their events."""

    def __init__(self, events: Mapping[int, Sequence[Event]]):
        self.events, self.at = events, dict.fromkeys(events, 0)
        self.arrived = defaultdict[GroupCall, dict[int, Event]](dict)       # by rank: who has come to a call
        self.calls = defaultdict[tuple, int](int)                       # of a group, by rank: how many so far
        self.posted: dict[tuple[int, int], GroupCall | tuple[Mail, int]] = {}      # by rank and number
        self.mail = {kind: defaultdict[Mail, list[Event]](list) for kind in ("send", "receive")}
        self.first = ""         # mistake, in words

    def play(self) -> str:
        """Let all ranks go as far as they can; return a sentence about the first mistake, or "" if there is none."""
        while not self.first and any([self.advance(rank) for rank in self.events]):
            pass
        return self.first or self.describe_stuck() or self.describe_unmatched()

    def advance(self, rank: int) -> bool:
        """Let a rank go on until it has to wait; report whether it came any further."""
        events, before = self.events[rank], self.at[rank]
        while self.at[rank] < len(events) and not self.first and self.passes(rank, events[self.at[rank]]):
            self.at[rank] += 1
        return self.at[rank] > before

    def run_ahead(self, rank: int) -> int:
        """Play a rank to its end, and let others go on only where it waits for them. Return the most of its sends that
        were under way at the same time: those for which no receive had been posted. The ranks have to match.
        """
        most = 0
        while self.at[rank] < len(self.events[rank]):
            if self.push(rank).kind == "send":
                most = max(most, sum(len(own) - len(self.mail["receive"][mail])
                                     for mail, own in self.mail["send"].items() if mail.ranks[0] == rank))
        return most

    def push(self, rank: int) -> Event:
        """Let a rank go past an event, which is returned, and before it those for which it waits."""
        event = self.events[rank][self.at[rank]]
        while not self.passes(rank, event):
            self.push(self.missing(rank, event))
        self.at[rank] += 1
        return event

    def passes(self, rank: int, event: Event) -> bool:
        """Report whether a rank can go past an event."""
        if event.kind == "wait":
            return self.is_over(rank, self.posted[rank, event.number])
        if (rank, event.number) not in self.posted:
            self.posted[rank, event.number] = self.post(rank, event)
        return event.kind != "collective" or self.is_over(rank, self.posted[rank, event.number])

    def post(self, rank: int, event: Event):
        """Note that a rank has come to a call, and compare it with what others have called."""
        if event.kind in self.mail:
            mail = Mail(event.group, event.ranks, event.call)
            own, its = self.mail[event.kind][mail], self.mail["receive" if event.kind == "send" else "send"][mail]
            own.append(event)
            if len(its) >= len(own) and its[len(own) - 1].form != event.form:
                sent, received = (own, its) if event.kind == "send" else (its, own)
                self.complain(f"rank {event.ranks[0]} sends {sent[len(own) - 1]} to rank {event.ranks[1]}, which "
                              f"expects {received[len(own) - 1].form}")
            return mail, len(own)
        place = GroupCall(event.group, event.ranks, self.calls[rank, event.group, event.ranks])
        self.calls[rank, event.group, event.ranks] += 1
        there = self.arrived[place]
        for other, its_event in there.items():
            if (its_event.kind, its_event.call, its_event.form) != (event.kind, event.call, event.form):
                self.complain(f"call {place.number + 1} of the {place.group} group of ranks {in_words(place.ranks)} is "
                              f"{its_event} on rank {other}, but {event} on rank {rank}")
        there[rank] = event
        return place

    def is_over(self, rank: int, call) -> bool:
        """Report whether all have come that a call needs, as far as they are among the ranks."""
        if isinstance(call, GroupCall):
            return all(other in self.arrived[call] for other in call.ranks if other in self.events)
        mail, number = call
        source, target = mail.ranks
        kind, other = ("receive", target) if rank == source else ("send", source)
        return other not in self.events or len(self.mail[kind][mail]) >= number

    # ---- in words ----

    def complain(self, sentence: str) -> None:
        self.first = self.first or f"The ranks do not match: {sentence}."

    def describe_stuck(self) -> str:
        """Say who waits for whom, if ranks wait forever."""
        stuck = {rank: events[self.at[rank]] for rank, events in self.events.items() if self.at[rank] < len(events)}
        if not stuck:
            return ""
        circle = self.circle(stuck)
        story = "; ".join(f"rank {rank} waits for rank {self.missing(rank, stuck[rank])} in {stuck[rank]}"
                          for rank in circle)
        return f"The ranks deadlock: {story}."

    def missing(self, rank: int, event: Event) -> int:
        """Return a rank that an event waits for."""
        call = self.posted[rank, event.number]
        if isinstance(call, GroupCall):
            return next(other for other in call.ranks if other in self.events and other not in self.arrived[call])
        return next(other for other in call[0].ranks if other != rank)

    def circle(self, stuck: Mapping[int, Event]) -> list[int]:
        """Return ranks each of which waits for the next, until the first again, or one that is through."""
        seen: list[int] = []
        rank = min(stuck)
        while rank in stuck and rank not in seen:
            seen.append(rank)
            rank = self.missing(rank, stuck[rank])
        return seen[seen.index(rank):] if rank in seen else seen

    def describe_unmatched(self) -> str:
        """Say which message nobody receives, or sends, though all ranks are through."""
        for kind, other, verb in (("send", "receive", "receives"), ("receive", "send", "sends")):
            for mail, own in self.mail[kind].items():
                rank = mail.ranks[kind == "send"]
                if rank in self.events and len(own) > (n := len(self.mail[other][mail])):
                    return (f"The ranks do not match: rank {mail.ranks[kind == 'receive']} "
                            f"{'sends' if kind == 'send' else 'expects'} {own[n]}, which rank {rank} never {verb}.")
        return ""


def match(events: Mapping[int, Sequence[Event]]) -> str:
    """Return a sentence about the first mistake of these ranks, or "" if they match."""
    return Matching(events).play()


def in_words(ranks: Sequence[int]) -> str:
    """Format the ranks of a group, few of them."""
    return ", ".join(map(str, ranks)) if len(ranks) < 5 else f"{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"
