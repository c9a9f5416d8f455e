"""The fine-tuning of a BERT on a task: the trainer of pretraining, with another head."""
import time
from contextlib import ExitStack
from math import nan
from typing import Any

import numpy as np

from mpi_impl.checkpoints import on_disk
from mpi_impl.checkpoints.checkpoint import TOKENIZER
from mpi_impl.checkpoints.folder_lock import only_saver
from mpi_impl.comm.group import Group
from mpi_impl.data import saved_tokenizer
from mpi_impl.inference.replica import trained_replica
from mpi_impl.runtime.outputs import check_outputs
from reference.errors import UserError
from shardlab.evaluate.arguments import (check_architecture, check_tuning, complete_options, fine_tuning_length,
                                         optimizer_of)
from shardlab.evaluate.predictions import Predictions
from shardlab.evaluate.pretrained import Pretrained, architecture_of, find_pretrained
from shardlab.evaluate.progress import report_progress
from shardlab.evaluate.sums import check_finite
from shardlab.evaluate.tasks import TASKS
from shardlab.programs.settings import PretrainingSettings, precision
from shardlab.programs.training_program import TrainingProgram

# Options that the tuned weights depend on, which are saved with them.
OF_A_STEP = ("seed", "global_batch_size", "seq_length", "max_qa_length", "max_query_length", "doc_stride",
             "hidden_dropout", "attention_dropout", "lr", "fp16", "bf16")
QUIET = np.errstate(over="ignore", invalid="ignore")     # a run that diverges says so once, in a sentence


class FineTuning(TrainingProgram):
    """One rank's part of the program."""

    def __init__(self, args, ranks: Group):
        check_tuning(args)
        super().__init__(args, ranks)
        self.pretrained: Pretrained = ranks.broadcast_object(self.find_model)
        model = self.pretrained.model
        self.args, parallel, microbatches = complete_options(args, model, ranks.size)
        self.topology = self.connect(parallel)
        self.dataset: Any = None      # on each replica's first rank of a tensor group
        ranks.collect_objects(self.read)
        self.samples: dict[str, int] = ranks.broadcast_object(
            lambda: {part: self.dataset.samples(part) for part in self.dataset.parts})
        self.length = fine_tuning_length(self.args, self.samples["train"])
        self.check_memory(PretrainingSettings(self.args, parallel, optimizer_of(self.args, self.length.iterations),
                                              precision(self.args), microbatches, model.architecture), model)
        self.make_trainer()
        self.pretrained.load(self.trainer)
        self.batches = self.make_batches(self.dataset, microbatches)
        self.predictions = Predictions(trained_replica(self.trainer), self.make_batches(
            self.dataset, self.topology.pipeline.size), self.args.seq_length)
        self.make_metrics(self.length.iterations)

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
            self.dataset = TASKS[self.args.task].open(self.args, self.pretrained.tokenizer)

    # ---- the run ----

    def work(self) -> None:
        self.introduce()
        self.say(self.pretrained.describe())
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
        options = {name: value for name, value in vars(self.args).items() if name in OF_A_STEP}
        options |= {"tokenizer_type": tokenizer.name, TOKENIZER: tokenizer.fingerprint}
        self.save_checkpoint(options, lambda root: saved_tokenizer.save(tokenizer, root))


def metrics_of(part: str, found: dict[str, float]) -> dict[str, float]:
    """Return the figures of a part under the names that they have in a file of metrics."""
    return {f"{part}_{name.lower().replace(' ', '_')}": x for name, x in found.items()}


def describe_measures(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {x:.2%}" for name, x in found.items())
