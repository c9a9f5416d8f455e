"""The model that a language model must beat: it knows the frequency of each token, and nothing of its context."""
import numpy as np

from mpi_impl.data.gpt import GPTDataset
from mpi_impl.data.indexed import blocks


def unigram_cross_entropy(dataset: GPTDataset, vocab_size: int) -> float:
    """Return the loss on the validation part, in nats per token, of the token frequencies of the training part.

    Every token of the vocabulary is counted once more than it occurs, so that none has probability zero.
    """
    seen = count_tokens(dataset.targets("train"), vocab_size) + 1      # [V]
    asked = count_tokens(dataset.targets("validation"), vocab_size)    # [V]
    return float(asked @ -np.log(seen / seen.sum()) / asked.sum())


def count_tokens(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Count the occurrences of each token: int64 [V]."""
    counts = np.zeros(vocab_size, np.int64)
    for _, block in blocks(tokens):
        counts += np.bincount(block, minlength=vocab_size)
    return counts
