"""The fine-tuning of a BERT on a task: the trainer of pretraining, with another head."""
import time
from contextlib import ExitStack
from math import nan
from typing import Any

import numpy as np

from mpi_impl import kernels
from mpi_impl.checkpoints import checkpoint, on_disk
from mpi_impl.checkpoints.checkpoint import TOKENIZER
from mpi_impl.checkpoints.folder_lock import only_saver
from mpi_impl.comm.group import Group
from mpi_impl.data import saved_tokenizer
from mpi_impl.data.tokenizer import WordPieceTokenizer
from mpi_impl.inference.replica import trained_replica
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.runtime.outputs import check_outputs
from mpi_impl.training.batches import Batches
from mpi_impl.training.trainer import Trainer
from reference.errors import UserError
from reference.models.model import sequences_of
from shardlab.evaluate.arguments import (check_architecture, check_tuning, complete_options, fine_tuning_length,
                                         optimizer_of)
from shardlab.evaluate.glue import MNLI, QQP, PairsDataset
from shardlab.evaluate.predictions import Predictions
from shardlab.evaluate.pretrained import Pretrained, architecture_of, find_pretrained
from shardlab.evaluate.progress import report_progress
from shardlab.evaluate.race import RACEDataset
from shardlab.evaluate.squad import SQuADDataset
from shardlab.evaluate.sums import check_finite
from shardlab.evaluate.tuning_data import TuningDataset
from shardlab.predict.rank import ImaginedWorld
from shardlab.programs.arguments import PretrainingSettings, precision
from shardlab.programs.divergence import DivergenceCheck
from shardlab.programs.introduction import introduction
from shardlab.programs.program import Program
from shardlab.report import forecast
from shardlab.report.metrics import Metrics

# Options that the tuned weights depend on, which are saved with them.
OF_A_STEP = ("seed", "global_batch_size", "seq_length", "max_qa_length", "max_query_length", "doc_stride",
             "hidden_dropout", "attention_dropout", "lr", "fp16", "bf16")
QUIET = np.errstate(over="ignore", invalid="ignore")     # a run that diverges says so once, in a sentence


class FineTuning(Program):
    """One rank's part of the program."""

    def __init__(self, args, ranks: Group):
        check_tuning(args)
        super().__init__(args, ranks)
        self.pretrained: Pretrained = ranks.broadcast_object(self.find_model)
        self.model = self.pretrained.model
        self.args, self.parallel, self.microbatches = complete_options(args, self.model, ranks.size)
        args = self.args
        self.topology = self.connect(self.parallel)
        self.dataset: Any = None      # on each replica's first rank of a tensor group
        ranks.collect_objects(self.read)
        self.samples: dict[str, int] = ranks.broadcast_object(
            lambda: {part: self.dataset.samples(part) for part in self.dataset.parts})
        self.length = fine_tuning_length(args, self.samples["train"])
        self.optimizer = optimizer_of(args, self.length.iterations)
        imagined = ImaginedWorld(self.model, self.parallel, precision(args), args.micro_batch_size, args.seq_length,
                                 self.microbatches, cudnn=self.has_cudnn)
        self.hosts, _, self.forecast = forecast.checked_memory(self.topology, imagined, self.device,
                                                               args.offload_folder)
        self.trainer = Trainer(ModelState(self.model, self.topology, args.seed, precision(args), self.device.like,
                                          args.offload_folder), self.optimizer)
        self.pretrained.load(self.trainer)
        self.batches = self.make_batches(self.microbatches)
        self.predictions = Predictions(trained_replica(self.trainer),
                                       self.make_batches(self.topology.pipeline.size), args.seq_length)
        self.divergence = DivergenceCheck(self.trainer, args.lr)
        self.metrics = Metrics(self.length.iterations, args.global_batch_size * sequences_of(self.model)
                               * args.seq_length, args.log_interval, args.metrics_file, ranks.rank == 0,
                               self.model.heads, self.trainer.state.precision.scaled)

    # ---- before the first step ----

    def find_model(self) -> Pretrained:
        """Check, on rank 0, that the model is there, and that the outputs can be written."""
        check_outputs(self.args)
        with ExitStack() as held:
            self.claim_outputs(held)
        check_architecture(self.args, architecture_of(self.args))
        found = find_pretrained(self.args)
        if self.args.epochs == 0 and not found.tuned:
            raise UserError(f"--epochs is 0, but the model in {found.folder} has not been tuned on "
                            f"--task {self.args.task}. Choose at least 1, or load a tuned model.")
        return found

    def claim_outputs(self, held: ExitStack) -> None:
        """Hold the folder of --save, which must not have a checkpoint of another model."""
        if self.args.save:
            self.folder = held.enter_context(only_saver(self.args.save, self.say))
            if on_disk.saved(self.args.save):
                raise UserError(f"--save {self.args.save} already holds a checkpoint, which is not of the tuned model. "
                                "Choose another folder.")

    def read(self) -> None:
        """Read the samples on the ranks that need them: in a pipeline all ranks do, to know where padding begins."""
        if self.topology.place.tensor == 0:
            self.dataset = open_dataset(self.args, self.pretrained.tokenizer)

    def make_batches(self, microbatches: int) -> Batches:
        return Batches(self.dataset, self.model, self.topology, self.args.seq_length, self.args.micro_batch_size,
                       microbatches, self.device.like)

    # ---- the run ----

    def work(self) -> None:
        settings = PretrainingSettings(self.args, self.parallel, self.optimizer, self.trainer.state.precision,
                                       self.microbatches, self.model.architecture)
        self.say(introduction(settings, self.model, self.world.hosts()))
        self.say(f"{self.device.description or kernels.describe(precision(self.args).compute)}\n"
                 f"{forecast.describe(self.forecast, self.hosts)}\n{self.pretrained.describe()}")
        counts = ", ".join(f"{part} {n:,}" for part, n in self.samples.items())
        self.say(f"samples of {self.args.task}: {counts}; {self.length.iterations:,} iterations")
        self.train()
        if "test" in self.samples or not self.length.iterations:
            self.ask(self.last_part)
        if self.args.save:
            self.save()

    @QUIET
    def train(self) -> float:
        """Do all steps; after each epoch, and the last step, ask for the answers to the validation part.

        Returns the last of its figures, or nan if there is no step.
        """
        figure = nan
        for iteration in range(1, self.length.iterations + 1):
            began = time.perf_counter()
            batch = self.batches.microbatches_of("train", iteration - 1)
            result = self.trainer.step(batch, self.args.global_batch_size)
            self.divergence.step(iteration, result, batch, self.args.global_batch_size)
            self.metrics.step(iteration, result, time.perf_counter() - began)
            stop = self.args.exit_interval and iteration % self.args.exit_interval == 0
            if self.length.ends_epoch(iteration) or stop:
                figure = self.ask("validation")
            if stop:
                break
        return figure

    @property
    def last_part(self) -> str:
        """Return the part that a tuned model is measured on: "validation", where no test part is published."""
        return list(self.samples)[-1]

    def ask(self, part: str) -> float:
        """Measure the answers to a part, and return the most important figure, identical on every rank."""
        found = self.measures(part, self.answer(part))
        self.metrics.write(iteration=self.trainer.iteration, **metrics_of(part, found))
        self.say(f"{part} at {self.trainer.iteration:>6} | {describe_measures(found)}")
        return next(iter(found.values()))

    @QUIET
    def answer(self, part: str) -> np.ndarray:
        """Return the probabilities of all answers to a part: those of rank 0 count."""
        n = self.samples[part]
        return self.predictions.of_part(part, n, report_progress(n, f"samples of {part}", self.say))

    def measures(self, part: str, probabilities: np.ndarray) -> dict[str, float]:
        """Return the figures of rank 0's answers, on every rank. Raise UserError if they are not finite."""
        def measure() -> dict[str, float]:
            check_finite(probabilities.sum())
            return self.dataset.measures(part, probabilities)

        return self.world.broadcast_object(measure)

    def save(self) -> None:
        """Save the tuned model, with its tokenizer next to it."""
        tokenizer = self.pretrained.tokenizer
        settings = {name: value for name, value in vars(self.args).items() if name in OF_A_STEP}
        settings |= {"tokenizer_type": tokenizer.name, TOKENIZER: tokenizer.fingerprint}
        root, moved = self.world.broadcast_object(lambda: self.folder.place(), "the folder of --save")
        self.say(checkpoint.save(self.trainer, root, settings))
        self.world.broadcast_object(lambda: saved_tokenizer.save(tokenizer, root), "the tokenizer next to it")
        if moved:
            raise UserError(moved)


def open_dataset(args, tokenizer: WordPieceTokenizer) -> TuningDataset:
    """Return the samples of the task. Raise UserError for files that are not the task's."""
    common = args.data_path, tokenizer, args.seq_length, args.seed
    if args.task == "race":
        return RACEDataset(*common, args.max_qa_length)
    if args.task == "squad":
        return SQuADDataset(*common, args.max_query_length, args.doc_stride, args.max_answer_length)
    return PairsDataset(MNLI if args.task == "mnli" else QQP, *common)


def metrics_of(part: str, found: dict[str, float]) -> dict[str, float]:
    """Return the figures of a part under the names that they have in a file of metrics."""
    return {f"{part}_{name.lower().replace(' ', '_')}": x for name, x in found.items()}


def describe_measures(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {x:.2%}" for name, x in found.items())
