"""An imagined world: its kinds of ranks, all of them in one step, and the messages that they exchange."""
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from mpi_impl.comm.topology import Place, rank_at
from mpi_impl.comm.trace import Slice
from mpi_impl.parallel.pipeline import tag
from reference.config import ParallelConfig
from reference.costs.plans import LayerCounts, layer_counts
from reference.parallel.stages import layers_of_rank, schedule_of, stages_of_ranks
from reference.schedules.actions import result
from reference.schedules.generators import shrink_microbatches
from reference.schedules.simulate import Timeline, simulate
from shardlab.dry_run.matching import match
from shardlab.predict.rank import ImaginedWorld, RankRun, run_rank
from shardlab.report.timelines.timelines import measured_times


class Kind(NamedTuple):
    """The ranks of a pipeline that do the same work, but for the microbatches that they have in flight."""

    counts: LayerCounts
    pipeline_ranks: list[int]       # the first of them holds the most


def kinds_of_ranks(world: ImaginedWorld) -> list[Kind]:
    """Return the kinds, in the order of their first ranks: in a deep pipeline the first, the middle, the last stage."""
    found: dict[LayerCounts, list[int]] = {}
    for rank, stages in enumerate(stages_of_ranks(world.model, world.parallel)):
        found.setdefault(layer_counts(world.model, layers_of_rank(stages)), []).append(rank)
    return [Kind(*one) for one in found.items()]


def ranks_to_match(c: ParallelConfig) -> list[int]:
    """Return all ranks of one pipeline; and of the other groups of its first and last rank the first two, the last, and
    those where the experts of one replica, or the shards of one instance, begin again.
    """
    sizes = Place(c.tensor_model_parallel_size, c.context_parallel_size, c.data_parallel_size,
                  c.pipeline_model_parallel_size)
    found = {rank_at(Place(0, 0, 0, stage), c) for stage in range(sizes.pipeline)}
    for stage in (0, sizes.pipeline - 1):
        for axis in ("tensor", "context", "data"):
            n, e, shards = getattr(sizes, axis), c.expert_model_parallel_size, c.instance_size
            found |= {rank_at(Place(0, 0, 0, stage)._replace(**{axis: i}), c)
                      for i in (1, e - 1, e, shards - 1, shards, n - 1) if 0 <= i < n}
    return sorted(found)


class DryRun:
    """The ranks of a world, each of which runs alone."""

    def __init__(self, world: ImaginedWorld):
        self.world = world

    def of_pipeline_rank(self, stage: int) -> int:
        return rank_at(Place(0, 0, 0, stage), self.world.parallel)

    @cached_property
    def short(self) -> ImaginedWorld:
        """Return the world with just as many microbatches as fill the pipeline."""
        m = shrink_microbatches(self.world.microbatches, self.world.parallel.pipeline_schedule,
                                self.world.parallel.pipeline_model_parallel_size)
        return replace(self.world, microbatches=m)

    def match(self, others: Sequence[int] = ()) -> tuple[list[int], str]:
        """Match the messages of a pipeline's ranks, of some in their other groups, and of others: return the ranks, and
        a sentence about the first mistake, or "".
        """
        ranks = sorted({*ranks_to_match(self.world.parallel), *others})
        return ranks, match({rank: run_rank(self.short, rank).events for rank in ranks})

    @cached_property
    def timeline(self) -> Timeline:
        """Simulate the schedule with the times that actions take on each kind of rank."""
        kinds = kinds_of_ranks(self.world)
        short = [run_rank(self.short, self.of_pipeline_rank(kind.pipeline_ranks[0])) for kind in kinds]
        placement = stages_of_ranks(self.world.model, self.world.parallel)
        slices = [[on_stages(run.slices, list(placement[kind.pipeline_ranks[0]]), list(placement[stage]))]
                  for kind, run in zip(kinds, short) for stage in kind.pipeline_ranks]
        schedule, few = (schedule_of(self.world.parallel, world.microbatches) for world in (self.world, self.short))
        return simulate(schedule, measured_times(slices, few, self.world.sending))

    def run(self, rank: int) -> RankRun:
        """Run a rank's whole step. With a profile of hardware, messages arrive when the simulated ranks send them."""
        if self.world.hardware is None:
            return run_rank(self.world, rank)
        stages = 1 + max(span.action.stage for span in chain(*self.timeline.ranks))
        arrivals = {f"message {tag(result(span.action), stages)}": span.end + self.world.sending
                    for span in chain(*self.timeline.ranks) if span.action.kind != "W"}
        return run_rank(self.world, rank, arrivals)


def on_stages(slices: Sequence[Slice], stages: Sequence[int], others: Sequence[int]) -> list[Slice]:
    """Return the actions of a rank's slices on another rank's stages."""
    return [s._replace(name=str(s.action._replace(stage=others[stages.index(s.action.stage)])))
            for s in slices if s.action]
