"""The counts that grow with the ranks, each with the limit that it meets: for `dry_run --check-scale`.

The code of the run counts: its groups, its tags, its messages, the pieces of its checkpoint, the files that it imports.
What the launcher of the default MPI needs for each host and each rank is measured, and a test measures it again.
docs/from_8_to_16384.md says what has been measured, and what has never been run.
"""
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from mpi_impl.checkpoints.checkpoint import boxes_to_save
from mpi_impl.checkpoints.manifest import MOST_BOXES, STATES
from mpi_impl.comm.mpi_library import largest_tag as allowed_tag, library
from mpi_impl.launch.begin import ROOT
from mpi_impl.launch.guard import MOST_FILES
from mpi_impl.launch.launcher import MOST
from mpi_impl.parallel.pipeline import largest_tag
from mpi_impl.runtime.mpis import COMMUNICATORS, DEFAULT, FILES, FILES_OF_A_HOST, FILES_OF_A_RANK, PROXY_FILES
from mpi_impl.runtime.tables import aligned
from reference.config import ParallelConfig
from reference.models.model import model_tensors
from reference.optimizers.muon import is_matrix
from reference.parallel.stages import schedule_of
from reference.params import leaves
from reference.precision import FORMATS
from shardlab.dry_run.matching import Matching
from shardlab.dry_run.world import DryRun, kinds_of_ranks
from shardlab.predict.rank import ImaginedWorld, RankRun, imagine_rank, run_rank

TAGS = 32_767               # the largest that MPI promises
USUAL_FILES = 1024          # that a process may open

# Bytes of our launcher with its guard and mpiexec.
LAUNCHER, LAUNCHER_OF_A_HOST = 39_000_000, 5_000

# Import a module, and print how many files that reads, and their bytes.
START = """
import importlib, os, sys
found = set()
sys.addaudithook(lambda event, details: event == "open" and isinstance(details[0], str) and found.add(details[0]))
sys.path.insert(0, sys.argv[1])
importlib.import_module(sys.argv[2])
if os.path.exists("/proc/self/maps"):
    found |= {line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps")}
sizes = [os.path.getsize(path) for path in found if os.path.isfile(path) and not path.startswith("/proc")]
print(len(sizes), sum(sizes))
"""


class Count(NamedTuple):
    """Something that grows with the ranks, and the limit that it meets."""

    what: str
    number: int
    limit: int | None = None
    whose: str = ""         # limit it is
    advice: str = ""        # for when it is passed


def describe(counts: Sequence[Count]) -> str:
    """Tabulate the counts, and say which of them is nearest to its limit; if it is beyond, with advice."""
    rows = [[f"  {what}", f"{number:,}", f"{limit:,}" if limit else "", whose]
            for what, number, limit, whose, _ in counts]
    share, first = max((count.number / count.limit, count) for count in counts if count.limit)
    return "\n".join([aligned([["  what grows", "count", "limit", "whose"], *rows], left=(0, 3)), "",
                      f"the first limit: {first.what}, {share:.1%} of it." + f" {first.advice}" * (share > 1)])


def count_all(dry: DryRun, program: str) -> list[Count]:
    """Count what a run needs that starts this module on every rank of a world."""
    world, run = dry.world, dry.run(0)
    n, hosts = world.parallel.world_size, len(world.hosts().names)
    (saved, size, boxes), (files, read) = checkpoint_of(world), files_to_start(program)
    tag = largest_tag(schedule_of(world.parallel, world.microbatches))
    here = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], MOST_FILES)
    raised = "Raise the limit on the hosts: limits.conf, or LimitNOFILE of sshd or slurmd."
    return [
        Count("ranks", n, MOST, "the launcher's", "Start fewer."),
        Count("hosts", hosts),
        Count("bytes of the launcher", LAUNCHER + LAUNCHER_OF_A_HOST * hosts),
        Count("open files of mpiexec", FILES + FILES_OF_A_HOST * hosts, here, "this machine's hard one",
              "Raise it (`ulimit -Hn`), or let srun start the ranks."),
        Count("open files of its proxy on a host", PROXY_FILES + FILES_OF_A_RANK * -(-n // hosts), USUAL_FILES,
              "the usual one", raised),
        Count("files that a rank reads to start", files),
        Count("files that all of them read", n * files),
        Count("bytes that all of them read", n * read),
        Count("communicators of a rank", 1 + len(run.groups), COMMUNICATORS, f"{DEFAULT.name}'s",
              "Use fewer kinds of groups."),
        Count("ranks to which rank 0 sends, by rings", len(partners(run)), USUAL_FILES, "the usual, by TCP", raised),
        Count("sends under way from a rank", most_sends(dry)),
        Count("largest tag", 2 * tag + 1, TAGS, f"every MPI's; {2 * allowed_tag() + 1:,} of {library()}",
              "Choose fewer microbatches, or an MPI that has more."),
        Count("files in a checkpoint", saved),
        Count("bytes in a checkpoint", size),
        Count("boxes of a tensor in it, at most", boxes, MOST_BOXES, "the manifest's",
              "Choose fewer replicas, or hybrid sharding.")]


# ---- what is counted ------------------------------------------------------------------------------------------------


def files_to_start(program: str) -> tuple[int, int]:
    """Import a module in a process of its own; return the number of files that it has read, and their bytes."""
    command = [sys.executable, "-P", "-c", START, ROOT, program]
    files, size = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    return files, size


def partners(run: RankRun) -> set[int]:
    """Return the ranks to which a rank sends in a step, if each collective is a ring; in an all-to-all, all others."""
    found = set[int]()
    for event in run.events:
        at = event.ranks.index(run.rank)
        found |= set(event.ranks if "all_to_all" in event.call else (event.ranks[(at + 1) % len(event.ranks)],))
    return found - {run.rank}


def most_sends(dry: DryRun) -> int:
    """Return the most sends under way from a rank of any kind that runs ahead of the others of its pipeline."""
    ranks = [dry.of_pipeline_rank(stage) for stage in range(dry.world.parallel.pipeline_model_parallel_size)]
    events = {rank: run_rank(dry.short, rank).events for rank in ranks}
    return max(Matching(events).run_ahead(dry.of_pipeline_rank(kind.pipeline_ranks[0]))
               for kind in kinds_of_ranks(dry.world))


def checkpoint_of(world: ImaginedWorld) -> tuple[int, int, int]:
    """Return the number of files of a checkpoint, their bytes without headers, and a bound on the boxes of a tensor in
    it. One rank of each kind says what it saves, for all of its kind.
    """
    files = boxes = 0
    for kind in kinds_of_ranks(world):
        of_a_stage, stages = 0, len(kind.pipeline_ranks)
        for rank, number in representatives(world.parallel, kind.pipeline_ranks[0]):
            trainer = imagine_rank(world, rank).trainer
            states = [boxes_to_save(trainer, state)[1] for state in trainer.state.optimizer_states]
            files += number * stages * sum(map(bool, states))
            of_a_stage += number * max(Counter(name for name, _ in states[0]).values(), default=0)
        boxes = max(boxes, of_a_stage)
    elements = sum(prod(tensor.shape) * (len(STATES) - (world.parallel.whole_matrices and is_matrix(tensor)))
                   for _, tensor in leaves(model_tensors(world.model)))
    return files, elements * FORMATS[world.precision.main].bytes, boxes


def representatives(c: ParallelConfig, stage: int) -> Iterator[tuple[int, int]]:
    """Yield ranks of a stage that represent all of them in a checkpoint, with the number that each represents.

    Only the first tensor-parallel rank saves what is replicated. Of the replicas, the first may save for all, the first
    e hold all experts, and those of the first instance all shards.
    """
    t, n = c.tensor_model_parallel_size, c.replicas
    for first, stop in pairwise(sorted({0, 1, c.expert_model_parallel_size, c.instance_size, n})):
        for tensor, tensors in ((0, 1), (1, t - 1))[:t]:
            yield tensor + t * (first + n * stage), tensors * (stop - first)
