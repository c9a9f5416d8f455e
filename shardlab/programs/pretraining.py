"""A training run from its options to its reports: the common part of the programs pretrain_gpt and pretrain_bert."""
import sys
import time
from abc import abstractmethod
from contextlib import ExitStack, nullcontext
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np

from mpi_impl import kernels
from mpi_impl.checkpoints import checkpoint
from mpi_impl.checkpoints.checkpoint import TOKENIZER
from mpi_impl.checkpoints.folder_lock import only_saver
from mpi_impl.checkpoints.huggingface import check_weights, load_weights, save_model
from mpi_impl.checkpoints.huggingface_config import check_vocabulary, notes, read_config
from mpi_impl.checkpoints.on_disk import Manifest, check_free, folder_of, read_manifest, saved
from mpi_impl.comm.group import Group, world
from mpi_impl.comm.heartbeats import long_work
from mpi_impl.data import saved_tokenizer
from mpi_impl.data.blend import parse_blend
from mpi_impl.data.cached import prepare
from mpi_impl.data.dataset import Dataset
from mpi_impl.data.indexed import fingerprint
from mpi_impl.data.tokenizer import Tokenizer
from mpi_impl.data.tokenizer_choice import TokenizerChoice
from mpi_impl.launch.option_fields import filled
from mpi_impl.launch.restarts import STOPPED
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.runtime.arrays import on_device
from mpi_impl.runtime.outputs import check_outputs
from mpi_impl.training.batches import Batches, needs_samples, whole_batch
from mpi_impl.training.trainer import StepResult, Trainer
from mpi_impl.training.verify import Verifier
from reference.costs.volumes import PassCounts
from reference.errors import UserError
from reference.parallel.stages import schedule_of
from shardlab.compare.recorder import RecordedSteps, facts_of
from shardlab.predict.rank import ImaginedWorld
from shardlab.programs.arguments import PretrainingSettings, check_restarts, saves_where_it_loads, settings_of
from shardlab.programs.divergence import DivergenceCheck
from shardlab.programs.introduction import introduction
from shardlab.programs.options import NAMES, OPTIONS
from shardlab.programs.program import Program, run_program
from shardlab.programs.sources import Sources, check_same_tokenizer
from shardlab.programs.stop_request import StopRequest
from shardlab.report import forecast, resident_memory, summary, throughput, traffic
from shardlab.report.metrics import Metrics
from shardlab.report.page.report import ReportedRun, closing, watch, write_report
from shardlab.report.timelines.tracing import TracedSteps


class Pretraining(Program):
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

    def conclude(self) -> None:
        """Finish the run after its last step. Called by all ranks."""

    def __init__(self, settings: PretrainingSettings, ranks: Group):
        super().__init__(settings.args, ranks)
        self.settings = settings
        self.loaded = ranks.broadcast_object(self.check_files)
        self.tokenizer: Tokenizer | None = None        # on rank 0 only
        self.of_a_step = settings.of_a_step()          # on rank 0 also the tokenizer's and the data's fingerprints
        self.sources = ranks.broadcast_object(self.prepare_data)
        self.topology = self.connect(settings.parallel)
        self.model = settings.model(self.sources.vocab_size)
        reader = needs_samples(self.model, self.topology) and self.topology.place.tensor == 0
        self.dataset = self.sources.open(self.open_dataset) if reader else None
        self.batches = Batches(self.dataset, self.model, self.topology, self.args.seq_length,
                               self.args.micro_batch_size, settings.microbatches, self.device.like)
        self.imagined = ImaginedWorld(self.model, settings.parallel, settings.precision, self.args.micro_batch_size,
                                      self.args.seq_length, settings.microbatches, cudnn=self.has_cudnn,
                                      optimizer=settings.optimizer)
        self.hosts, self.predicted, self.forecast = forecast.checked_memory(
            self.topology, self.imagined, self.device, self.args.offload_folder)
        self.resident = resident_memory.ResidentMemory(self.device.like) if self.args.log_throughput else None
        self.trainer = Trainer(ModelState(self.model, self.topology, self.args.seed, settings.precision,
                                          self.device.like, self.args.offload_folder), settings.optimizer,
                               replayed=self.args.cuda_graph_impl != "none")
        self.verifier = Verifier(self.trainer, settings.optimizer, self.args.seed) if self.args.verify else None
        self.load()
        self.divergence = DivergenceCheck(self.trainer, self.args.lr)
        if self.loaded:
            self.divergence.last_checkpoint = folder_of(self.args.load, self.loaded.iteration)
        self.traced = TracedSteps(self.topology) if self.args.trace else None
        self.watched: TracedSteps | None = None        # for --report without --trace
        self.recorded = self.record() if self.args.record else None
        self.measured = forecast.measure_rate(ranks, self.trainer.state.device_prototype)
        self.throughput = throughput.throughput_of(
            self.imagined, self.device.gpus, self.measured) if self.args.log_throughput else None
        self.metrics = Metrics(self.args.train_iters, self.args.global_batch_size * self.args.seq_length,
                               self.args.log_interval, self.args.metrics_file, speaks=self.first,
                               heads=self.model.heads, scaled=settings.precision.scaled,
                               begins=self.trainer.iteration, throughput=self.throughput,
                               layers_with_experts=sum(map(self.model.has_experts, range(self.model.num_layers))))
        self.evaluations = 0

    # ---- before the first step ----

    def check_files(self) -> Manifest | None:
        """Check, on rank 0, all outputs and inputs. Return the manifest of the checkpoint to resume from, if any."""
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
            check_weights(a.load_hf, self.settings.model(read_config(a.load_hf, self.architecture)["vocab_size"]))
        return manifest

    def prepare_data(self) -> Sources:
        """Tokenize the corpus, and check everything about it, on rank 0."""
        a = self.args
        weights, paths = zip(*(parse_blend(a.data_path) if a.data_path else [(1, None)]))
        prepared = [prepare(path, filled(TokenizerChoice, a), self.sentences, a.data_cache_path, self.say)
                    for path in paths]
        prefixes, tokenizer = [one.prefix for one in prepared], prepared[0].tokenizer
        check_same_tokenizer(paths, [one.tokenizer for one in prepared])
        if a.load_hf:
            check_vocabulary(a.load_hf, tokenizer)
        self.tokenizer = tokenizer
        self.of_a_step |= {TOKENIZER: tokenizer.fingerprint,
                           "the contents of the data": " ".join(map(fingerprint, prefixes))}
        if self.loaded:
            checkpoint.check_tokenizer(a.load, self.loaded, tokenizer)
        baseline = self.check_data(prefixes, tokenizer)
        return Sources(prefixes, list(weights), tokenizer.vocab_size, tokenizer.eod, baseline,
                       tokenizer if self.sentences else None)

    def check_data(self, prefixes: list[str], tokenizer: Tokenizer) -> float | None:
        """Check the samples, and return the baseline of a single data set."""
        datasets = [self.open_dataset(prefix, tokenizer) for prefix in prefixes]
        for dataset in datasets:
            dataset.check_vocabulary(tokenizer.vocab_size)
            dataset.batch("train", 0, 1)
            if self.args.eval_iters:
                dataset.batch("validation", 0, 1)
        return self.baseline(datasets[0], tokenizer.vocab_size) if self.args.eval_iters and not datasets[1:] else None

    def load(self) -> None:
        """Load the checkpoint or the weights with which the run begins, for the verifier, too."""
        if self.loaded:
            checkpoint.load(self.trainer, self.args.load, self.loaded)
        if self.args.load_hf:
            load_weights(self.trainer, self.args.load_hf)
        if self.verifier and (self.loaded or self.args.load_hf):
            self.verifier.take_over()

    def record(self) -> RecordedSteps:
        """Begin the recording for --record."""
        about = facts_of(self.trainer.state, self.settings.optimizer, self.args.global_batch_size, self.args.seq_length)
        return RecordedSteps(self.trainer.state, self.args.record, about, self.say)

    def claim_outputs(self, held: ExitStack) -> None:
        """Hold the folder of --save, to which another run may have saved since it was checked."""
        if self.args.save:
            self.folder = held.enter_context(only_saver(self.args.save, self.say))
            check_free(self.args.save, self.trainer.iteration + 1)
            assert self.tokenizer is not None
            saved_tokenizer.save(self.tokenizer, self.args.save)    # after all checks: it may replace another run's

    # ---- the run ----

    def work(self) -> None:
        self.say(introduction(self.settings, self.model, self.world.hosts()))
        self.say(self.device.description or kernels.describe(self.settings.precision.compute))
        self.say(forecast.describe(self.forecast, self.hosts))
        self.say(forecast.describe_time(self.imagined, self.measured))
        if self.throughput:
            self.say(throughput.describe_flops(self.imagined, self.throughput))
        if self.args.load_hf:
            self.say(f"it begins with the weights in {self.args.load_hf}; dropout {self.args.hidden_dropout:g}, and "
                     f"{self.args.attention_dropout:g} of attention's probabilities{notes(self.args.load_hf)}"
                     f"{self.tokenizer.note if self.tokenizer else ''}")
        if self.loaded:
            self.say(checkpoint.describe(self.args.load, self.loaded, self.of_a_step, self.settings.precision.main))
        elif self.args.load:
            self.say(f"{self.args.load} holds no checkpoint yet: the run begins with iteration 1")
        with np.errstate(over="ignore", invalid="ignore"):     # a run that diverges says so once, in a sentence
            last = self.train()
            self.evaluate(last)
        if self.args.save_hf:
            save_model(self.trainer, self.args.save_hf, self.tokenizer)
            self.say(f"\nthe model is in {self.args.save_hf}: transformers' from_pretrained opens it")
        with long_work(self.world):
            self.conclude()
            self.world.broadcast_object(lambda: None)     # the other replicas wait, however long that takes
        if self.traced:
            self.write_trace(self.traced)
        self.report()
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
            with self.tracing(iteration - first):
                batch = self.batches.microbatches_of("train", iteration - 1)
                observer = self.recorded.observer if self.recorded else None
                if self.verifier:
                    self.verifier.begin(batch, a.global_batch_size)
                result = self.trainer.step(batch, a.global_batch_size, observer)
            seconds = time.perf_counter() - began
            if self.recorded:
                self.recorded.write()
            self.divergence.step(iteration, result, batch, a.global_batch_size)
            self.metrics.step(iteration, result, seconds, self.verify(iteration, result))
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

    def tracing(self, step: int):
        """Return the context of a step of this run, counted from 0. A page shows the second, if there is one: the first
        also counts the bytes of activations.
        """
        if self.traced:
            return self.traced.step()
        if self.args.report and step < 2:
            self.watched = watch(self.topology, on_device(self.device.like))
            return self.watched.step()
        return self.recorded.playing() if self.recorded and not self.args.report else nullcontext()

    def verify(self, iteration: int, result: StepResult) -> str:
        """Compute the textbook's step with --verify, and describe how far the ranks are from it."""
        if self.verifier is None:
            return ""
        batch = None
        if self.dataset is not None and self.first:
            batch = whole_batch(self.dataset, self.model, "train", iteration - 1, self.args.global_batch_size)
        return self.verifier.check(batch, result)

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
        root, moved = self.world.broadcast_object(lambda: self.folder.place(), "the folder of --save")
        self.say(checkpoint.save(self.trainer, root, self.of_a_step))
        if self.tokenizer and not saved_tokenizer.is_saved(root):     # the folder was removed meanwhile
            saved_tokenizer.save(self.tokenizer, root)
        if moved:
            raise UserError(moved)
        self.divergence.last_checkpoint = folder_of(self.args.save, self.trainer.iteration)

    # ---- reports ----

    def report(self) -> None:
        """Compare what was sent and held with the prediction: in short, and in full for --verbose and --report."""
        run, ledger = self.facts(), traffic.pipeline_ledger(self.topology)
        said = closing(self.trainer, run, ledger)
        self.say(f"\n{said.full if self.args.verbose else summary.describe(said.short)}\n")
        if self.args.ledger and self.first:
            traffic.write_json(self.args.ledger, said.lines)
        if self.args.report:
            traced = self.traced or self.watched
            assert traced is not None
            write_report(self.args.report, self.trainer, traced, run, ledger)
            self.say(f"the report is in {self.args.report}: open it in a browser")

    def facts(self) -> ReportedRun:
        """Return what the page tells of this run."""
        a, steps, m = self.args, self.metrics.steps, self.settings.microbatches
        work = PassCounts(steps, steps * m, self.evaluations, self.evaluations * m, self.metrics.skipped)
        return ReportedRun(NAMES[self.architecture], self.model, self.settings.parallel, self.settings.precision,
                        a.micro_batch_size, a.seq_length, m, self.predicted, work, self.metrics.losses,
                        self.metrics.validation, self.sources.baseline, chosen(a), self.device.description,
                        self.written)

    def write_trace(self, traced: TracedSteps) -> None:
        folder, parallel = self.args.trace, self.settings.parallel
        elements = self.args.micro_batch_size * self.args.seq_length * self.args.hidden_size // parallel.sent_parts
        traced.write(folder, schedule_of(parallel, self.settings.microbatches),
                     elements * self.settings.precision.form.bytes)
        self.say(f"\nthe last {len(traced.steps)} steps are in {folder}: trace.json opens in https://ui.perfetto.dev, "
                 "and timeline.png shows the very last one next to its prediction")

    def report_outcome(self) -> None:
        if self.verifier:
            print(self.verifier.summary())
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
