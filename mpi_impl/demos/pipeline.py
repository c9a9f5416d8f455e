"""A model's layers distributed over all ranks, as a pipeline: `mpirun -np 4 python -m mpi_impl.demos.pipeline`.

It shows which rank holds which layers, the order of its work, what it sends to which rank, how many activations it
must keep, and how long it is idle (Narayanan et al. 2021, section 2.2; with other schedules, Qi et al. 2023).
"""
from collections.abc import Sequence

from mpi_impl.comm.group import Group, Instruments, world
from mpi_impl.comm.ledger import ring_bytes
from mpi_impl.comm.trace import Trace
from mpi_impl.comm.watchdog import listed
from mpi_impl.demos.printing import Check, count, prefix_with_ranks, say, say_aligned
from mpi_impl.demos.tiny_gpt import check_tensors, global_batch, holds, share_of, textbook_of, tiny_gpt, training_on
from mpi_impl.launch.entry import ArgumentParser, run
from mpi_impl.training.trainer import Trainer
from reference.batches import GPTBatch
from reference.config import ParallelConfig, require_positive, round_up
from reference.costs.bubbles import bubble_fraction
from reference.costs.volumes import pipeline_traffic
from reference.schedules.actions import Schedule, Send
from reference.schedules.generators import SCHEDULES, make, require_sizes
from reference.schedules.simulate import Span, Timeline, Times, activations_in_flight, simulate

SAMPLES = 2         # b, of a microbatch
CHUNKS = 2          # v, the stages on each rank of the interleaved schedule
WIDTH = 108         # of a rank's line
T = 2               # t, the tensor-parallel ranks of a stage, where crossings are compared

INTRODUCTION = """\
A model is a stack of layers. Forward, each layer computes from the output of the layer below it; all its results are
its activations. At the top is the loss: how wrong the model was. Backward, each layer gets from the one above how the
loss depends on its output (a gradient). From that and from its activations, which it must have kept until now, it
computes the gradients of its own weights, and the gradient for the layer below.

A pipeline distributes the stack over {ranks}, a stage to each (or several). A rank waits for the one before it, and
backward for the one after: with all samples together only one rank would work at a time. So they are divided into m
microbatches, and while rank 1 works on the first one, rank 0 takes the next. Some waiting is left, where the pipeline
fills and drains: the bubble. Only data at the edges of the stages is sent, so there is little traffic.

The schedule is the order of a rank's forwards (F) and backwards (B); 2F0 is stage 2's forward of microbatch 0. The
earlier a backward comes, the sooner its activations can be freed. The schedule here is {schedule}:
{says}
"""
ALONE = """\
One rank has no other rank to send to: start more.
"""
CROSSING = """\
If t = {t} ranks share each layer (tensor parallelism), both hold all of the array that goes to the next stage. Sent
whole, the same numbers cross t times. With the scatter/gather optimisation each rank sends 1/t of them, and the
receivers gather, inside their server, where links are faster (Narayanan et al. 2021, section 4.1):

  whole        rank 0 [ab] --ab--> rank 2 [ab]        scattered    rank 0 [ab] --a --> rank 2 [a ] --gather--> [ab]
               rank 1 [ab] --ab--> rank 3 [ab]                     rank 1 [ab] -- b--> rank 3 [ b] --gather--> [ab]

Measured, in a step of {m} microbatches on {stages} of {t} ranks:"""
HALVES = """\
I and W are the halves of a B: the input gradient, for which the stage before waits, and the weight gradients, which
can come later.
"""


def show(ranks: Group, argv: Sequence[str] | None = None) -> None:
    p = ranks.size
    name, m, v = parse_options(argv, p)
    schedule = make(name, p, m, v)
    say(ranks, introduction(name, schedule))

    watched = Group(ranks.comm, ranks.name, Instruments(trace=Trace(recording=True)))
    model = tiny_gpt(num_layers=schedule.stages)
    parallel = ParallelConfig(pipeline_model_parallel_size=p, pipeline_schedule=name, virtual_pipeline_size=v)
    with training_on(watched, model, parallel) as trainer:
        tokens, targets = global_batch(0, m * SAMPLES)
        x = round(pipeline_traffic(SAMPLES, tokens.shape[1], model.hidden_size))
        say(ranks, f"Who holds what of {count(schedule.stages, 'layer')}, a stage each. The embedding turns tokens "
                   "into numbers; the head predicts the\nnext token, and has the loss:")
        say_aligned(ranks, holds(trainer), f"{trainer.state.layout.size:,} parameters")

        result = trainer.step(share_of(trainer, tokens, targets, SAMPLES), len(tokens))
        done = Schedule(tuple(ranks.allgather_objects(tuple(s.action for s in watched.trace.slices if s.action))))
        say(ranks, f"\nA step with m = {m} microbatches of {SAMPLES} samples. What each rank did, in this order:\n"
                   + prefix_with_ranks([shorten(" ".join(map(str, actions))) for actions in done.ranks]))
        say(ranks, picture(name, done))
        predicted = activations_in_flight(schedule)[ranks.rank]
        say(ranks, f"What each sent: every time b s h = {x} numbers, {8 * x:,} bytes. And for how many forwards it "
                   "kept the\nactivations at the same time, at most:")
        say_aligned(ranks, *describe_sends(trainer, m), f"kept {trainer.peaks.caches} (predicted: {predicted})")
        say(ranks, "")

        check = Check()
        check.equal("messages", watched.ledger.elements(operation="send"), x * len(sends(trainer, m)))
        check.equal("activations kept", trainer.peaks.caches, predicted)
        loss, norm, grads = textbook_of(model).step(GPTBatch(tokens, targets))
        check.equal("loss", result.loss, loss)
        check.equal("norm of the gradient", result.grad_norm, norm)
        check_tensors(check, "every weight's gradient", trainer, trainer.state.gradients.own, grads)
    if p % T == 0 and p > T:
        compare_crossings(ranks, check)
    check.conclude(ranks)


def parse_options(argv: Sequence[str] | None, p: int) -> tuple[str, int, int | None]:
    """Return the schedule's name, an m that suits p ranks, and v. Raises UserError."""
    parser = ArgumentParser(prog="mpi_impl.demos.pipeline", description="Show layers distributed over the ranks.")
    parser.add_argument("--schedule", choices=[name for name in SCHEDULES if name != "forward-only"], default="1f1b",
                        help="the order in which ranks do their forwards and backwards (default: 1f1b)")
    parser.add_argument("--microbatches", type=int, metavar="M", help="(default: p + 2, but at most 8; interleaved: "
                                                                      "the first multiple of p from 4 on)")
    options = parser.parse_args(argv)
    name, m = options.schedule, options.microbatches
    v = CHUNKS if name == "interleaved" else None
    if m is None:
        m = round_up(4, p) if v else min(p + 2, 8)
    require_positive("microbatches", m)
    require_sizes(p, m, v or 1)
    return name, m, v


def introduction(name: str, schedule: Schedule) -> str:
    kinds = {action.kind for actions in schedule.ranks for action in actions}
    says = (SCHEDULES[name].__doc__ or "").splitlines()[0]
    return (INTRODUCTION.format(ranks=count(schedule.p), schedule=name, says=says) + HALVES * ("W" in kinds)
            + ALONE * (schedule.p == 1))


# ---- messages -------------------------------------------------------------------------------------------------------


def sends(trainer: Trainer, m: int) -> list[Send]:
    """Return the sends in this rank's part of the schedule."""
    return [step for step in trainer.pipeline("training", m).steps if isinstance(step, Send)]


def describe_sends(trainer: Trainer, m: int) -> list[str]:
    """Return '6 activations to rank 1', '6 gradients to rank 3': numbers from the ledger, receivers from the schedule.
    """
    found = []
    for kind, phase, what in (("F", "forward", "activation"), ("B", "backward", "gradient")):
        number = trainer.ledger.calls(operation="send", phase=phase)
        others = sorted({step.to for step in sends(trainer, m) if step.action.kind == kind})
        found.append(f"{count(number, what)} to {listed(others)}" if others else f"no {what}s")
    return found


def compare_crossings(ranks: Group, check: Check) -> None:
    """Measure a step on t ranks for each stage, with activations sent whole, and scattered and gathered."""
    m, stages = 4, ranks.size // T
    say(ranks, CROSSING.format(t=T, m=m, stages=count(stages, "stage")))
    model, (tokens, targets) = tiny_gpt(num_layers=stages), global_batch(0, m * SAMPLES)
    sent, gathered, losses = [], [], []
    for scatter in (False, True):
        watched = Group(ranks.comm, ranks.name, Instruments())
        parallel = ParallelConfig(T, stages, scatter_gather_tensors_in_pipeline=scatter)
        with training_on(watched, model, parallel) as trainer:
            losses.append(trainer.step(share_of(trainer, tokens, targets, SAMPLES), len(tokens)).loss)
        totals = watched.ledger.totals.items()
        sent.append(round(sum(ring_bytes(entry, total) for entry, total in totals if entry.operation == "send")))
        gathered.append(round(sum(ring_bytes(entry, total) for entry, total in totals
                                  if entry.operation == "all_gather" and entry.reason.startswith("gathered"))))
    say_aligned(ranks, f"whole: {sent[0]:,} bytes to other stages", f"scattered: {sent[1]:,} bytes to other stages,",
                f"{gathered[1]:,} inside its own")
    say(ranks, "")
    check.equal("bytes to other stages", sent[0], T * sent[1])
    check.equal("loss, whole or scattered", *losses)


# ---- the picture ----------------------------------------------------------------------------------------------------


def picture(name: str, schedule: Schedule) -> str:
    """Draw when each action would happen if all stages took the same time, a row for each rank, and the cost of that.
    """
    timeline = simulate(schedule, Times())
    unit = max(1, min(3, int(WIDTH // timeline.makespan)))     # characters
    rows = [shorten(row(spans, unit, timeline.makespan)) for spans in timeline.ranks]
    small = "" if schedule.stages == schedule.p else "; small letters are the second stage of a rank"
    return ("\nThe same in time, from a simulator, if F took 1 unit, B 2 (I and W 1 each), and messages none. Dots\n"
            f"are the bubble{small}:\n{prefix_with_ranks(rows)}\n{cost(name, schedule, timeline)}\n")


def row(spans: Sequence[Span], unit: int, end: float) -> str:
    """Draw one rank's row: 'F0 F1 .  .  B0=== B1==='."""
    text, upper = "", min(span.action.stage for span in spans)
    for action, start, stop in spans:
        text += ".".ljust(unit) * round(start - len(text) / unit)
        name, width = f"{action.kind}{action.microbatch}", unit * round(stop - start)
        name = name if len(name) <= width else action.kind
        text += (name if action.stage == upper else name.lower()).ljust(width - unit // 3, "=").ljust(width)
    return (text + ".".ljust(unit) * round(end - len(text) / unit)).rstrip()


def cost(name: str, schedule: Schedule, timeline: Timeline) -> str:
    """Describe the bubble in numbers, with the formula of Narayanan et al. if the schedule is one of theirs."""
    p, m, v = schedule.p, schedule.microbatches, schedule.stages // schedule.p
    formula = {"gpipe": "(p-1)/m", "1f1b": "(p-1)/m", "interleaved": "(p-1)/(v m)"}.get(name)
    says = f" The formula: {formula} = {bubble_fraction(p, m, v):.3g}." if formula else ""
    return (f"A rank works for {timeline.work:g} units of {timeline.makespan:g}: idle / ideal time is "
            f"{timeline.bubble_fraction:.3g}.{says}")


def shorten(line: str) -> str:
    """Drop what does not fit on a line."""
    return line if len(line) <= WIDTH else f"{line[:WIDTH - 4]} ..."


if __name__ == "__main__":
    run(lambda: show(world()))
