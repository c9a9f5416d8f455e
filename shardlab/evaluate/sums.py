"""A sum over all samples of a part, on any ranks: replicas take different samples, and pipelines go forward only."""
from collections.abc import Callable
from math import ceil
from typing import Any

import numpy as np

from mpi_impl.comm.regions import region_of
from mpi_impl.inference.replica import Replica
from mpi_impl.layers.context_attention import part_of
from mpi_impl.parallel.passes import ForwardPass
from mpi_impl.parallel.pipeline import Pipeline
from mpi_impl.runtime.arrays import to_host
from mpi_impl.training.batches import Batches
from reference.errors import UserError
from reference.layer_context import EVALUATION
from reference.parallel.stages import stages_of_ranks
from reference.schedules.generators import evaluation_schedule


class Sums:
    """Sums of a pass's measure over all batches and replicas, identical on every rank."""

    def __init__(self, replica: Replica, batches: Batches, make_pass: Callable[..., ForwardPass]):
        self.replica, self.batches, self.make_pass = replica, batches, make_pass
        topology = self.topology = replica.topology
        stages = [list(held) for held in stages_of_ranks(replica.model, topology.config)]
        self.pipeline = Pipeline(evaluation_schedule(stages, batches.microbatches), topology)
        self.region = region_of(topology.tensor, topology.config, topology.expert, topology.context)

    def over(self, part: str, samples: int, report: Callable[[int], object] = lambda done: None) -> float:
        """Return the sum over `samples` of a part, without padding. `report` is called with the number done."""
        found, batch = np.zeros(1, np.float64, like=self.batches.like), self.batches.global_batch_size
        with self.topology.world.ledger.phase("evaluation"):
            for step in range(ceil(samples / batch)):
                found += self.play(self.batches.microbatches_of(part, step)).losses
                report(min((step + 1) * batch, samples))
            total = self.topology.data.all_reduce(self.on_host(found), "sum over samples")
            total = self.topology.pipeline.broadcast(total, "sum over samples", self.replica.last_rank)
            return total.tolist()[0]

    def play(self, microbatches: list) -> Any:
        """Play the pass of these microbatches, which has their results on the last stage's ranks."""
        (b, s), config = microbatches[0].tokens.shape, self.topology.config
        context = EVALUATION._replace(part=part_of(self.topology.context, config.cp_comm_type, s))
        work = self.make_pass(self.replica.model, self.region, self.replica.params, microbatches, [1.0],
                              self.replica.device_prototype, context)
        shape = b, s // config.sequence_shards, self.replica.model.hidden_size
        self.pipeline.play(work.compute, self.replica.device_prototype, shape, phases={"F": "evaluation"})
        return work

    def on_host(self, x) -> np.ndarray:
        """Return x on the host, once this rank's device has computed it: it may wait there for other ranks."""
        world = self.topology.world
        with world.watchdog.waiting(world.name, "sum over samples", world.others):
            return to_host(x)


def check_finite(total: float) -> None:
    """Raise UserError for a sum that is not finite."""
    if not np.isfinite(total):
        raise UserError(f"The sum over all samples is {total}: the model's logits are infinite or NaN. The model has "
                        "diverged in training, or needs a format with a larger range than its --dtype.")
