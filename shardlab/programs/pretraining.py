"""A training run from its options to its reports: the common part of the programs pretrain_gpt and pretrain_bert."""
import sys
import time
from abc import abstractmethod
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np

from mpi_impl.checkpoints.folder_lock import only_saver
from mpi_impl.checkpoints.huggingface import save_model
from mpi_impl.checkpoints.on_disk import check_free, folder_of
from mpi_impl.comm.group import Group, world
from mpi_impl.comm.heartbeats import long_work
from mpi_impl.data import saved_tokenizer
from mpi_impl.data.dataset import Dataset
from mpi_impl.data.tokenizer import Tokenizer
from mpi_impl.launch.restarts import STOPPED
from mpi_impl.training.batches import needs_samples
from reference.costs.volumes import PassCounts
from shardlab.programs.inputs import Inputs, Sources
from shardlab.programs.observers import Observers
from shardlab.programs.options import NAMES, OPTIONS
from shardlab.programs.program import run_program
from shardlab.programs.settings import PretrainingSettings, settings_of
from shardlab.programs.stop_request import StopRequest
from shardlab.programs.training_program import TrainingProgram
from shardlab.report import resident_memory
from shardlab.report.page.report import ReportedRun


class Pretraining(TrainingProgram):
    """One rank's part of a run. Subclasses define the methods that depend on the model."""

    architecture: str           # of ModelConfig
    sentences = False           # whether samples are made of sentences
    written = ""                # text that the trained model has written

    @classmethod
    def start(cls, given: dict[str, Any]) -> None:
        """Check the given options, and run the program on all ranks of the world."""
        settings = settings_of(given, OPTIONS[cls.architecture], world().size, cls.architecture)
        run_program(partial(cls, settings), settings.args)

    @abstractmethod
    def open_dataset(self, prefix: str, tokenizer: Tokenizer | None) -> Dataset:
        """Open the samples of an indexed data set. Raises UserError if there are none."""

    def baseline(self, dataset: Dataset, vocab_size: int) -> float | None:
        """Return the validation loss of a model without context. It is not known for masked tokens."""
        return None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer, on rank 0."""
        return self.inputs.tokenizer

    def conclude(self) -> None:
        """Finish the run after its last step. Called by all ranks."""

    def __init__(self, settings: PretrainingSettings, ranks: Group):
        super().__init__(settings.args, ranks)
        self.inputs = Inputs(settings)
        self.inputs.loaded = ranks.broadcast_object(self.inputs.check_files)
        self.sources = ranks.broadcast_object(self.prepare_data)
        self.topology = self.connect(settings.parallel)
        model = settings.model(self.sources.vocab_size)
        reader = needs_samples(model, self.topology) and self.topology.place.tensor == 0
        self.dataset = self.sources.open(self.open_dataset) if reader else None
        self.check_memory(settings, model)
        self.resident = resident_memory.ResidentMemory(self.device.like) if self.args.log_throughput else None
        self.make_trainer(replayed=self.args.cuda_graph_impl != "none")
        self.batches = self.make_batches(self.dataset, settings.microbatches)
        self.inputs.load(self.trainer)
        if self.inputs.loaded:
            self.divergence.last_checkpoint = folder_of(self.args.load, self.inputs.loaded.iteration)
        self.observers = Observers(self, self.dataset, loaded=bool(self.inputs.loaded or self.args.load_hf))
        self.make_metrics(self.args.train_iters, self.observers.throughput)
        self.evaluations = 0

    def prepare_data(self) -> Sources:
        """Tokenize the corpus, and check everything about it, on rank 0."""
        return self.inputs.prepare(self.open_dataset, self.baseline, self.sentences, self.say)

    def claim_outputs(self, held: ExitStack) -> None:
        """Hold the folder of --save, to which another run may have saved since it was checked."""
        if self.args.save:
            self.folder = held.enter_context(only_saver(self.args.save, self.say))
            check_free(self.args.save, self.trainer.iteration + 1)
            assert self.tokenizer is not None
            saved_tokenizer.save(self.tokenizer, self.args.save)    # after all checks: it may replace another run's

    # ---- the run ----

    def work(self) -> None:
        self.introduce()
        self.observers.introduce()
        if about := self.inputs.describe():
            self.say(about)
        with np.errstate(over="ignore", invalid="ignore"):     # a run that diverges says so once, in a sentence
            last = self.train()
            self.evaluate(last)
        if self.args.save_hf:
            save_model(self.trainer, self.args.save_hf, self.tokenizer)
            self.say(f"\nthe model is in {self.args.save_hf}: transformers' from_pretrained opens it")
        with long_work(self.world):
            self.conclude()
            self.world.broadcast_object(lambda: None)     # the other replicas wait, however long that takes
        self.observers.write_trace()
        self.observers.report(self.facts())
        if self.first:
            self.report_outcome()

    def train(self) -> int:
        """Train until --train-iters or --exit-interval says stop, and return the last iteration. Leave the program on
        request, with --exit-signal-handler.
        """
        a = self.args
        request = StopRequest(self.world) if a.exit_signal_handler else None
        first = self.trainer.iteration + 1
        for iteration in range(first, a.train_iters + 1):
            began = time.perf_counter()
            self.trainer.measured = iteration == first     # counting bytes takes time, and all steps hold the same
            with self.observers.tracing(iteration - first):
                batch = self.batches.microbatches_of("train", iteration - 1)
                result = self.trainer.step(batch, a.global_batch_size, self.observers.begin(batch))
            seconds = time.perf_counter() - began
            if self.observers.recorded:
                self.observers.recorded.write()
            self.divergence.step(iteration, result, batch, a.global_batch_size)
            self.metrics.step(iteration, result, seconds, self.observers.end(iteration, result))
            if self.resident and iteration == first:
                self.say(resident_memory.describe(self.world, self.resident, self.forecast, self.args.verify))
            last = iteration == a.train_iters or (a.exit_interval and iteration % a.exit_interval == 0)
            stop = request is not None and not last and request.agreed()
            if a.save and (last or stop or (a.save_interval and iteration % a.save_interval == 0)):
                self.save()
            if stop:
                self.say(f"stopped by SIGTERM: --load {a.save} resumes after iteration {iteration}")
                sys.exit(STOPPED)
            if last:
                break
            if iteration % a.eval_interval == 0:
                self.evaluate(iteration)
        return iteration

    def evaluate(self, iteration: int) -> None:
        """Compute each head's mean loss over the first --eval-iters global batches of the validation part."""
        if self.args.eval_iters == 0:
            return
        losses = [self.trainer.evaluate(self.batches.microbatches_of("validation", i), self.args.global_batch_size)
                  for i in range(self.args.eval_iters)]
        self.evaluations += len(losses)
        means = tuple(np.mean(losses, 0).tolist())
        self.divergence.evaluation(iteration, sum(means))
        self.metrics.evaluation(iteration, means)

    def save(self) -> None:
        self.save_checkpoint(self.inputs.of_a_step, self.save_tokenizer)
        self.divergence.last_checkpoint = folder_of(self.args.save, self.trainer.iteration)

    def save_tokenizer(self, root: str) -> None:
        """Save the tokenizer once more, on rank 0, if the folder was removed meanwhile."""
        if self.tokenizer and not saved_tokenizer.is_saved(root):
            saved_tokenizer.save(self.tokenizer, root)

    # ---- reports ----

    def facts(self) -> ReportedRun:
        """Return what the page tells of this run."""
        a, steps, m = self.args, self.metrics.steps, self.settings.microbatches
        work = PassCounts(steps, steps * m, self.evaluations, self.evaluations * m, self.metrics.skipped)
        return ReportedRun(NAMES[self.architecture], self.model, self.settings.parallel, self.settings.precision,
                           a.micro_batch_size, a.seq_length, m, self.predicted, work, self.metrics.losses,
                           self.metrics.validation, self.sources.baseline, chosen(a), self.device.description,
                           self.written)

    def report_outcome(self) -> None:
        if self.observers.verifier:
            print(self.observers.verifier.summary())
        if self.metrics.skipped == self.metrics.steps:
            follows = self.settings.precision.scaling.loss_scale is None
            print("note: every iteration was skipped, since gradients overflow float16, and nothing was learnt. " + (
                "Train longer, or choose a smaller --initial-loss-scale." if follows else
                "Choose a smaller --loss-scale."))
        if self.sources.baseline is not None:
            seen = self.args.eval_iters * self.args.global_batch_size
            print(f"validation loss {self.metrics.validation[-1][1]:.4f} nats per token, on {seen:,} samples; a "
                  f"unigram model of the corpus gives {self.sources.baseline:.4f}, on all of the validation part")
        if self.args.plot:
            from shardlab.report.losses import plot_losses  # matplotlib takes a second to import
            plot_losses(self.args.plot, self.metrics.losses, self.metrics.validation, self.sources.baseline)
            print(f"losses drawn in {self.args.plot}")


def chosen(args: Any) -> dict[str, Any]:
    """Return the options that differ from their defaults, by name."""
    return {one.name: getattr(args, one.name) for one in fields(args) if getattr(args, one.name) != one.default}
