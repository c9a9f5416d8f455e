"""The report of a dry run: the arrays of a rank at its peak, and the lines that made them; its messages; its time."""
from collections import Counter, defaultdict
from collections.abc import Sequence

from mpi_impl.comm.ledger import bytes_between_hosts, ring_bytes
from mpi_impl.runtime.tables import aligned, bytes_of
from reference.config.description import describe
from reference.costs.flops import iteration_flops
from reference.costs.parameters import parameters
from shardlab.predict.meta_device import MemoryPeak, Origin
from shardlab.predict.rank import ImaginedWorld, RankRun

LINES = 8       # of code that are listed
BY_FILE = {"mpi_impl/parallel/zero.py": "gathered parameters, unsent gradients",
           "mpi_impl/parallel/pipeline.py": "messages between stages",
           "mpi_impl/training/batches.py": "the batch"}


def introduction(world: ImaginedWorld) -> str:
    c, p = world.model, world.parallel
    return (f"{parameters(c):,} parameters in {world.precision.compute} on {p.world_size:,} imagined ranks: "
            f"{describe(p)}; a step is {world.microbatches:,} x {world.micro_batch_size} samples of "
            f"{world.seq_length:,} tokens on each replica")


def describe_rank(run: RankRun, world: ImaginedWorld) -> str:
    """Describe a rank's memory and messages."""
    at = ", ".join(f"{name} {number}" for name, number in run.place._asdict().items())
    return "\n".join([f"rank {run.rank} ({at}): {bytes_of(run.peak.size)} at the peak of a step{too_much(run, world)}",
                      f"  ({bytes_of(run.setup.size)} while the model was made; {bytes_of(run.saved)} in a checkpoint)",
                      memory_table(run.peak), "", lines_table(run.peak), "", messages_table(run)])


def too_much(run: RankRun, world: ImaginedWorld) -> str:
    """Say whether a device has too little memory."""
    assert world.hardware
    room = world.hardware.memory - world.hardware.reserved
    return f", more than the {bytes_of(room)} that a model gets of {world.hardware.name}" * (run.peak.size > room)


# ---- memory ---------------------------------------------------------------------------------------------------------


def kind_of(site: Origin, peak: MemoryPeak) -> str:
    """Return what the arrays of a place are, at the peak."""
    file, _, _ = site.line.partition(":")
    return site.kind or BY_FILE.get(file) or (
        "saved for the backward" if site.during != peak.during else "of the action under way")


def by_kind(peak: MemoryPeak) -> dict[str, int]:
    """Return the bytes of each kind of array, the most first."""
    found = Counter[str]()
    for site, size in peak.sites.items():
        found[kind_of(site, peak)] += size
    return dict(found.most_common())


def memory_table(peak: MemoryPeak) -> str:
    return aligned([[f"  {kind}", f"{size:,}"] for kind, size in by_kind(peak).items() if size])


def lines_table(peak: MemoryPeak) -> str:
    """Tabulate the lines of code that made most of what has no name of its own."""
    found = Counter[tuple[str, str]]()
    for site, size in peak.sites.items():
        if not site.kind:
            found[site.line, kind_of(site, peak)] += size
    return aligned([["  made by", "bytes", "what"], *(
        [f"  {line}", f"{size:,}", kind] for (line, kind), size in found.most_common(LINES))], left=(0, 2))


# ---- messages -------------------------------------------------------------------------------------------------------


def messages_table(run: RankRun) -> str:
    """Tabulate the calls of each kind of group, as rings, inside servers and between them."""
    calls, ring, between = Counter[str](), defaultdict[str, float](float), defaultdict[str, float](float)
    for entry, total in run.ledger.totals.items():
        if entry.group_size > 1:
            name = f"  {entry.group} x{entry.group_size}"
            calls[name] += total.calls
            ring[name] += ring_bytes(entry, total)
            between[name] += bytes_between_hosts(run.ledger, entry)
    rows = [[name, f"{calls[name]:,}", f"{ring[name] - between[name]:,.0f}", f"{between[name]:,.0f}"] for name in calls]
    return aligned([["  sends in groups", "calls", "bytes inside servers", "between servers"], *rows])


def matched(ranks: Sequence[int]) -> str:
    return (f"the messages of {len(ranks)} ranks match: every one is received, in the order in which it is expected, "
            "and no rank waits forever")


# ---- time -----------------------------------------------------------------------------------------------------------


def describe_time(runs: Sequence[RankRun], world: ImaginedWorld) -> str:
    """Describe the time of a step of the slowest of these ranks, and the model's FLOP/s."""
    assert world.hardware
    seconds = max(run.seconds for run in runs)
    flops = iteration_flops(world.model, world.global_batch_size, world.seq_length)
    rate = flops / seconds / world.parallel.world_size
    return (f"a step takes {seconds:.3g} s on {world.hardware.name}: {rate / 1e12:.3g} TFLOP/s of the model on each "
            f"rank, {rate / world.hardware.peak:.1%} of the peak")
