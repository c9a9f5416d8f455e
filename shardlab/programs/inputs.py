"""The inputs of pretraining, checked and prepared on rank 0 before the first step: data, a checkpoint, weights."""
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

from mpi_impl.checkpoints import checkpoint
from mpi_impl.checkpoints.folder_lock import only_saver
from mpi_impl.checkpoints.huggingface import check_weights, load_weights
from mpi_impl.checkpoints.huggingface_config import check_vocabulary, notes, read_config
from mpi_impl.checkpoints.on_disk import Manifest, check_free, read_manifest, saved
from mpi_impl.data.blend import Blend, Samples, parse_blend
from mpi_impl.data.cached import prepare
from mpi_impl.data.dataset import Dataset
from mpi_impl.data.indexed import fingerprint
from mpi_impl.data.tokenizer import Tokenizer
from mpi_impl.data.tokenizer_choice import TokenizerChoice
from mpi_impl.launch.option_fields import filled
from mpi_impl.runtime.outputs import check_outputs
from mpi_impl.training.trainer import Trainer
from reference.errors import UserError
from shardlab.programs.settings import PretrainingSettings, check_restarts, saves_where_it_loads

OpenDataset = Callable[[str, Tokenizer | None], Dataset]    # from a prefix; raises UserError if it holds no samples


class Sources(NamedTuple):
    """The data of a run, as tokens on disk, and the facts about them that all ranks need."""

    prefixes: list[str]             # of indexed data sets
    weights: list                   # fractions, by which they are blended
    vocab_size: int
    eod: int                        # the end-of-document token
    baseline: float | None          # the validation loss of a model without context, if it is known
    tokenizer: Tokenizer | None     # where the samples depend on it

    def open(self, open_dataset: OpenDataset) -> Samples:
        """Open the samples of one data set or of a blend."""
        datasets = [open_dataset(prefix, self.tokenizer) for prefix in self.prefixes]
        return datasets[0] if len(datasets) == 1 else Blend(datasets, self.weights)


class Inputs:
    """The inputs that a run's options name."""

    def __init__(self, settings: PretrainingSettings):
        self.settings, self.args = settings, settings.args
        self.loaded: Manifest | None = None            # of the checkpoint to resume from
        self.tokenizer: Tokenizer | None = None        # on rank 0 only
        self.of_a_step = settings.of_a_step()          # on rank 0 also the tokenizer's and the data's fingerprints

    # ---- on rank 0 ----

    def check_files(self) -> Manifest | None:
        """Check all outputs and inputs. Return the manifest of the checkpoint to resume from, if any."""
        a, manifest = self.args, None
        check_restarts(a)
        check_outputs(a)
        with only_saver(a.save) if a.save else nullcontext():       # it may be hours until the run needs it
            if a.load and (saved(a.load) or not saves_where_it_loads(a)):
                manifest = read_manifest(a.load)
                # With the checkpoint's vocabulary: the tokenizer, which decides it, is not known yet.
                checkpoint.check_model(a.load, manifest, self.settings.model(manifest.model["vocab_size"]))
                checkpoint.check_optimizer(a.load, manifest, a.optimizer)
                checkpoint.check_iterations(a.load, manifest, a.train_iters)
            if a.save:
                check_free(a.save, manifest.iteration + 1 if manifest else 1)
        if a.load_hf:
            config = read_config(a.load_hf, self.settings.architecture)
            check_weights(a.load_hf, self.settings.model(config["vocab_size"]))
        return manifest

    def prepare(self, open_dataset: OpenDataset, baseline: Callable[[Dataset, int], float | None], sentences: bool,
                say: Callable[[str], None]) -> Sources:
        """Tokenize the corpus, and check everything about it."""
        a = self.args
        weights, paths = zip(*(parse_blend(a.data_path) if a.data_path else [(1, None)]))
        prepared = [prepare(path, filled(TokenizerChoice, a), sentences, a.data_cache_path, say) for path in paths]
        prefixes, tokenizer = [one.prefix for one in prepared], prepared[0].tokenizer
        check_same_tokenizer(paths, [one.tokenizer for one in prepared])
        if a.load_hf:
            check_vocabulary(a.load_hf, tokenizer)
        self.tokenizer = tokenizer
        self.of_a_step |= {checkpoint.TOKENIZER: tokenizer.fingerprint,
                           "the contents of the data": " ".join(map(fingerprint, prefixes))}
        if self.loaded:
            checkpoint.check_tokenizer(a.load, self.loaded, tokenizer)
        datasets = [open_dataset(prefix, tokenizer) for prefix in prefixes]
        for dataset in datasets:
            self.check_samples(dataset, tokenizer)
        known = baseline(datasets[0], tokenizer.vocab_size) if a.eval_iters and not datasets[1:] else None
        return Sources(prefixes, list(weights), tokenizer.vocab_size, tokenizer.eod, known,
                       tokenizer if sentences else None)

    def check_samples(self, dataset: Dataset, tokenizer: Tokenizer) -> None:
        """Raise UserError for tokens that the tokenizer does not have, and for a part without samples."""
        dataset.check_vocabulary(tokenizer.vocab_size)
        dataset.batch("train", 0, 1)
        if self.args.eval_iters:
            dataset.batch("validation", 0, 1)

    # ---- on all ranks ----

    def load(self, trainer: Trainer) -> None:
        """Load the checkpoint or the weights with which the run begins."""
        if self.loaded:
            checkpoint.load(trainer, self.args.load, self.loaded)
        if self.args.load_hf:
            load_weights(trainer, self.args.load_hf)

    def describe(self) -> str:
        """Describe, on rank 0, what the run begins with; "" for initial values."""
        a = self.args
        if a.load_hf:
            return (f"it begins with the weights in {a.load_hf}; dropout {a.hidden_dropout:g}, and "
                    f"{a.attention_dropout:g} of attention's probabilities{notes(a.load_hf)}"
                    f"{self.tokenizer.note if self.tokenizer else ''}")
        if self.loaded:
            return checkpoint.describe(a.load, self.loaded, self.of_a_step, self.settings.precision.main)
        return f"{a.load} holds no checkpoint yet: the run begins with iteration 1" if a.load else ""


def check_same_tokenizer(paths: Iterable[Any], tokenizers: list[Tokenizer]) -> None:
    """Raise UserError if a tokenizer was trained for each data set of a blend."""
    if len({tokenizer.fingerprint for tokenizer in tokenizers}) > 1:
        raise UserError(f"--data-path blends {' and '.join(paths)}, but a tokenizer that is trained on one is another "
                        "than one that is trained on the other. Give the one to use: --tokenizer-model, or "
                        "--tokenizer-type with its files.")
