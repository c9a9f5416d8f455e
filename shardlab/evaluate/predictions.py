"""The probabilities that a tuned BERT gives to the answers of all samples of a part, on any ranks."""
from collections.abc import Callable
from math import ceil

import numpy as np

from mpi_impl.inference.replica import Replica
from mpi_impl.training.batches import Batches
from reference.models.bert import SCORES
from reference.models.model import sequences_of
from reference.ops import softmax
from reference.parallel.data_parallel import samples_of
from shardlab.evaluate.passes import LogitsPass
from shardlab.evaluate.sums import Sums


class Predictions(Sums):
    """Predictions for all batches and replicas. Of context-parallel ranks only the first, which has [CLS], has them."""

    def __init__(self, replica: Replica, batches: Batches, seq_length: int):
        super().__init__(replica, batches, LogitsPass)
        (head,) = replica.model.heads
        self.shape = (2, seq_length) if head == "span" else (sequences_of(replica.model) * SCORES[head],)

    def of_part(self, part: str, samples: int, report: Callable[[int], object]) -> np.ndarray:
        """Return the probabilities of each sample's answers, float64 [samples, n]; of spans, [samples, 2, s], of their
        first and last positions. `report` is called with the number of samples done.
        """
        place, d, batch = self.topology.place, self.topology.data.size, self.batches.global_batch_size
        logits = np.zeros((ceil(samples / batch) * batch, *self.shape))
        with self.topology.world.ledger.phase("evaluation"):
            for first in range(0, samples, batch):
                work = self.play(self.batches.microbatches_of(part, first // batch))
                for k, found in work.logits.items():
                    logits[first:][samples_of(place.data, k, d, len(found))] = self.on_host(found)
                report(min(first + batch, samples))
            self.topology.data.all_reduce(logits, "predictions")         # all other replicas' are 0
            self.topology.pipeline.broadcast(logits, "predictions", self.replica.last_rank)
        return softmax(logits[:samples])
