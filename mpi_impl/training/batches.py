"""Which samples a replica sees, and how they reach the ranks of its tensor group."""
import numpy as np

from mpi_impl.arrays import moved_to
from mpi_impl.comm.topology import Topology
from mpi_impl.data.gpt import GPTDataset
from reference.data_parallel import samples_of
from reference.params import HOST


class Batches:
    """Global batches of B sequences, dealt out to d replicas in microbatches of b.

    Together the replicas get the batch that one process would; `samples_of` in reference/data_parallel.py says how it
    is dealt out.
    """

    def __init__(self, dataset: GPTDataset | None, topology: Topology, seq_length: int, micro_batch_size: int,
                 microbatches: int, like=HOST):
        """`dataset` is needed on tensor rank 0 of a pipeline's first and last ranks only; it reads for the others.

        `like` is an array of the library that the batches shall belong to.
        """
        self.dataset, self.topology, self.like = dataset, topology, like
        self.shape = (micro_batch_size, seq_length + 1)
        self.microbatches = microbatches
        self.global_batch_size = micro_batch_size * microbatches * topology.data.size

    def microbatches_of(self, part: str, step: int) -> list[tuple]:
        """This replica's tokens and targets, int64 [b, s] each, of global batch `step`, counted from 0.

        A pipeline's first and last rank read: they have the embedding and the loss. (In a V the first has both, and the
        last reads for nothing.) Those between get arrays of the same shape, with nothing in them.
        """
        windows = [moved_to(self.window(part, step, k), self.like) for k in range(self.microbatches)]
        return [(window[:, :-1], window[:, 1:]) for window in windows]

    def window(self, part: str, step: int, k: int) -> np.ndarray:
        """int64 [b, s + 1]: tokens, and shifted by one the targets, of microbatch k."""
        if not reads(self.topology):
            return np.broadcast_to(np.int64(0), self.shape)
        b, window = self.shape[0], np.zeros(self.shape, np.int64)
        if self.dataset is not None:
            first = samples_of(self.topology.place.data, k, self.topology.data.size, b).start
            window[...] = self.dataset.batch(part, step * self.global_batch_size + first, b)
        with self.topology.world.ledger.phase("data"):
            return self.topology.tensor.broadcast(window, "batch")


def reads(topology: Topology) -> bool:
    """Whether a rank needs what is in the samples."""
    return topology.place.pipeline in (0, topology.pipeline.size - 1)


def whole_batch(dataset: GPTDataset, part: str, step: int, global_batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets [B, s] of a whole global batch, for the run in one process."""
    window = dataset.batch(part, step * global_batch_size, global_batch_size)
    return window[:, :-1], window[:, 1:]
