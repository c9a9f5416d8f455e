"""Which samples a replica sees, and how they reach the ranks of its tensor group."""
from collections.abc import Iterator

import numpy as np

from mpi_impl.comm.topology import Topology
from mpi_impl.data.gpt import GPTDataset
from reference.data_parallel import samples_of


class Batches:
    """Global batches of B sequences, dealt out to d replicas in microbatches of b.

    Together the replicas get the batch that one process would; `samples_of` in reference/data_parallel.py says how it
    is dealt out.
    """

    def __init__(self, dataset: GPTDataset | None, topology: Topology, seq_length: int, micro_batch_size: int,
                 microbatches: int):
        """`dataset` is needed on tensor rank 0 of each replica only; it reads for the others."""
        self.dataset, self.topology = dataset, topology
        self.shape = (micro_batch_size, seq_length + 1)
        self.microbatches = microbatches
        self.global_batch_size = micro_batch_size * microbatches * topology.data.size

    def microbatches_of(self, part: str, step: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """This replica's tokens and targets, int64 [b, s] each, of global batch `step`, counted from 0."""
        b, d, r = self.shape[0], self.topology.data.size, self.topology.place.data
        for k in range(self.microbatches):
            window = np.zeros(self.shape, np.int64)
            if self.dataset is not None:
                first = samples_of(r, k, d, b).start
                window[...] = self.dataset.batch(part, step * self.global_batch_size + first, b)
            with self.topology.world.ledger.phase("data"):
                self.topology.tensor.broadcast(window, "batch")
            yield window[:, :-1], window[:, 1:]


def whole_batch(dataset: GPTDataset, part: str, step: int, global_batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets [B, s] of a whole global batch, for the run in one process."""
    window = dataset.batch(part, step * global_batch_size, global_batch_size)
    return window[:, :-1], window[:, 1:]
