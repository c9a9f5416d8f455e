"""A model's layers distributed over all ranks, as a pipeline: `mpirun -np 4 python -m shardlab.demos.pipeline`.

It shows which rank holds which layers, the order of its work, what it sends to which stage, how many activations it
must keep, and how long it is idle (Narayanan et al. 2021, section 2.2; with other schedules, Qi et al. 2023).
"""
from collections.abc import Sequence

from mpi_impl.runtime.tables import count
from reference.config import ParallelConfig, round_up
from reference.costs.bubbles import bubble_fraction
from reference.costs.volumes import pipeline_traffic
from reference.schedules.actions import Schedule, Send
from reference.schedules.generators import SCHEDULES, make
from reference.schedules.simulate import Span, Times, activations_in_flight, simulate
from shardlab.demos.printing import prefix_with_ranks, sent_bytes
from shardlab.demos.runner import Arguments, Demo, parser_of, program, run_demo
from shardlab.demos.tiny_gpt import POSITIONS, apart, holds, step_and_compare, textbook_of, tiny_gpt, training_on

SAMPLES = 2         # b, of a microbatch
WIDTH = 108         # of a rank's line
T = 2               # t, the tensor-parallel ranks of a stage, where crossings are compared
FORMULAS = {"gpipe": "(p-1)/m", "1f1b": "(p-1)/m", "interleaved": "(p-1)/(v m)"}     # of idle / ideal time

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
PICTURE = """
The same in time, from a simulator, if F took 1 unit, B 2 (I and W 1 each), and messages none. Dots are the bubble;
small letters are the second stage of a rank, if it has two:
{rows}
A rank works for {work:g} units of {all:g}: idle / ideal time is {idle:.3g}."""
HALVES = """\
I and W are the halves of a B: the input gradient, for which the stage before waits, and the weight gradients, which
can come later.
"""


def parse_options(argv: Arguments, p: int) -> tuple[str, Schedule]:
    """Return a schedule's name, and itself for p ranks. Raises UserError."""
    parser = parser_of("pipeline")
    parser.add_argument("--schedule", choices=[name for name in SCHEDULES if name != "forward-only"], default="1f1b",
                        help="the order in which ranks do their forwards and backwards (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, metavar="M", default=round_up(4, p), help="(default: %(default)s)")
    options = parser.parse_args(argv)
    v = 2 if options.schedule == "interleaved" else None        # stages on each rank
    return options.schedule, make(options.schedule, p, options.microbatches, v)


@program(parse_options)
def show(demo: Demo, options: tuple[str, Schedule]) -> None:
    name, schedule = options
    p, m, stages = demo.n, schedule.microbatches, schedule.stages
    halves = any(action.kind == "W" for actions in schedule.ranks for action in actions)
    demo.introduce(INTRODUCTION + HALVES * halves + ALONE * (p == 1), schedule=name,
                   says=(SCHEDULES[name].__doc__ or "").splitlines()[0])
    watched, model = apart(demo.ranks, trace=True), tiny_gpt(num_layers=stages)
    parallel = ParallelConfig(pipeline_model_parallel_size=p, pipeline_schedule=name,
                              virtual_pipeline_size=stages // p if name == "interleaved" else None)
    with training_on(watched, model, parallel) as trainer:
        demo.say(f"Who holds what of {count(stages, 'layer')}, a stage each. The embedding turns tokens into "
                 "numbers; the head predicts the\nnext token, and has the loss:")
        demo.say_each(holds(trainer), f"{trainer.state.layout.size:,} parameters")
        step_and_compare(demo, trainer, textbook_of(model), 0, m * SAMPLES, SAMPLES)
        done = Schedule(tuple(demo.ranks.allgather_objects(tuple(s.action for s in watched.trace.slices if s.action))))
        demo.say(f"\nA step with m = {m} microbatches of {SAMPLES} samples. What each rank did, in this order:")
        demo.say_each(shorten(" ".join(map(str, done.ranks[demo.rank]))))
        demo.say(f"{picture(name, done)}\n")
        x, kept = round(pipeline_traffic(SAMPLES, POSITIONS, model.hidden_size)), activations_in_flight(schedule)
        demo.say(f"What each sent: every time b s h = {x} numbers, {8 * x:,} bytes. And for how many forwards it "
                 "kept the\nactivations at the same time, at most:")
        sends = [step for step in trainer.pipeline("training", m).steps if isinstance(step, Send)]
        demo.say_each(*(f"{sum(send.action.kind == kind for send in sends)} {what}," for kind, what in (
            ("F", "activations to the next stage"), ("B", "gradients to the one before"))),
            f"kept {trainer.peaks.caches} (predicted: {kept[demo.rank]})")
        demo.say()
        demo.equal("messages", watched.ledger.elements(operation="send"), x * len(sends))
        demo.equal("activations kept", trainer.peaks.caches, kept[demo.rank])
    if p % T == 0 and p > T:
        compare_crossings(demo)


def compare_crossings(demo: Demo) -> None:
    """Measure a step on t ranks for each stage, with activations sent whole, and scattered and gathered."""
    m, stages, sent = 4, demo.n // T, {}
    demo.say(CROSSING.format(t=T, m=m, stages=count(stages, "stage")))
    model = tiny_gpt(num_layers=stages)
    for scatter in (False, True):
        own = apart(demo.ranks)
        with training_on(own, model, ParallelConfig(T, stages, scatter_gather_tensors_in_pipeline=scatter)) as trainer:
            step_and_compare(demo, trainer, textbook_of(model), 0, m * SAMPLES, SAMPLES)
        sent[scatter] = sent_bytes(own.ledger, operation="send"), sent_bytes(own.ledger, operation="all_gather")
    demo.say_each(f"whole: {sent[False][0]:,.0f} bytes to other stages", f"scattered: {sent[True][0]:,.0f} bytes to "
                  "other stages,", f"{sent[True][1]:,.0f} inside its own")
    demo.say()
    demo.equal("bytes to other stages", sent[False][0], T * sent[True][0])


# ---- the picture ----------------------------------------------------------------------------------------------------


def picture(name: str, schedule: Schedule) -> str:
    """Draw when each action would happen if all stages took the same time, a row for each rank, and the cost of that:
    the bubble, with the formula of Narayanan et al. if the schedule is one of theirs.
    """
    timeline = simulate(schedule, Times())
    formula = ""
    if name in FORMULAS:
        bubble = bubble_fraction(schedule.p, schedule.microbatches, schedule.stages // schedule.p)
        formula = f" The formula: {FORMULAS[name]} = {bubble:.3g}."
    rows = prefix_with_ranks([row(spans, round(timeline.makespan)) for spans in timeline.ranks])
    return PICTURE.format(rows=rows, work=timeline.work, all=timeline.makespan, idle=timeline.bubble_fraction) + formula


def row(spans: Sequence[Span], end: int) -> str:
    """Draw one rank's row: 'F0 F1 .  .  B0 =  B1 =', or 'FF..B=B=' if it is long."""
    cells, upper = ["."] * end, min(span.action.stage for span in spans)
    for action, start, stop in spans:
        name = f"{action.kind}{action.microbatch}"
        cells[round(start):round(stop)] = [name if action.stage == upper else name.lower(),
                                           *["="] * round(stop - start - 1)]
    text = " ".join(f"{cell:2}" for cell in cells).rstrip()
    return text if len(text) <= WIDTH else shorten("".join(cell[0] for cell in cells))


def shorten(line: str) -> str:
    """Drop what does not fit on a line."""
    return line if len(line) <= WIDTH else f"{line[:WIDTH - 4]} ..."


if __name__ == "__main__":
    run_demo(show)
