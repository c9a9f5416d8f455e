"""The wait-for graph of a hung job, built from its dumps, and its root: the rank that others wait for.

A rank is held up at its first entry that has not ended. It waits there for the ranks that have not come to this entry,
or have come and are held up before it by one of their own. Each of these may wait in turn, in another group: following
that ends at a rank that waits for nobody, or in a circle.
"""
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

from mpi_impl.comm.watchdog import listed
from shardlab.hang.dumps import Dump, Entry, ProcessGroup


class Disagreement(NamedTuple):
    """The first collective of a group that its ranks have not called alike."""

    group: ProcessGroup
    number: int
    calls: dict[int, Entry]         # by rank
    odd: tuple[int, ...]            # the ranks that differ from most others; () where neither side is larger
    one_more: dict[int, bool]       # of the odd ranks: True where it has this one more, False where it lacks one
    misfit: str = ""                # of an all-to-all, how its sizes do not fit


class Wait(NamedTuple):
    """A rank that is held up."""

    rank: int
    group: ProcessGroup
    entry: Entry
    absent: tuple[int, ...]         # ranks that have not come
    held_up: tuple[int, ...]        # ranks that have posted it, and wait for something before it

    @property
    def others(self) -> tuple[int, ...]:
        return self.absent + self.held_up


class Job:
    """The dumps of a job."""

    def __init__(self, dumps: Sequence[Dump]):
        self.dumps = {dump.rank: dump for dump in dumps}
        self.collectives: dict[ProcessGroup, dict[int, dict[int, Entry]]] = defaultdict(lambda: defaultdict(dict))
        self.messages: dict[tuple, list[Entry]] = defaultdict(list)     # by (group, kind, sender, receiver)
        for dump in dumps:
            for entry in dump.entries:
                group = self.group_of(dump, entry)
                for message in entry.messages:
                    self.messages[group, *message].append(entry)
                if not entry.messages and not entry.is_p2p:
                    self.collectives[group][dump.rank][entry.collective_seq_id] = entry

    def group_of(self, dump: Dump, entry: Entry) -> ProcessGroup:
        """Return an entry's group, with its ranks: where this dump has none, those that another has; and the default
        group's are all.
        """
        name, _ = entry.process_group
        everyone = tuple(sorted({*self.dumps, *self.without_dump})) if "default_pg" in entry.process_group else ()
        known = [one.groups[name] for one in (dump, *self.dumps.values()) if one.groups.get(name)]
        return ProcessGroup(name, (*known, everyone)[0])

    def members(self, group: ProcessGroup) -> tuple[int, ...]:
        """Return the group's ranks of the world: those that have used it, where no dump lists them."""
        return group.ranks or tuple(sorted(self.collectives[group]))

    @cached_property
    def has_lost_some(self) -> bool:
        return any(entry.record_id for dump in self.dumps.values() for entry in dump.entries[:1])

    @cached_property
    def without_dump(self) -> tuple[int, ...]:
        known = {rank for dump in self.dumps.values() for ranks in dump.groups.values() for rank in ranks}
        return tuple(sorted(known - self.dumps.keys()))

    # ---- what was not called alike ----

    @cached_property
    def disagreements(self) -> list[Disagreement]:
        """Return the first of each group."""
        found = [self.disagreement(group, calls) for group, calls in self.collectives.items()]
        return [one for one in found if one]

    def disagreement(self, group: ProcessGroup, calls: dict[int, dict[int, Entry]]) -> Disagreement | None:
        """Compare each number among the ranks whose dumps still have it."""
        for number in sorted({n for entries in calls.values() for n in entries}):
            here = {rank: entries[number] for rank, entries in sorted(calls.items())
                    if number in entries and entries[number].signature}
            kinds = Counter(entry.signature for entry in here.values())
            if len(kinds) > 1:
                (usual, most), (_, second) = kinds.most_common(2)
                odd = () if most == second else tuple(rank for rank in here if here[rank].signature != usual)
                return Disagreement(group, number, here, odd, self.shifted(calls, number, here, odd))
            if here.keys() == {*group.ranks} and (wrong := misfit([here[rank] for rank in group.ranks], group.ranks)):
                return Disagreement(group, number, here, (), {}, wrong)
        return None

    @staticmethod
    def shifted(calls: dict[int, dict[int, Entry]], number: int, here: dict[int, Entry],
                odd: Sequence[int]) -> dict[int, bool]:
        """Find the ranks that have one collective more than another, or one less, and agree from there on."""
        def after(rank: int, start: int) -> list[tuple]:
            return [calls[rank][n].signature for n in sorted(calls[rank]) if n >= start]

        found = {}
        for rank in odd or list(here)[:1]:
            other = next(one for one in here if here[one].signature != here[rank].signature)
            for more in (True, False):
                mine, theirs = after(rank, number + more), after(other, number + 1 - more)
                n = min(len(mine), len(theirs))
                if n and mine[:n] == theirs[:n]:
                    found[rank] = more
                    break
        return found

    # ---- who waits ----

    @cached_property
    def first_open(self) -> dict[int, Entry]:
        """Return the first entry that has not ended, of each rank that has one."""
        return {rank: entry for rank, dump in self.dumps.items()
                for entry in [one for one in dump.entries if not one.has_ended][:1]}

    @cached_property
    def waits(self) -> dict[int, Wait]:
        """Return where each rank is held up, if it is."""
        return {rank: self.wait_of(rank, self.group_of(self.dumps[rank], entry), entry)
                for rank, entry in self.first_open.items()}

    def wait_of(self, rank: int, group: ProcessGroup, entry: Entry) -> Wait:
        needed = list(self.counterparts(rank, group, entry))
        return Wait(rank, group, entry, tuple(sorted({other for other, there in needed if there is None})),
                    tuple(sorted({other for other, there in needed if there and not there.has_ended
                                  and there is not self.first_open.get(other)})))

    def counterparts(self, rank: int, group: ProcessGroup, entry: Entry) -> Iterator[tuple[int, Entry | None]]:
        """Yield each rank that the entry needs, and what it has posted for it: None if it has not.

        Messages between two ranks match in their order. Where a dump has lost its beginning, as many are taken to have
        ended on both.
        """
        members, number = self.members(group), entry.collective_seq_id
        for kind, sender, receiver in entry.messages:
            back, other = ("recv", receiver) if kind == "send" else ("send", sender)
            mine, theirs = (self.messages[group, one, sender, receiver] for one in (kind, back))
            i = mine.index(entry)
            if self.has_lost_some:
                i += sum(one.has_ended for one in theirs) - sum(one.has_ended for one in mine)
            if other < len(members):
                yield members[other], dict(enumerate(theirs)).get(i)
        for other in () if entry.messages or entry.is_p2p else members:
            calls = self.collectives[group].get(other, {})
            if other != rank and (number in calls or not calls or min(calls) < number):     # or its dump has lost it
                yield other, calls.get(number)

    def call(self, wait: Wait) -> str:
        """Return 'all_reduce 7', 'a send to rank 6'."""
        if not wait.entry.parts:
            for kind, sender, receiver in wait.entry.messages:
                others = [rank for rank, _ in self.counterparts(*wait[:3])] or [receiver if kind == "send" else sender]
                return f"a {'send to' if kind == 'send' else 'receive from'} {listed(others)}"
        return f"a {wait.entry}" if wait.entry.messages else f"{wait.entry.operation} {wait.entry.collective_seq_id}"

    # ---- where that ends ----

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Return the ranks that are waited for, and wait for nobody themselves."""
        waited_for = {other for wait in self.waits.values() for other in wait.others}
        return tuple(sorted(rank for rank in waited_for if rank not in self.waits or not self.waits[rank].others))

    @cached_property
    def circle(self) -> list[int]:
        """Return ranks of which each waits for the next, and the last for the first; [] if there are none."""
        for start in self.waits:
            path = [start]
            while path[-1] in self.waits and self.waits[path[-1]].others:
                following = self.waits[path[-1]].others[0]
                if following in path:
                    return path[path.index(following):]
                path.append(following)
        return []


def misfit(calls: Sequence[Entry], ranks: Sequence[int]) -> str:
    """Say which rank of an all-to-all sends another more or less than that expects; "" if none does.

    Of a tensor that is split among all, the dumps do not tell how, and only the sums can be compared.
    """
    if not calls or not calls[0].operation.startswith("all_to_all"):
        return ""
    sent, expected = ([list(map(prod, sizes)) for sizes in side] for side in zip(*(
        (call.input_sizes, call.output_sizes) for call in calls)))
    if {len(sizes) for sizes in sent + expected} == {len(ranks)}:
        for sender, *rows in zip(ranks, sent, zip(*expected)):
            for receiver, mine, theirs in zip(ranks, *rows):
                if mine != theirs:
                    return f"rank {sender} sends {mine} elements to rank {receiver}, which expects {theirs}"
    totals = [sum(map(sum, side)) for side in (sent, expected)]
    return "its ranks send {} elements in all, and expect {}".format(*totals) if len({*totals}) > 1 else ""


# ---- in words -------------------------------------------------------------------------------------------------------


def report(job: Job) -> str:
    """Say what was not called alike, who waits for whom, and where that ends."""
    lines = [f"{len(job.dumps)} dump{'s' * (len(job.dumps) > 1)}, of {listed(sorted(job.dumps))}."]
    if job.without_dump:
        lines.append(f"There is no dump of {listed(job.without_dump)}: what did not write one may have ended, or hangs "
                     "outside of Python.")
    for one in job.disagreements:
        lines += ["", *say_disagreement(one)]
    if job.waits:
        lines += ["", *(say_wait(job, wait) for wait in job.waits.values())]
    return "\n".join([*lines, "", verdict(job)])


def say_disagreement(one: Disagreement) -> list[str]:
    if one.misfit:
        return [f"In {one.group} the sizes of all-to-all {one.number} do not fit: {one.misfit}."]
    by_call: dict[str, list[int]] = defaultdict(list)
    for rank, entry in one.calls.items():
        by_call[f"{entry}{entry.place}"].append(rank)
    said = "; ".join(f"{listed(ranks)} called {call}" for call, ranks in by_call.items())
    lines = [f"In {one.group} collective {one.number} is not the same on all ranks: {said}."]
    for rank, more in one.one_more.items():
        lines.append(f"  From there on, all agree if rank {rank} has called this one more than the others." if more else
                     f"  From there on, all agree if rank {rank} has left one out that the others have called.")
    return lines


def say_wait(job: Job, wait: Wait) -> str:
    begin = f"Rank {wait.rank} waits in {job.call(wait)} of {wait.group}{wait.entry.place}"
    reasons = []
    if wait.absent:
        reasons.append(f"for {listed(wait.absent)}, which {'has' if len(wait.absent) == 1 else 'have'} not come to it")
    for rank in wait.held_up:
        reasons.append(f"for rank {rank}, which has posted it behind {job.first_open[rank]}")
    if reasons:
        return f"{begin} {' and '.join(reasons)}."
    if not wait.group.ranks:
        return f"{begin}. The dumps do not list its ranks; {listed(job.members(wait.group))} used it."
    return f"{begin}, to which all its ranks have come" + (
        "." if job.ends else ": it is slow, or the network or a kernel has stopped.")


def verdict(job: Job) -> str:
    """Return the last sentence: where to look."""
    if job.disagreements:
        first = min(job.disagreements, key=lambda one: min(entry.record_id for entry in one.calls.values()))
        where = f"rank{'s' * (len(first.odd) > 1)} {', '.join(map(str, first.odd))}" if first.odd else (
            "the ranks that differ")
        return (f"Look first at collective {first.number} of {first.group}, and at what {where} did before it: what "
                "comes after it follows from it.")
    if job.ends:
        return f"All waiting ends at {listed(job.ends)}. " + " ".join(last_of(job, rank) for rank in job.ends)
    if job.circle:
        steps = ", ".join(f"rank {rank} in {job.waits[rank].group} for rank {job.waits[rank].others[0]}"
                          for rank in job.circle)
        return f"That is a circle: {steps}. These ranks use their groups, or their sends and receives, in other orders."
    if any(not wait.group.ranks for wait in job.waits.values()):
        return "Where that ends cannot be told, since the dumps do not list the ranks of these groups."
    if job.waits:
        return "Every rank has come to what it waits in: look at the network, the GPUs' errors and the kernels."
    return "Nobody waits: all that was posted has ended."


def last_of(job: Job, rank: int) -> str:
    """Say what a rank did last that is known."""
    if rank not in job.dumps:
        return f"Rank {rank} has left no dump."
    if rank in job.waits:
        return (f"Rank {rank} is in {job.waits[rank].entry}, to which all its ranks have come: look at the network, "
                "the GPUs' errors and the kernels.")
    if not job.dumps[rank].entries:
        return f"Rank {rank} has posted nothing."
    entry = job.dumps[rank].entries[-1]
    return (f"Rank {rank} waits for nobody: the last that it posted, {entry}{entry.place}, has ended. It is at work "
            "after that, or stuck.")
