"""The samples that a replica sees, and their way to the ranks of its tensor group."""
import numpy as np

from mpi_impl.comm.topology import Topology
from mpi_impl.data.blend import Samples
from mpi_impl.runtime.arrays import moved_to
from reference.config import ModelConfig
from reference.models.model import batch_type
from reference.parallel.data_parallel import samples_of
from reference.params import HOST
from reference.positions import SequencePart, zigzag


class Batches:
    """Global batches of B samples, dealt out to d replicas in microbatches of b.

    Together the replicas get the batch that one process would; `samples_of` in reference/parallel/data_parallel.py says
    how it is dealt out.
    """

    def __init__(self, dataset: Samples | None, model: ModelConfig, topology: Topology, seq_length: int,
                 micro_batch_size: int, microbatches: int, like=HOST):
        """Read from the dataset, which is needed on tensor rank 0 of those that read (`needs_samples`) only.

        `like` is an array of the library that the batches shall belong to.
        """
        self.dataset, self.model, self.topology, self.like = dataset, model, topology, like
        self.unpack = batch_type(model).unpack
        self.shape = (micro_batch_size, batch_type(model).width(seq_length))
        self.microbatches = microbatches
        self.positions = topology.context and SequencePart(topology.context.rank,
                                                           zigzag(topology.context.size, seq_length))
        self.global_batch_size = micro_batch_size * microbatches * topology.data.size

    def microbatches_of(self, part: str, step: int) -> list:
        """Return this replica's batches (reference/batches.py) of global batch `step`, counted from 0.

        Ranks that need not read get arrays of the same shapes, with nothing in them.
        """
        batches = [self.unpack(moved_to(self.rows(part, step, k), self.like)) for k in range(self.microbatches)]
        return batches if self.positions is None else [batch.at(self.positions) for batch in batches]

    def rows(self, part: str, step: int, k: int) -> np.ndarray:
        """Return the samples of microbatch k, int64 [b, width]."""
        if not needs_samples(self.model, self.topology):
            return np.broadcast_to(np.int64(0), self.shape)
        b, rows = self.shape[0], np.zeros(self.shape, np.int64)
        if self.dataset is not None:
            first = samples_of(self.topology.place.data, k, self.topology.data.size, b).start
            rows[...] = self.dataset.batch(part, step * self.global_batch_size + first, b)
        with self.topology.world.ledger.phase("data"):
            return self.topology.tensor.broadcast(rows, "batch")


def needs_samples(model: ModelConfig, topology: Topology) -> bool:
    """Report whether a rank needs what is in the samples.

    A pipeline's first and last rank do: they have the embedding and the loss. (In a V the first has both, and the last
    reads for nothing.) Of a BERT all do, for every layer must know where the padding begins.
    """
    return not model.causal or topology.place.pipeline in (0, topology.pipeline.size - 1)


def whole_batch(dataset: Samples, model: ModelConfig, part: str, step: int, global_batch_size: int):
    """Return a whole global batch, for the run in one process."""
    return batch_type(model).unpack(dataset.batch(part, step * global_batch_size, global_batch_size))
