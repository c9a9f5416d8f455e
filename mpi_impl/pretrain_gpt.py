"""Train a GPT: `mpirun -np 8 python -m mpi_impl.pretrain_gpt --tensor-model-parallel-size 4 ...`."""
import os
import time
from contextlib import nullcontext

import numpy as np

from mpi_impl import kernels
from mpi_impl.checkpoints import checkpoint
from mpi_impl.checkpoints.checkpoint import TOKENIZER
from mpi_impl.checkpoints.gpt2_config import check_vocabulary, read_config
from mpi_impl.checkpoints.huggingface import check_weights, load_weights, save_model
from mpi_impl.checkpoints.on_disk import Manifest, check_free, folder_of, read_manifest
from mpi_impl.comm.clock import VirtualClock, WallClock
from mpi_impl.comm.group import Group, Instruments, world
from mpi_impl.comm.ledger import Ledger
from mpi_impl.comm.topology import connect
from mpi_impl.comm.trace import Trace
from mpi_impl.comm.watchdog import Watchdog
from mpi_impl.data.gpt import GPTDataset
from mpi_impl.data.indexed import IndexedDataset, fingerprint
from mpi_impl.data.prepare import prepare
from mpi_impl.data.tokenizer import Tokenizer
from mpi_impl.data.unigram import unigram_cross_entropy
from mpi_impl.device import device_of
from mpi_impl.entry import end_all_from_thread, run
from mpi_impl.files import check_folder, check_writable, writing
from mpi_impl.recording.recorder import RecordedSteps, description
from mpi_impl.reports import forecast
from mpi_impl.reports import memory
from mpi_impl.reports import traffic
from mpi_impl.reports.introduction import introduction
from mpi_impl.reports.metrics import Metrics
from mpi_impl.timelines.tracing import TIMELINE, TRACE, TracedSteps
from mpi_impl.training.arguments import Settings, parse
from mpi_impl.training.batches import Batches, reads, whole_batch
from mpi_impl.training.divergence import DivergenceCheck
from mpi_impl.training.sample import sample
from mpi_impl.training.trainer import StepResult, Trainer
from mpi_impl.training.verify import Verifier
from reference.stages import schedule_of
from reference.traffic import Work


def main(argv: list[str] | None = None) -> None:
    settings = parse(argv, world().size)
    Pretraining(settings, world(instruments(settings.args))).run()


def instruments(args) -> Instruments:
    """What watches the ranks in this run: the ledger, the trace, and the time limit of every wait."""
    clock = VirtualClock() if args.trace_clock == "virtual" else WallClock()
    return Instruments(trace=Trace(clock),
                       watchdog=Watchdog(60 * args.distributed_timeout_minutes, give_up))


def give_up(waited: str) -> None:
    """Ends the run, from the thread that watches over a rank's waits."""
    end_all_from_thread(f"error: rank {world().rank} of {world().size} has waited for {waited}, which is as long as "
                        "--distributed-timeout-minutes allows. Who is waited for has stopped, is too busy, or waits "
                        "for such a rank in turn: look there, or raise the limit.", 1)


class Pretraining:
    """One rank's part of a run."""

    def __init__(self, settings: Settings, ranks: Group):
        self.settings, self.args, self.world = settings, settings.args, ranks
        self.first = ranks.rank == 0
        self.device = device_of(self.args.device, ranks, self.args.distributed_backend)
        ranks.instruments.carriers = self.device.carriers
        self.loaded = ranks.from_first(self.check_files)
        self.tokenizer: Tokenizer | None = None        # on rank 0 only
        self.of_a_step = settings.of_a_step()          # with what rank 0 alone knows
        prefix, vocab_size, self.eod, self.unigram = ranks.from_first(self.prepare_data)
        self.topology = connect(ranks, settings.parallel)
        reader = reads(self.topology) and self.topology.place.tensor == 0
        self.dataset = self.open_dataset(prefix) if reader else None
        self.batches = Batches(self.dataset, self.topology, self.args.seq_length, self.args.micro_batch_size,
                               settings.microbatches, self.device.like)
        self.model = settings.model(vocab_size)
        self.plan = forecast.Plan(self.model, settings.parallel, settings.precision, self.args.micro_batch_size,
                                  self.args.seq_length, settings.microbatches,
                                  self.args.offload_folder is not None or self.device.memory is not None)
        self.hosts = forecast.hosts_of(ranks, self.topology.place.pipeline, self.device.memory)
        self.forecast = forecast.check_memory(self.hosts, self.plan)
        self.trainer = Trainer(self.model, settings.optimizer, self.topology, self.args.seed, settings.precision,
                               self.device.like, self.args.offload_folder)
        self.verifier = Verifier(self.trainer, settings.optimizer, self.args.seed) if self.args.verify else None
        self.load()
        self.divergence = DivergenceCheck(self.trainer, self.args.lr)
        if self.loaded:
            self.divergence.last_checkpoint = folder_of(self.args.load, self.loaded.iteration)
        self.traced = TracedSteps(self.topology) if self.args.trace else None
        self.recorded = self.record() if self.args.record else None
        self.metrics = Metrics(self.args.train_iters, self.args.global_batch_size * self.args.seq_length,
                               self.args.log_interval, self.args.metrics_file, speaks=self.first,
                               scaled=settings.precision.scaled, begins=self.trainer.iteration)
        self.evaluations = 0

    # ---- before the first step ----

    def check_files(self) -> Manifest | None:
        """On rank 0: what will be written can be, and what is to be loaded is there. -> the checkpoint, if one is."""
        self.check_outputs()
        loaded = self.check_checkpoints()
        self.check_weights()
        return loaded

    def check_outputs(self) -> None:
        """Every file that will be written can be."""
        for folder in (self.args.trace, self.args.offload_folder, self.args.save_hf, self.args.record):
            if folder:
                check_folder(folder)
        traces = [os.path.join(self.args.trace, name) for name in (TRACE, TIMELINE)] if self.args.trace else []
        for path in (self.args.metrics_file, self.args.ledger, self.args.plot, *traces):
            if path:
                check_writable(path, self.args.data_path)

    def check_checkpoints(self) -> Manifest | None:
        """The checkpoint to go on from is there, with something left to do, and new ones overwrite none."""
        a, manifest = self.args, None
        if a.load:
            manifest = read_manifest(a.load)
            # As far as it is known yet: the tokenizer decides the size of the vocabulary.
            checkpoint.check_model(a.load, manifest, self.settings.model(manifest.model["vocab_size"]))
            checkpoint.check_iterations(a.load, manifest, a.train_iters)
        if a.save:
            check_folder(a.save)
            check_free(a.save, manifest.iteration + 1 if manifest else 1)
        return manifest

    def check_weights(self) -> None:
        """The weights to begin with are all there, and have the shapes that their config.json asks for."""
        folder = self.args.load_hf
        if folder:
            check_weights(folder, self.settings.model(read_config(folder)["vocab_size"]))

    def prepare_data(self) -> tuple[str, int, int, float | None]:
        """On rank 0: the corpus as tokens on disk, and whatever is wrong with them is said now.

        -> where they are, the size of the vocabulary, the end-of-document token, a unigram model's validation loss
        """
        a = self.args
        prefix, self.tokenizer = prepare(a.data_path, a.tokenizer_type, a.vocab_size, a.vocab_file, a.merge_file,
                                         a.data_cache_path, report=self.say)
        if a.load_hf:
            check_vocabulary(a.load_hf, self.tokenizer)
        self.of_a_step |= {TOKENIZER: self.tokenizer.fingerprint, "the contents of the data": fingerprint(prefix)}
        if self.loaded:
            checkpoint.check_tokenizer(a.load, self.loaded, self.tokenizer)
        vocab_size, dataset = self.tokenizer.vocab_size, self.open_dataset(prefix)
        dataset.check_vocabulary(vocab_size)
        dataset.batch("train", 0, 1)
        unigram = None
        if a.eval_iters:
            dataset.batch("validation", 0, 1)
            unigram = unigram_cross_entropy(dataset, vocab_size)
        return prefix, vocab_size, self.tokenizer.eod, unigram

    def load(self) -> None:
        """What the run begins with, if it is no beginning; and the textbook beside it, if there is one."""
        if self.loaded:
            checkpoint.load(self.trainer, self.args.load, self.loaded)
        if self.args.load_hf:
            load_weights(self.trainer, self.args.load_hf)
        if self.verifier and (self.loaded or self.args.load_hf):
            self.verifier.take_over()

    def record(self) -> RecordedSteps:
        about = description(self.trainer, self.args.global_batch_size, self.args.seq_length)
        return RecordedSteps(self.trainer, self.args.record, about, self.say)

    def open_dataset(self, prefix: str) -> GPTDataset:
        return GPTDataset(IndexedDataset(prefix), self.args.seq_length, self.args.seed, self.args.split)

    # ---- the run ----

    def run(self) -> None:
        self.say(introduction(self.settings, self.model))
        self.say(self.device.told or kernels.told())
        self.say(forecast.told(self.forecast, self.hosts))
        self.say(forecast.time_told(self.world, self.plan, self.args.global_batch_size, self.trainer.near))
        if self.args.load_hf:
            self.say(f"it begins with the weights in {self.args.load_hf}; dropout {self.args.hidden_dropout:g}, and "
                     f"{self.args.attention_dropout:g} of attention's probabilities")
        if self.loaded:
            self.say(checkpoint.told(self.args.load, self.loaded, self.of_a_step, self.settings.precision.main))
        with np.errstate(over="ignore", invalid="ignore"):     # a run that diverges says so once, in a sentence
            last = self.train()
            self.evaluate(last)
        if self.args.save_hf:
            save_model(self.trainer, self.args.save_hf, self.tokenizer)
            self.say(f"\nthe model is in {self.args.save_hf}: transformers' GPT2LMHeadModel.from_pretrained opens it")
        gathers = self.settings.parallel.zero_stage == 3       # then every replica takes part, with its parameters
        if self.args.sample_tokens and (self.topology.place.data == 0 or gathers):
            self.write_sample()
        self.world.from_first(lambda: None)     # the other replicas wait for that, however long it takes
        together = self.pipeline_ledger()
        held = memory.report(self.trainer, self.args.micro_batch_size, self.args.seq_length,
                             self.settings.microbatches)
        if self.traced:
            self.write_trace(self.traced)
        if self.first:
            self.report_ledger(self.metrics.steps, together)
            print(f"{held}\n", flush=True)
            self.report_outcome()
        self.world.from_all(None)      # nobody goes ahead to MPI's shutdown, where no time limit holds

    def train(self) -> int:
        """Steps until --train-iters or --exit-interval says stop -> the last iteration."""
        a = self.args
        first = self.trainer.iteration + 1
        for iteration in range(first, a.train_iters + 1):
            began = time.perf_counter()
            self.trainer.measured = iteration == first     # counting bytes takes time, and every step holds as many
            with self.traced.step() if self.traced else nullcontext():
                batch = self.batches.microbatches_of("train", iteration - 1)
                observer = self.recorded.observer if self.recorded else None
                result = self.trainer.step(batch, a.global_batch_size, observer)
            seconds = time.perf_counter() - began
            if self.recorded:
                self.recorded.write()
            self.divergence.step(iteration, result, batch, a.global_batch_size)
            self.metrics.step(iteration, result, seconds, self.verify(iteration, result))
            last = iteration == a.train_iters or (a.exit_interval and iteration % a.exit_interval == 0)
            if a.save and (last or (a.save_interval and iteration % a.save_interval == 0)):
                self.save()
            if last:
                break
            if iteration % a.eval_interval == 0:
                self.evaluate(iteration)
        return iteration

    def verify(self, iteration: int, result: StepResult) -> str:
        """With --verify: the textbook's step, and how far the ranks are from it."""
        if self.verifier is None:
            return ""
        tokens = targets = None
        if self.dataset is not None and self.first:
            tokens, targets = whole_batch(self.dataset, "train", iteration - 1, self.args.global_batch_size)
        return self.verifier.check(tokens, targets, result)

    def evaluate(self, iteration: int) -> None:
        """The mean loss over the first --eval-iters global batches of the validation part."""
        if self.args.eval_iters == 0:
            return
        losses = [self.trainer.evaluate(self.batches.microbatches_of("validation", i), self.args.global_batch_size)
                  for i in range(self.args.eval_iters)]
        self.evaluations += len(losses)
        mean = sum(losses) / len(losses)
        self.divergence.evaluation(iteration, mean)
        self.metrics.evaluation(iteration, mean)

    def save(self) -> None:
        self.say(checkpoint.save(self.trainer, self.args.save, self.of_a_step))
        self.divergence.last_checkpoint = folder_of(self.args.save, self.trainer.iteration)

    def write_sample(self) -> None:
        tokens = sample(self.trainer, self.eod, self.args.sample_tokens, self.args.seed)
        if self.tokenizer is not None:
            print(f"\n{len(tokens)} tokens sampled from the model:\n{self.tokenizer.decode(tokens)}", flush=True)

    # ---- what it says ----

    def pipeline_ledger(self) -> Ledger:
        """What the ranks of this rank's pipeline have sent, added up."""
        together = Ledger()
        for ledger in self.topology.pipeline.from_all(self.world.ledger):
            together.add(ledger)
        return together

    def report_ledger(self, steps: int, ledger: Ledger) -> None:
        m = self.settings.microbatches
        work = Work(steps, steps * m, self.evaluations, self.evaluations * m, self.metrics.skipped)
        sizes = (ledger, self.model, self.settings.parallel, self.args.micro_batch_size, self.args.seq_length, work)
        print(f"\n{traffic.report(*sizes)}\n", flush=True)
        if self.args.ledger:
            with writing(self.args.ledger):
                traffic.write_json(self.args.ledger, *sizes)

    def write_trace(self, traced: TracedSteps) -> None:
        folder, parallel = self.args.trace, self.settings.parallel
        elements = self.args.micro_batch_size * self.args.seq_length * self.args.hidden_size // parallel.sent_parts
        with writing(folder):
            traced.write(folder, schedule_of(parallel, self.settings.microbatches),
                         elements * self.settings.precision.form.bytes)
        self.say(f"\nthe last {len(traced.steps)} steps are in {folder}: trace.json opens in https://ui.perfetto.dev, "
                 "and timeline.png shows the very last one beside its prediction")

    def report_outcome(self) -> None:
        if self.verifier:
            print(self.verifier.summary())
        if self.metrics.skipped == self.metrics.steps:
            follows = self.settings.precision.scaling.loss_scale is None
            print("note: every iteration was skipped, for its gradients overflow float16, and nothing was learnt. " + (
                "Train longer, or choose a smaller --initial-loss-scale." if follows else
                "Choose a smaller --loss-scale."))
        if self.unigram is not None:
            seen = self.args.eval_iters * self.args.global_batch_size
            print(f"validation loss {self.metrics.validation[-1][1]:.4f} nats per token, on {seen:,} samples; a "
                  f"unigram model of the corpus gives {self.unigram:.4f}, on all of the validation part")
        if self.args.plot:
            from mpi_impl.reports.losses import plot_losses   # matplotlib takes a second to import
            with writing(self.args.plot):
                plot_losses(self.args.plot, self.metrics.losses, self.metrics.validation, self.unigram)
            print(f"losses drawn in {self.args.plot}")

    def say(self, text: str) -> None:
        if self.first:
            print(text, flush=True)


if __name__ == "__main__":
    run(main)
