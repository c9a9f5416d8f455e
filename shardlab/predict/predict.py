"""Predict what a rank sends in each part of a run, and what it holds, by running a few of its steps without data."""
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from mpi_impl.comm.ledger import Entry, Ledger, Total
from mpi_impl.comm.topology import Place, Topology, rank_at
from mpi_impl.parallel.model_state import Held
from reference.config import ModelConfig
from reference.costs.volumes import PassCounts
from reference.schedules.generators import shrink_microbatches
from shardlab.predict.rank import ImaginedRank, ImaginedWorld, imagine_rank

Totals = dict[Entry, Total]
MANY = 64       # samples of a microbatch; beyond, what is kept of each is more than anything else
PHASES = ("data", "forward", "recompute", "backward", "reduction", "optimizer", "evaluation")


class Predicted(NamedTuple):
    """The messages and the memory of a rank, as predicted."""

    step: Totals
    update: Totals          # the part of it that a skipped step does not send
    evaluation: Totals      # of a global batch
    held: Held
    even: bool              # whether activations depend on the data: they are those of routers that choose evenly

    def sent(self, work: PassCounts) -> Totals:
        """Return what it sends in a run."""
        return added((self.step, work.steps), (self.update, -work.skipped), (self.evaluation, work.evaluations))


def added(*parts: tuple[Totals, int]) -> Totals:
    """Add up totals, each taken this many times."""
    found: Totals = defaultdict(Total)
    for totals, times in parts:
        for entry, (calls, elements) in totals.items():
            found[entry] = Total(found[entry].calls + times * calls, found[entry].elements + times * elements)
    return {entry: total for entry, total in found.items() if total.calls}


def sent_by_pipeline(predicted: Iterable[Predicted], work: PassCounts) -> Totals:
    """Return what all ranks of a pipeline send in a run, in the order of a step."""
    sent = added(*((one.sent(work), 1) for one in predicted))
    return dict(sorted(sent.items(), key=lambda item: PHASES.index(item[0].phase)))


# ---- some steps without data ----------------------------------------------------------------------------------------


def predict_pipeline(topology: Topology, world: ImaginedWorld) -> list[Predicted]:
    """Predict the ranks of the first replica's pipeline, each on its first rank; all ranks call this together."""
    place, parallel = topology.place, world.parallel
    first = place == Place(0, 0, 0, place.pipeline)
    found = topology.world.collect_objects(
        lambda: predict(world, topology.world.rank) if first else None, "the prediction of the run")
    return [found[rank_at(Place(0, 0, 0, stage), parallel)] for stage in range(parallel.pipeline_model_parallel_size)]


def predict_alone(world: ImaginedWorld) -> list[Predicted]:
    """Predict the same in one process."""
    stages = range(world.parallel.pipeline_model_parallel_size)
    return [predict(world, rank_at(Place(0, 0, 0, stage), world.parallel)) for stage in stages]


def predict(world: ImaginedWorld, rank: int) -> Predicted:
    """Predict one rank. Once the pipeline is full, every p microbatches add the same, and so does every sample of many:
    a large step is predicted from two small ones.
    """
    unlimited = replace(world, model=no_capacity(world.model))
    if unlimited != world:
        return predict(unlimited, rank)._replace(even=True)
    if world.micro_batch_size > MANY:
        one, other = (predict(replace(world, micro_batch_size=b), rank) for b in (MANY // 2, MANY))
        return extrapolated(one, other, Fraction(world.micro_batch_size - MANY // 2, MANY // 2))
    p, m, schedule = world.parallel.pipeline_model_parallel_size, world.microbatches, world.parallel.pipeline_schedule
    few = shrink_microbatches(m, schedule, p)
    few += (m - few) % p
    if m <= few + p:
        return observe(imagine_rank(world, rank))
    one, other = (observe(imagine_rank(replace(world, microbatches=n), rank)) for n in (few, few + p))
    return extrapolated(one, other, (m - few) // p)


def layer_bytes(world: ImaginedWorld) -> int:
    """Predict the activations that a layer more keeps of a microbatch, on the first rank."""
    one, two = (predict(replace(world, model=replace(world.model, num_layers=layers)), 0)
                for layers in (1, 2))
    return two.held.activations - one.held.activations


def no_capacity(c: ModelConfig) -> ModelConfig:
    """Return the model without a limit to what its experts take: how much that drops depends on the data."""
    return replace(c, experts=replace(c.experts, moe_expert_capacity_factor=None)) if c.experts else c


def observe(rank: ImaginedRank) -> Predicted:
    """Let a rank take a step, and evaluate."""
    trainer, ledger = rank.trainer, rank.topology.world.ledger
    trainer.measured = True
    rank.step()
    step, held = taken(ledger), trainer.held()
    with ledger.phase("optimizer"):
        trainer.optimizer.update(trainer.state.gradients.own, 1.0, 0.0)
        trainer.state.zero.finish_update()
    update = taken(ledger)
    trainer.evaluate(rank.batches.microbatches_of("validation", 0), rank.batches.global_batch_size)
    dealt = any(bucket.dealt for bucket in trainer.state.layout.buckets)
    return Predicted(step, update, taken(ledger), held, dealt)


def taken(ledger: Ledger) -> Totals:
    """Return what the ledger has, and start it again."""
    totals = dict(ledger.totals)
    ledger.totals.clear()
    return totals


def extrapolated(one: Predicted, other: Predicted, times: Fraction | int) -> Predicted:
    """Add the difference of two predictions to the first, this number of times."""
    def beyond(first, second):
        return type(first)(*(round(x + times * (y - x)) for x, y in zip(first, second)))

    step, update, evaluation = ({entry: beyond(total, second[entry]) for entry, total in first.items()}
                                for first, second in zip(one[:3], other[:3]))
    return Predicted(step, update, evaluation, beyond(one.held, other.held), one.even)
