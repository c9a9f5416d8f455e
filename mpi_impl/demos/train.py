"""A GPT trained with all three kinds of parallelism together: `mpirun -np 8 python -m mpi_impl.demos.train`.

It shows what each rank holds, then the loss step by step next to that of one process, and what was sent between which
ranks (Narayanan et al. 2021, sections 2 and 3).
"""
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from math import log
from textwrap import fill

from mpi_impl.comm.group import Group, world
from mpi_impl.comm.ledger import Ledger, ring_bytes
from mpi_impl.comm.topology import Topology
from mpi_impl.demos.printing import WIDTH, Check, count, say, say_aligned, span
from mpi_impl.demos.tiny_gpt import (POSITIONS, WORDS, check_tensors, global_batch, holds, share_of, textbook_of,
                                     tiny_gpt, training_on)
from mpi_impl.launch.entry import ArgumentParser, run
from mpi_impl.prediction.predict import Predicted, predict_pipeline, sent_by_pipeline
from mpi_impl.prediction.rank import ImaginedWorld
from mpi_impl.report.page.report import ReportedRun, watch, write_report
from mpi_impl.report.timelines.tracing import TracedSteps
from mpi_impl.report.traffic import Line, compare, summary
from mpi_impl.runtime.outputs import check_outputs
from mpi_impl.runtime.tables import aligned, verdict
from mpi_impl.training.trainer import Trainer
from reference.batches import GPTBatch
from reference.config import ParallelConfig, require_positive, round_up
from reference.costs.parameters import parameters
from reference.costs.volumes import PassCounts
from reference.parallel.data_parallel import samples_of

MICROBATCHES = 4        # of each replica, a step; each is one sample

TOLERANCE = 1e-10       # rounding adds up from step to step

# The groups of ranks between which something is sent.
BETWEEN = {"tensor": "t ranks", "pipeline": "p ranks", "data": "d ranks", "model": "t x p ranks"}

INTRODUCTION = """\
A GPT reads tokens, and predicts the next one at each position. Its loss says how wrong the predictions are. Training
takes a batch of samples, computes for every weight in which direction it should move to make the loss smaller (its
gradient), and moves it a little. There are three ways to divide that work, and they can be combined:
  tensor    t ranks shard every layer. Each has a part of its matrices, and some of its heads, which work side by side.
            Four times per layer they sum their results. That is most of all messages, so these ranks are neighbours.
  pipeline  p groups of such ranks hold different layers, in order, and pass on the output of their last layer.
  data      d replicas of all that take different samples of each batch, and sum their gradients once per step.
So a rank has three numbers, its place among t, among p and among d. Here {ranks} = t x p x d = {t} x {p} x {d}.
"""


def show(ranks: Group, argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    parallel, steps = division(options, ranks.size), options.train_iters
    ranks.broadcast_object(lambda: check_outputs(options))
    t, p, d = (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.data_parallel_size)
    say(ranks, INTRODUCTION.format(ranks=count(ranks.size), t=t, p=p, d=d))
    model, batch, check = tiny_gpt(round_up(4, p), heads=round_up(4, t)), MICROBATCHES * d, Check(TOLERANCE)
    with training_on(ranks, model, parallel) as trainer:
        say(ranks, f"Who holds what of {count(model.num_layers, 'layer')} with h = {model.hidden_size} columns and "
                   f"{model.num_attention_heads} heads each, {parameters(model):,} parameters; a step takes {batch} "
                   "samples.\nThe embedding turns tokens into numbers, the head predicts:")
        say_aligned(ranks, *place_of(trainer))
        say(ranks, f"\nThe tokens are 0 to {WORDS - 1}, and after each comes the next: that is what the model can "
                   f"learn. (A blind guess has a loss\nof log({WORDS}) = {log(WORDS):.4f}. It may rise at first: "
                   "Adam's first step moves each weight by the whole rate.)")
        watched = watch(trainer.topology, on_device=False) if options.report else None
        losses = list[float]()
        say(ranks, train(trainer, steps, batch, check, losses, watched))
        ledger = ledger_of_pipeline(trainer.topology)
        work = PassCounts(steps, steps * MICROBATCHES, 0, 0)
        predicted = predict_run(trainer)
        sent = sent_by_pipeline(predicted, work)
        lines = compare(ledger, sent)
        whose = "rank 0" if p == 1 else f"the {p} ranks of rank 0's pipeline, together,"
        papers = summary(ledger, sent, model, parallel, 1, POSITIONS, work).splitlines()
        say(ranks, f"\nWhat {whose} sent in {count(steps, 'step')}, next to what was predicted:\n"
                   f"{traffic_by_group(lines)}\n\nIn the papers' terms:\n"
                   + "\n".join(fill(f"  {line}", WIDTH, subsequent_indent="    ") for line in papers) + "\n")
        if watched:
            write_page(trainer, options, losses, watched, ledger, predicted)
        for line in lines:
            check.equal("what was sent", line.total, line.predicted)
    check.conclude(ranks)


def train(trainer: Trainer, steps: int, batch: int, check: Check, losses: list[float],
          watched: TracedSteps | None = None) -> str:
    """Run every step twice, on the ranks and in one process. Return their losses as a table.

    The losses on the ranks are appended to `losses`. The last step is `watched`, for the page.
    """
    textbook, rows = textbook_of(trainer.state.model), [["step", "loss on the ranks", "in one process", "difference"]]
    for step in range(steps):
        tokens, targets = global_batch(step, batch)
        trainer.measured = watched is not None and step == 0
        with watched.step() if watched and step == steps - 1 else nullcontext():
            result = trainer.step(share_of(trainer, tokens, targets, b=1), batch)
        losses.append(result.loss)
        loss, norm, grads = textbook.step(GPTBatch(tokens, targets))
        check.equal("every loss", result.loss, loss)
        check.equal("norm of the gradient", result.grad_norm, norm)
        check_tensors(check, "every gradient", trainer, trainer.state.gradients.own, grads)
        check_tensors(check, "every weight", trainer, trainer.state.parameters.own, textbook.params)
        rows.append([str(step + 1), f"{result.loss:.10f}", f"{loss:.10f}", f"{abs(result.loss - loss):.0e}"])
    return aligned(rows, left=())


def write_page(trainer: Trainer, options: Namespace, losses: list[float], watched: TracedSteps,
               ledger: Ledger, predicted: list[Predicted]) -> None:
    """Write the page of --report. All ranks call this together."""
    state, parallel = trainer.state, trainer.topology.config
    work = PassCounts(options.train_iters, options.train_iters * MICROBATCHES, 0, 0)
    run = ReportedRun("A tiny GPT", state.model, parallel, state.precision, 1, POSITIONS, MICROBATCHES, predicted, work,
                      list(enumerate(losses, 1)))
    write_report(options.report, trainer, watched, run, ledger)
    say(trainer.topology.world, f"The page of this run is in {options.report}: open it in a browser.")


def predict_run(trainer: Trainer) -> list[Predicted]:
    """Predict the ranks of a pipeline, but for the samples, which every rank computes itself."""
    state, topology = trainer.state, trainer.topology
    predicted = predict_pipeline(topology, ImaginedWorld(state.model, topology.config, state.precision, 1, POSITIONS,
                                                         MICROBATCHES))
    return [one._replace(step={entry: total for entry, total in one.step.items() if entry.phase != "data"})
            for one in predicted]


def parse_options(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line. Raises UserError."""
    parser = ArgumentParser(prog="mpi_impl.demos.train", description="Train a tiny GPT on all ranks.")
    for name, letter, what in (("tensor", "t", "ranks that shard every layer"),
                               ("pipeline", "p", "groups of ranks that hold different layers")):
        parser.add_argument(f"--{name}-model-parallel-size", type=int, metavar=letter.upper(),
                            help=f"{letter}, {what} (default: so that t, p and d are as equal as possible)")
    parser.add_argument("--train-iters", type=int, default=10, metavar="N", help="steps (default: 10)")
    parser.add_argument("--report", metavar="F", help="write a page for a browser: losses, ranks, traffic, memory, and "
                        "a step to play, action by action")
    options = parser.parse_args(argv)
    require_positive("train_iters", options.train_iters)
    return options


def division(options: Namespace, n: int) -> ParallelConfig:
    """Return the division of the work over n ranks. Raises UserError."""
    return ParallelConfig.for_world(n, *sizes(n, options.tensor_model_parallel_size,
                                              options.pipeline_model_parallel_size))


def sizes(n: int, t: int | None, p: int | None) -> tuple[int, int]:
    """Return t and p: those that are given, or else such that t, p and d are as equal as possible, and t the largest.
    """
    fitting = [(one, other) for one in range(1, n + 1) for other in range(1, n + 1)
               if n % (one * other) == 0 and t in (None, one) and p in (None, other)]
    if not fitting:
        return 1 if t is None else t, 1 if p is None else p     # which is refused with a sentence
    return min(fitting, key=lambda pair: (sum(pair) + n // (pair[0] * pair[1]), -pair[0], -pair[1]))


def place_of(trainer: Trainer) -> list[str]:
    """Describe a rank's place in each kind of parallelism, and its share of the work."""
    topology, model = trainer.topology, trainer.state.model
    heads = model.num_attention_heads // topology.tensor.size
    samples = [samples_of(topology.place.data, k, topology.data.size, 1).start for k in range(MICROBATCHES)]
    first = topology.place.tensor * heads
    return [f"t {topology.place.tensor}, p {topology.place.pipeline}, d {topology.place.data}:",
            holds(trainer), span(first, first + heads, "head"), f"samples {' '.join(map(str, samples))}",
            f"{trainer.state.layout.size:,} parameters"]


def ledger_of_pipeline(topology: Topology) -> Ledger:
    """Add up what the ranks of this rank's pipeline have sent."""
    together = Ledger()
    for ledger in topology.pipeline.allgather_objects(topology.world.ledger):
        together.add(ledger)
    return together


def traffic_by_group(lines: list[Line]) -> str:
    """Return a table with a row for each kind of call within a group of ranks."""
    found = defaultdict(list)
    for line in lines:
        found[line.entry.group, line.entry.operation].append(line)
    rows = [["between", "operation", "why", "calls", "elements", "predicted", "bytes, as rings"]]
    for (group, operation), several in sorted(found.items(), key=lambda item: list(BETWEEN).index(item[0][0])):
        reasons = list(dict.fromkeys(line.entry.reason for line in several))
        elements, foreseen = (sum(numbers) for numbers in zip(*(
            (line.total.elements, line.predicted.elements if line.predicted else 0) for line in several)))
        rows.append([BETWEEN[group], operation, ", ".join(reasons[:2]) + ", ..." * (len(reasons) > 2),
                     f"{sum(line.total.calls for line in several):,}", f"{elements:,}", verdict(elements, foreseen),
                     f"{sum(ring_bytes(*line[:2]) for line in several):,.0f}"])
    return aligned(rows, left=(0, 1, 2))


if __name__ == "__main__":
    run(lambda: show(world()))
