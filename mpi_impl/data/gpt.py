"""Samples for a GPT: windows of seq_length + 1 tokens, and their order."""
import numpy as np

from mpi_impl.data.dataset import Dataset
from mpi_impl.data.indexed import IndexedDataset
from reference.errors import UserError


class GPTDataset(Dataset):
    """Samples of an indexed data set, in three parts.

    Sample j is the tokens from j * seq_length up to and including (j + 1) * seq_length of the flat token stream: inputs
    and, one further on, targets. So every token is a target once, except the first, and a remainder of fewer than
    seq_length at the end that fills no sample. Documents follow one another with an end-of-document token between, and
    attention crosses it, as by Megatron's default.

    Raises UserError for a split that cannot be read and for data too short for one sample.
    """

    def __init__(self, indexed: IndexedDataset, seq_length: int, seed: int, split: str = "969,30,1"):
        n = (len(indexed.tokens) - 1) // seq_length
        if n < 1:
            raise UserError(f"{indexed.prefix}.bin holds {len(indexed.tokens):,} tokens, too few for one sample of "
                            f"--seq-length {seq_length} + 1. Give more text or a smaller --seq-length.")
        super().__init__(indexed, seq_length, seed, split, n)

    def batch(self, part: str, first_sample: int, count: int) -> np.ndarray:
        """Return samples as the base class says: int64 [count, seq_length + 1]."""
        starts = self.order(part, first_sample, count) * self.seq_length
        window = np.arange(self.seq_length + 1)
        return self.indexed.tokens[starts[:, None] + window].astype(np.int64)  # [count, 1] + [s + 1]

    def targets(self, part: str) -> np.ndarray:
        """Return all tokens that the part's samples predict, in stored order and type: [samples * seq_length]."""
        samples = self.ranges[part]
        return self.indexed.tokens[samples.start * self.seq_length + 1:samples.stop * self.seq_length + 1]
