"""A GPT trained with all three kinds of parallelism together: `mpirun -np 8 python -m shardlab.demos.train`.

It shows what each rank holds, then the loss step by step next to that of one process, and what was sent between which
ranks (Narayanan et al. 2021, sections 2 and 3).
"""
from argparse import Namespace
from math import log
from textwrap import fill

from mpi_impl.runtime.outputs import check_outputs
from mpi_impl.runtime.tables import WIDTH, aligned, count
from mpi_impl.training.trainer import Trainer
from reference.config import ParallelConfig, require_positive, round_up
from reference.costs.parameters import parameters
from reference.costs.volumes import PassCounts
from reference.parallel.data_parallel import samples_of
from shardlab.demos.printing import span
from shardlab.demos.runner import Arguments, Demo, parser_of, program, run_demo
from shardlab.demos.tiny_gpt import (POSITIONS, WORDS, check_tensors, holds, step_and_compare, textbook_of, tiny_gpt,
                                     training_on)
from shardlab.predict.predict import predict_pipeline, sent_by_pipeline
from shardlab.predict.rank import ImaginedWorld
from shardlab.report.page.report import ReportedRun, watch, write_report
from shardlab.report.timelines.tracing import TracedSteps
from shardlab.report.traffic import compare, pipeline_ledger, report

MICROBATCHES = 4        # of each replica, a step; each is one sample

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


def parse_options(argv: Arguments, n: int) -> Namespace:
    """Parse the command line, and divide the work over n ranks. Raises UserError."""
    parser = parser_of("train")
    parser.add_argument("--tensor-model-parallel-size", type=int, metavar="T", help="t, ranks that shard every layer "
                        "(default: so that t, p and d are as equal as possible)")
    parser.add_argument("--pipeline-model-parallel-size", type=int, metavar="P", help="p, groups of ranks that hold "
                        "different layers (default: likewise)")
    parser.add_argument("--train-iters", type=int, default=10, metavar="N", help="steps (default: 10)")
    parser.add_argument("--report", metavar="F", help="write a page for a browser: losses, ranks, traffic, memory, and "
                        "a step to play, action by action")
    options = parser.parse_args(argv)
    require_positive("train_iters", options.train_iters)
    t = options.tensor_model_parallel_size or even_divisor(n, 3)
    options.parallel = ParallelConfig.for_world(n, t, options.pipeline_model_parallel_size or even_divisor(
        max(1, n // t), 2))
    return options


def even_divisor(n: int, ways: int) -> int:
    """Return the first divisor of n such that this many equal ones would make n, or more."""
    return next(one for one in range(1, n + 1) if n % one == 0 and one**ways >= n)


@program(parse_options)
def show(demo: Demo, options: Namespace) -> None:
    demo.ranks.broadcast_object(lambda: check_outputs(options))
    demo.tolerance = 1e-10         # rounding adds up from step to step
    parallel: ParallelConfig = options.parallel
    t, p, d = (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.data_parallel_size)
    demo.introduce(INTRODUCTION, t=t, p=p, d=d)
    model = tiny_gpt(round_up(4, p), heads=round_up(4, t))
    with training_on(demo.ranks, model, parallel) as trainer:
        show_shares(demo, trainer)
        watched = watch(trainer.topology, on_device=False) if options.report else None
        losses = train(demo, trainer, options.train_iters, watched)
        steps = options.train_iters
        ledger, work = pipeline_ledger(trainer.topology), PassCounts(steps, steps * MICROBATCHES, 0, 0)
        run = ImaginedWorld(model, parallel, trainer.state.precision, 1, POSITIONS, MICROBATCHES)
        predicted = [one._replace(step={entry: total for entry, total in one.step.items() if entry.phase != "data"})
                     for one in predict_pipeline(trainer.topology, run)]       # each rank makes the samples itself
        sent = sent_by_pipeline(predicted, work)
        text = report(ledger, sent, model, parallel, 1, POSITIONS, work)
        demo.say("\n" + "\n".join(fill(line, WIDTH) if ": " in line else line for line in text.splitlines()) + "\n")
        if watched:
            write_report(options.report, trainer, watched, ReportedRun(
                "A tiny GPT", model, parallel, trainer.state.precision, 1, POSITIONS, MICROBATCHES, predicted, work,
                list(enumerate(losses, 1))), ledger)
            demo.say(f"The page of this run is in {options.report}: open it in a browser.")
        for line in compare(ledger, sent):
            demo.equal("what was sent", line.total, line.predicted)


def show_shares(demo: Demo, trainer: Trainer) -> None:
    """Print what each rank holds, and which samples it takes."""
    model, place, d = trainer.state.model, trainer.topology.place, trainer.topology.data.size
    heads = model.num_attention_heads // trainer.topology.tensor.size
    demo.say(f"Who holds what of {count(model.num_layers, 'layer')} with h = {model.hidden_size} columns and "
             f"{model.num_attention_heads} heads each, {parameters(model):,} parameters; a step takes "
             f"{MICROBATCHES * d} samples.\nThe embedding turns tokens into numbers, the head predicts:")
    samples = [str(samples_of(place.data, k, d, 1).start) for k in range(MICROBATCHES)]
    demo.say_each(f"t {place.tensor}, p {place.pipeline}, d {place.data}:", holds(trainer),
                  span(place.tensor * heads, (place.tensor + 1) * heads, "head"), f"samples {' '.join(samples)}",
                  f"{trainer.state.layout.size:,} parameters")
    demo.say(f"\nThe tokens are 0 to {WORDS - 1}, and after each comes the next: that is what the model can learn. (A "
             f"blind guess has a loss\nof log({WORDS}) = {log(WORDS):.4f}. It may rise at first: Adam's first step "
             "moves each weight by the whole rate.)")


def train(demo: Demo, trainer: Trainer, steps: int, watched: TracedSteps | None) -> list[float]:
    """Run every step on the ranks and in one process, and print and return the losses. The last step is `watched`, for
    the page.
    """
    textbook, samples = textbook_of(trainer.state.model), MICROBATCHES * trainer.topology.data.size
    losses, rows = [], [["step", "loss on the ranks", "in one process", "difference"]]
    for step in range(steps):
        trainer.measured = watched is not None and step == 0
        traced = watched.step() if watched and step == steps - 1 else None
        loss, whole = step_and_compare(demo, trainer, textbook, step, samples, 1, traced)
        check_tensors(demo, "every weight", trainer, trainer.state.parameters.own, textbook.params)
        losses.append(loss)
        rows.append([str(step + 1), f"{loss:.10f}", f"{whole:.10f}", f"{abs(loss - whole):.0e}"])
    demo.say(aligned(rows, left=()))
    return losses


if __name__ == "__main__":
    run_demo(show)
