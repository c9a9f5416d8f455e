"""The observers of a training run that its options choose: the textbook's steps, timelines, recordings and rates."""
from contextlib import nullcontext
from typing import Any

from mpi_impl.runtime.arrays import on_device
from mpi_impl.training.batches import whole_batch
from mpi_impl.training.trainer import StepResult
from mpi_impl.training.verify import Verifier
from reference.parallel.stages import schedule_of
from shardlab.compare.recorder import RecordedSteps, facts_of
from shardlab.programs.training_program import TrainingProgram
from shardlab.report import forecast, summary, throughput, traffic
from shardlab.report.page.report import ReportedRun, closing, watch, write_report
from shardlab.report.timelines.tracing import TracedSteps


class Observers:
    """The observers on one rank. All ranks call the methods together."""

    def __init__(self, program: TrainingProgram, dataset: Any, loaded: bool):
        """Make them once the state is that of the first step, `loaded` or initial. `dataset` is None on ranks that read
        no samples.
        """
        a, trainer, settings = program.args, program.trainer, program.settings
        self.program, self.args, self.dataset = program, a, dataset
        self.verifier = Verifier(trainer, settings.optimizer, a.seed) if a.verify else None
        if self.verifier and loaded:
            self.verifier.take_over()
        self.traced = TracedSteps(program.topology) if a.trace else None
        self.watched: TracedSteps | None = None        # for --report without --trace
        self.recorded = RecordedSteps(
            trainer.state, a.record, facts_of(trainer.state, settings.optimizer, a.global_batch_size, a.seq_length),
            program.say) if a.record else None
        self.measured = forecast.measure_rate(program.world, trainer.state.device_prototype)
        self.throughput = throughput.throughput_of(
            program.imagined, program.device.gpus, self.measured) if a.log_throughput else None

    def introduce(self) -> None:
        """Print the time that an iteration should take, and with --log-throughput its FLOPs."""
        self.program.say(forecast.describe_time(self.program.imagined, self.measured))
        if self.throughput:
            self.program.say(throughput.describe_flops(self.program.imagined, self.throughput))

    # ---- a step ----

    def tracing(self, step: int):
        """Return the context of a step of this run, counted from 0. A page shows the second, if there is one: the first
        also counts the bytes of activations.
        """
        if self.traced:
            return self.traced.step()
        if self.args.report and step < 2:
            self.watched = watch(self.program.topology, on_device(self.program.device.like))
            return self.watched.step()
        return self.recorded.playing() if self.recorded and not self.args.report else nullcontext()

    def begin(self, batch: list):
        """Note the microbatches of a step, and return who is shown its tensors, or None."""
        if self.verifier:
            self.verifier.begin(batch, self.args.global_batch_size)
        return self.recorded.observer if self.recorded else None

    def end(self, iteration: int, result: StepResult) -> str:
        """Compute the textbook's step with --verify, and describe how far the ranks are from it."""
        if self.verifier is None:
            return ""
        batch = None
        if self.dataset is not None and self.program.first:
            batch = whole_batch(self.dataset, self.program.model, "train", iteration - 1, self.args.global_batch_size)
        return self.verifier.check(batch, result)

    # ---- at the end ----

    def write_trace(self) -> None:
        """Write the timelines of --trace."""
        if self.traced is None:
            return
        folder, settings = self.args.trace, self.program.settings
        self.traced.write(folder, schedule_of(settings.parallel, settings.microbatches),
                          self.program.imagined.sent_bytes)
        self.program.say(f"\nthe last {len(self.traced.steps)} steps are in {folder}: trace.json opens in "
                         "https://ui.perfetto.dev, and timeline.png shows the very last one next to its prediction")

    def report(self, run: ReportedRun) -> None:
        """Compare what was sent and held with the prediction: in short, and in full for --verbose and --report."""
        a, program = self.args, self.program
        ledger = traffic.pipeline_ledger(program.topology)
        said = closing(program.trainer, run, ledger)
        program.say(f"\n{said.full if a.verbose else summary.describe(said.short)}\n")
        if a.ledger and program.first:
            traffic.write_json(a.ledger, said.lines)
        if a.report:
            traced = self.traced or self.watched
            assert traced is not None
            write_report(a.report, program.trainer, traced, run, ledger)
            program.say(f"the report is in {a.report}: open it in a browser")
