"""Train a GPT: `mpirun -np 8 python -m mpi_impl.pretrain_gpt --tensor-model-parallel-size 4 ...`."""
import os
import time
from contextlib import nullcontext
from math import isfinite

import numpy as np

from mpi_impl.comm import report
from mpi_impl.comm.clock import VirtualClock, WallClock
from mpi_impl.comm.group import Group, Instruments, library, world
from mpi_impl.comm.ledger import Ledger
from mpi_impl.comm.topology import connect
from mpi_impl.comm.trace import Trace
from mpi_impl.comm.watchdog import Watchdog
from mpi_impl.data.gpt import GPTDataset
from mpi_impl.data.indexed import IndexedDataset
from mpi_impl.data.prepare import prepare
from mpi_impl.data.tokenizer import Tokenizer
from mpi_impl.data.unigram import unigram_cross_entropy
from mpi_impl.entry import end_all_from_thread, run
from mpi_impl.files import check_folder, check_writable, writing
from mpi_impl.training import memory
from mpi_impl.training.arguments import Settings, parse
from mpi_impl.training.batches import Batches, reads, whole_batch
from mpi_impl.training.metrics import Metrics
from mpi_impl.training.sample import sample
from mpi_impl.training.tracing import TIMELINE, TRACE, TracedSteps
from mpi_impl.training.trainer import StepResult, Trainer
from mpi_impl.training.verify import Verifier
from reference.config import ModelConfig, ParallelConfig
from reference.cost import parameters
from reference.errors import UserError
from reference.memory import model_states
from reference.stages import layouts_of_ranks, schedule_of, stages_of_ranks
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
        ranks.from_first(self.check_outputs)
        self.tokenizer: Tokenizer | None = None        # on rank 0 only
        prefix, vocab_size, self.eod, self.unigram = ranks.from_first(self.prepare_data)
        self.topology = connect(ranks, settings.parallel)
        reader = reads(self.topology) and self.topology.place.tensor == 0
        self.dataset = self.open_dataset(prefix) if reader else None
        self.batches = Batches(self.dataset, self.topology, self.args.seq_length, self.args.micro_batch_size,
                               settings.microbatches)
        self.model = settings.model(vocab_size)
        ranks.from_first(lambda: check_memory(self.model, settings.parallel, np.dtype(self.args.dtype).itemsize,
                                               in_files=self.args.offload_folder is not None))
        self.trainer = Trainer(self.model, settings.optimizer, self.topology, self.args.seed, self.args.dtype,
                               far_folder=self.args.offload_folder)
        self.verifier = Verifier(self.trainer, settings.optimizer, self.args.seed) if self.args.verify else None
        self.traced = TracedSteps(self.topology) if self.args.trace else None
        self.metrics = Metrics(self.args.train_iters, self.args.global_batch_size * self.args.seq_length,
                               self.args.log_interval, self.args.metrics_file, speaks=self.first)
        self.evaluations = 0

    # ---- before the first step ----

    def check_outputs(self) -> None:
        """On rank 0: every file that will be written can be."""
        for folder in (self.args.trace, self.args.offload_folder):
            if folder:
                check_folder(folder)
        traces = [os.path.join(self.args.trace, name) for name in (TRACE, TIMELINE)] if self.args.trace else []
        for path in (self.args.metrics_file, self.args.ledger, self.args.plot, *traces):
            if path:
                check_writable(path, self.args.data_path)

    def prepare_data(self) -> tuple[str, int, int, float | None]:
        """On rank 0: the corpus as tokens on disk, and whatever is wrong with them is said now.

        -> where they are, the size of the vocabulary, the end-of-document token, a unigram model's validation loss
        """
        a = self.args
        prefix, self.tokenizer = prepare(a.data_path, a.tokenizer_type, a.vocab_size, a.vocab_file, a.merge_file,
                                         a.data_cache_path, report=self.say)
        vocab_size, dataset = self.tokenizer.vocab_size, self.open_dataset(prefix)
        dataset.check_vocabulary(vocab_size)
        dataset.batch("train", 0, 1)
        unigram = None
        if a.eval_iters:
            dataset.batch("validation", 0, 1)
            unigram = unigram_cross_entropy(dataset, vocab_size)
        return prefix, vocab_size, self.tokenizer.eod, unigram

    def open_dataset(self, prefix: str) -> GPTDataset:
        return GPTDataset(IndexedDataset(prefix), self.args.seq_length, self.args.seed, self.args.split)

    # ---- the run ----

    def run(self) -> None:
        self.say(self.introduction())
        with np.errstate(over="ignore", invalid="ignore"):     # a run that diverges says so once, in a sentence
            last = self.train()
            self.evaluate(last)
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
            self.report_ledger(last, together)
            print(f"{held}\n", flush=True)
            self.report_outcome()
        self.world.from_all(None)      # nobody goes ahead to MPI's shutdown, where no time limit holds

    def train(self) -> int:
        """Steps until --train-iters or --exit-interval says stop -> the last iteration."""
        a = self.args
        for iteration in range(1, a.train_iters + 1):
            began = time.perf_counter()
            self.trainer.measured = iteration == 1     # counting bytes takes time, and every step holds as many
            with self.traced.step() if self.traced else nullcontext():
                result = self.trainer.step(self.batches.microbatches_of("train", iteration - 1), a.global_batch_size)
            seconds = time.perf_counter() - began
            self.stop_if_diverged(iteration, "loss", result.loss)
            self.stop_if_diverged(iteration, "gradient's norm", result.grad_norm)
            self.metrics.step(iteration, result, seconds, self.verify(iteration, result))
            if a.exit_interval and iteration % a.exit_interval == 0:
                break
            if iteration % a.eval_interval == 0 and iteration < a.train_iters:
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
        self.stop_if_diverged(iteration, "validation loss", sum(losses) / len(losses))
        self.metrics.evaluation(iteration, sum(losses) / len(losses))

    def stop_if_diverged(self, iteration: int, what: str, value: float) -> None:
        if not isfinite(value):
            raise UserError(f"The {what} of iteration {iteration} is {value}: the run has diverged. Try a smaller "
                            f"--lr, now {self.args.lr}, or a longer warm-up (--lr-warmup-iters).")

    def write_sample(self) -> None:
        tokens = sample(self.trainer, self.eod, self.args.sample_tokens, self.args.seed)
        if self.tokenizer is not None:
            print(f"\n{len(tokens)} tokens sampled from the model:\n{self.tokenizer.decode(tokens)}", flush=True)

    # ---- what it says ----

    def introduction(self) -> str:
        p, m = self.settings.parallel, self.model
        t, d = p.tensor_model_parallel_size, p.data_parallel_size
        sizes = [layout.size for layout in layouts_of_ranks(m, p)]
        held = f"{sizes[0]:,} on each rank" if len(sizes) == 1 else f"{min(sizes):,} to {max(sizes):,} on a rank"
        return (f"{p.world_size} ranks ({library()}): tensor parallel {t}{self.pipelining()} x data parallel {d}; "
                f"a step is {self.settings.microbatches} x {self.args.micro_batch_size} samples on each replica\n"
                f"{self.saving()}"
                f"GPT of {parameters(m):,} parameters, {held}; vocabulary "
                f"{m.vocab_size:,}, padded to {m.padded_vocab_size(t):,}; {self.args.dtype}")

    def pipelining(self) -> str:
        """Of a pipeline: the schedule, and how many layers its stages have, in order."""
        p = self.settings.parallel
        if p.pipeline_model_parallel_size == 1:
            return ""
        layers = {stage: len(held) for stages in stages_of_ranks(self.model, p) for stage, held in stages.items()}
        return (f" x pipeline parallel {p.pipeline_model_parallel_size} ({p.pipeline_schedule}; layers of the stages: "
                f"{' '.join(str(layers[stage]) for stage in sorted(layers))})")

    def saving(self) -> str:
        """What a rank does not keep, and what that costs."""
        p = self.settings.parallel
        found = []
        if p.sequence_parallel:
            found.append("sequence parallel (the gathered inputs are " + (
                "kept: 8 b s h (t-1)/t elements a layer)" if p.keep_gathered_inputs else
                "gathered again in the backward: 10 b s h (t-1)/t elements a layer)"))
        if p.zero_stage:
            cut = ("optimizer states", "gradients", "parameters")[:p.zero_stage]
            far = f"; shards in {self.args.offload_folder or 'host memory'}" if p.cpu_offload else ""
            share = f"the replicas share out {', '.join(cut)}" if p.data_parallel_size > 1 else "one replica owns all"
            found.append(f"ZeRO-{p.zero_stage} ({share}{far})")
        if p.recompute.selective:
            found.append("attention's core recomputed")
        if p.recompute.granularity == "full":
            found.append(f"layers recomputed ({p.recompute.method}, {p.recompute.num_layers})")
        return "; ".join(found) + "\n" if found else ""

    def pipeline_ledger(self) -> Ledger:
        """What the ranks of this rank's pipeline have sent, added up."""
        together = Ledger()
        for ledger in self.topology.pipeline.from_all(self.world.ledger):
            together.add(ledger)
        return together

    def report_ledger(self, last: int, ledger: Ledger) -> None:
        m = self.settings.microbatches
        sizes = (ledger, self.model, self.settings.parallel, self.args.micro_batch_size,
                 self.args.seq_length, Work(last, last * m, self.evaluations, self.evaluations * m))
        print(f"\n{report.report(*sizes)}\n", flush=True)
        if self.args.ledger:
            with writing(self.args.ledger):
                report.write_json(self.args.ledger, *sizes)

    def write_trace(self, traced: TracedSteps) -> None:
        folder, parallel = self.args.trace, self.settings.parallel
        elements = self.args.micro_batch_size * self.args.seq_length * self.args.hidden_size // parallel.sent_parts
        with writing(folder):
            traced.write(folder, schedule_of(parallel, self.settings.microbatches),
                         elements * np.dtype(self.args.dtype).itemsize)
        self.say(f"\nthe last {len(traced.steps)} steps are in {folder}: trace.json opens in https://ui.perfetto.dev, "
                 "and timeline.png shows the very last one beside its prediction")

    def report_outcome(self) -> None:
        if self.verifier:
            print(self.verifier.summary())
        if self.unigram is not None:
            seen = self.args.eval_iters * self.args.global_batch_size
            print(f"validation loss {self.metrics.validation[-1][1]:.4f} nats per token, on {seen:,} samples; a "
                  f"unigram model of the corpus gives {self.unigram:.4f}, on all of the validation part")
        if self.args.plot:
            from mpi_impl.training.plots import plot_losses   # matplotlib takes a second to import
            with writing(self.args.plot):
                plot_losses(self.args.plot, self.metrics.losses, self.metrics.validation, self.unigram)
            print(f"losses drawn in {self.args.plot}")

    def say(self, text: str) -> None:
        if self.first:
            print(text, flush=True)


def check_memory(model: ModelConfig, parallel: ParallelConfig, itemsize: int, in_files: bool) -> None:
    """Raises UserError if one rank's buffers alone are more than this machine has: before hours are spent on them.

    `in_files`: whether what is offloaded is not in memory at all.
    """
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    rank = parameters(model) // (parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
    each = bytes_of_parameter(parallel, itemsize, in_files)
    if rank * each <= there:      # on average; a model that is far too large is not laid out, tensor by tensor
        rank = max(layout.size for layout in layouts_of_ranks(model, parallel))
    if rank * each > there:
        raise UserError(f"Of {rank:,} parameters a rank would hold {each:g} bytes each, of parameters, gradients and "
                        f"moments: {rank * each / 1e9:,.1f} GB, but the machine has {there / 1e9:,.1f} GB. Choose a "
                        "smaller --num-layers, --hidden-size or --vocab-size, a larger --tensor-model-parallel-size or "
                        "--pipeline-model-parallel-size, or with several replicas a higher --zero-stage.")


def bytes_of_parameter(parallel: ParallelConfig, itemsize: int, in_files: bool) -> float:
    """On a rank, of each parameter of its shard of the model: itself, its gradient, and two moments."""
    parameter, gradient, moments = model_states(1, parallel.data_parallel_size, parallel.zero_stage,
                                                *memory.bytes_each(itemsize))
    if parallel.cpu_offload and in_files:
        parameter, moments = parameter if parallel.zero_stage < 3 else 0, 0
    return parameter + gradient + moments


if __name__ == "__main__":
    run(main)
