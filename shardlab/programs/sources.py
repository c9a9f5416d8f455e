"""The data of a run, as rank 0 has prepared them and every rank that reads samples opens them."""
from collections.abc import Callable, Iterable
from typing import NamedTuple

from mpi_impl.data.blend import Blend, Samples
from mpi_impl.data.dataset import Dataset
from mpi_impl.data.tokenizer import Tokenizer
from reference.errors import UserError


class Sources(NamedTuple):
    """The data of a run, as tokens on disk, and the facts about them that all ranks need."""

    prefixes: list[str]             # of indexed data sets
    weights: list                   # fractions, by which they are blended
    vocab_size: int
    eod: int                        # the end-of-document token
    baseline: float | None          # the validation loss of a model without context, if it is known
    tokenizer: Tokenizer | None     # where the samples depend on it

    def open(self, open_dataset: Callable[[str, Tokenizer | None], Dataset]) -> Samples:
        """Open the samples of one data set or of a blend."""
        datasets = [open_dataset(prefix, self.tokenizer) for prefix in self.prefixes]
        return datasets[0] if len(datasets) == 1 else Blend(datasets, self.weights)


def check_same_tokenizer(paths: Iterable[str], tokenizers: list[Tokenizer]) -> None:
    """Raise UserError if a tokenizer was trained for each data set of a blend."""
    if len({tokenizer.fingerprint for tokenizer in tokenizers}) > 1:
        raise UserError(f"--data-path blends {' and '.join(paths)}, but a tokenizer that is trained on one is another "
                        "than one that is trained on the other. Give the one to use: --tokenizer-model, or "
                        "--tokenizer-type with its files.")
