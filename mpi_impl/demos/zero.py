"""ZeRO, in its four stages, which shard what replicas would hold: `mpirun -np 4 python -m mpi_impl.demos.zero`.

It trains one tiny GPT four times, with each rank as a replica. It shows which part a rank owns, how many bytes it holds
between steps, and what it sends, next to the formulas of the paper (Rajbhandari et al. 2020, sections 5 and 7).
"""
from collections.abc import Sequence
from textwrap import fill
from typing import NamedTuple

from mpi_impl.comm.group import Group, Instruments, world
from mpi_impl.comm.ledger import RING, Ledger
from mpi_impl.demos.printing import WIDTH, Check, count, say, say_aligned
from mpi_impl.demos.tiny_gpt import FLOAT64, check_tensors, global_batch, share_of, textbook_of, tiny_gpt, training_on
from mpi_impl.launch.entry import ArgumentParser, run
from mpi_impl.report.memory import FORMULAS
from mpi_impl.runtime.tables import aligned, verdict
from mpi_impl.training.trainer import Trainer
from reference.batches import GPTBatch
from reference.comm.ring import ring_all_gather
from reference.config import ModelConfig, ParallelConfig, require_positive
from reference.costs.volumes import data_parallel_traffic
from reference.parallel.layout import Layout
from reference.parallel.model_states import model_states
from reference.schedules.generators import require_sizes

LAYERS, STEPS = 2, 2
BUCKET = 900        # elements, at least: somewhat more than a layer

INTRODUCTION = """\
Replicas are copies of a model that train together: each of {ranks} takes other samples, all sum their gradients, and
so all take the same step. For each of the model's Psi numbers, its parameters, a rank holds three things: the
parameter itself; its gradient, which says where it should move; and the optimizer states, two averages of past
gradients. Every replica holds the same, so there are N copies.

ZeRO shards that. All numbers are in one row, the flat buffer. It is divided into buckets, each sent as one message,
and each bucket into N equal parts: rank 0 owns the first part of each, rank 1 the second, and so on.
  stage 0   nothing is sharded: gradients are all-reduced (summed, and every rank gets the sum).
  stage 1   a rank keeps the optimizer states of its own part, and updates only that. So it needs the sum of gradients
            for that part only (a reduce-scatter); the updated parts are then sent to all (an all-gather).
  stage 2   gradients, too: the sum is made after every microbatch (there are m = {m} in a step), and a rank keeps only
            its own part of it.
  stage 3   parameters, too: a layer is gathered when it is used, forward and backward, and released afterwards.
An all-reduce is a reduce-scatter and an all-gather, one after the other. So stage 1 sends no more than stage 0.
"""
LETTERS = """\
Psi is the number of parameters, with the padding that makes the buckets divide by N = {n}. A parameter has w = {w}
bytes, its gradient g = {g}, its states K = {k}. Traffic is counted in numbers, for collectives that run as rings. T is
the size of the embedding's tables: stage 3 gathers them forward only, since the gradient of a lookup needs no table.
"""
BAR = 64        # letters for what a rank holds at stage 0
STAGES = ("nothing is sharded", "optimizer states are sharded", "gradients, too", "parameters, too")
SENT = ("2 Psi (N-1)/N", "2 Psi (N-1)/N", "(m + 1) Psi (N-1)/N", "(3 m Psi - m T) (N-1)/N")


class StageCosts(NamedTuple):
    """The memory that a rank holds after some steps at one stage, and its traffic, with their predictions."""

    psi: int                         # elements of the flat buffer, padding included
    held: Sequence[float]            # bytes of parameters, gradients, optimizer's states
    sent: float                      # elements in a step
    expected_held: Sequence[float]   # as the formulas say
    expected_sent: float


def show(ranks: Group, argv: Sequence[str] | None = None) -> None:
    m = parse_options(argv)
    model, check = tiny_gpt(LAYERS), Check()
    say(ranks, introduction(ranks.size, m))
    found = [train_at_stage(ranks, model, stage, m, check) for stage in range(4)]
    say(ranks, bars(found))
    say(ranks, "What each rank held and sent, next to the paper's formulas:\n" + table(found, ranks.size))
    check.conclude(ranks)


def train_at_stage(ranks: Group, model: ModelConfig, stage: int, m: int, check: Check) -> StageCosts:
    """Run a few steps at one stage, print and check them."""
    parallel = ParallelConfig(data_parallel_size=ranks.size, zero_stage=stage, ddp_bucket_size=BUCKET)
    apart = Group(ranks.comm, ranks.name, Instruments())        # with a ledger of its own
    with training_on(apart, model, parallel) as trainer:
        textbook = textbook_of(model)
        for step in range(STEPS):
            tokens, targets = global_batch(step, m * ranks.size)
            result = trainer.step(share_of(trainer, tokens, targets, b=1), len(tokens))
            loss, norm, _ = textbook.step(GPTBatch(tokens, targets))
            check.equal("loss", result.loss, loss)
            check.equal("norm of the gradient", result.grad_norm, norm)
        found = measure(trainer, stage, m)
        say(ranks, fill(f"Stage {stage}: {STAGES[stage]}. {buffer_of(trainer.state.layout)}. Bytes of parameters + "
                        "gradients + optimizer states:", WIDTH))
        say_aligned(ranks, f"owns {owned_ranges(trainer)}", f"holds {' + '.join(f'{held:,}' for held in found.held)} = "
                           f"{sum(found.held):,}")
        say(ranks, "")
        check_tensors(check, "every weight", trainer, trainer.state.parameters.own, textbook.params)
        check.equal("bytes held", found.held, found.expected_held)
        check.equal("numbers sent", found.sent, found.expected_sent)
        return found


def parse_options(argv: Sequence[str] | None) -> int:
    """Return m, the number of microbatches. Raises UserError."""
    parser = ArgumentParser(prog="mpi_impl.demos.zero", description="Show what ZeRO shards.")
    parser.add_argument("--microbatches", type=int, default=2, metavar="M",
                        help="of one sample each, per replica and step (default: 2)")
    m = parser.parse_args(argv).microbatches
    require_positive("microbatches", m)
    require_sizes(1, m)
    return m


def introduction(n: int, m: int) -> str:
    alone = "\nOne rank has no other replica, so nothing is saved or sent: start more.\n" if n == 1 else ""
    return INTRODUCTION.format(ranks=count(n), m=m) + alone


# ---- measurements and formulas --------------------------------------------------------------------------------------


def measure(trainer: Trainer, stage: int, m: int) -> StageCosts:
    """Measure memory and traffic after the steps, with their predictions."""
    n, layout, held = trainer.topology.data.size, trainer.state.layout, trainer.held()
    tables = sum(layout.bucket_of[unit].size for unit in ("embedding.word", "embedding.position"))
    less = m * ring_all_gather(tables, n) if stage == 3 else 0      # the gradient of a lookup needs no table
    return StageCosts(layout.size, (held.parameters, held.gradients, held.optimizer), sent(trainer.ledger) / STEPS,
                 model_states(layout.size, n, stage, *FLOAT64.bytes_each),
                 data_parallel_traffic(layout.size, n, stage, m) - less)


def sent(ledger: Ledger) -> float:
    """Return the elements of gradients and parameters that a rank sends, if collectives run as rings."""
    return sum(RING[entry.operation](total.elements, entry.group_size) for entry, total in ledger.totals.items()
               if entry.reason in ("gradients", "parameters"))


# ---- output ---------------------------------------------------------------------------------------------------------


def buffer_of(layout: Layout) -> str:
    """Describe the buffer: '2,000 numbers in 2 buckets: 0-983 (output, final_layernorm, blocks.1), 984-1999 (...)'."""
    buckets = [f"{bounds(bucket.slice)} ({', '.join(bucket.units)})" for bucket in layout.buckets]
    return f"{count(layout.size, 'number')} in {count(len(buckets), 'bucket')}: {', '.join(buckets)}"


def owned_ranges(trainer: Trainer) -> str:
    """Return the ranges of numbers that the rank owns, one for each bucket."""
    layout = trainer.state.layout
    own = [layout.owned_piece(bucket, trainer.state.zero.part) for bucket in layout.buckets]
    return " ".join(bounds(piece.in_buffer) for piece in own)


def bounds(part: slice) -> str:
    return f"{part.start}-{part.stop - 1}"


def bars(found: list[StageCosts]) -> str:
    """Draw what a rank holds at each stage: letters, in proportion to the bytes."""
    whole = sum(found[0].held)
    rows = ["".join(letter * round(BAR * size / whole) for letter, size in zip("pgo", one.held)) for one in found]
    return "\n".join(["A rank holds parameters (p), gradients (g) and optimizer states (o):",
                      *(f"  stage {stage}  {row}" for stage, row in enumerate(rows)), ""])


def table(found: list[StageCosts], n: int) -> str:
    """Return a table with a row for each stage."""
    rows = [["stage", "Psi", "holds, bytes", "the formula", "", "sends in a step", "the formula", ""]]
    for stage, one in enumerate(found):
        rows.append([str(stage), f"{one.psi:,}", *beside(FORMULAS[stage], sum(one.held), sum(one.expected_held)),
                     *beside(SENT[stage], one.sent, one.expected_sent)])
    w, g, k = FLOAT64.bytes_each
    return f"{aligned(rows, left=(3, 6))}\n{LETTERS.format(n=n, w=w, g=g, k=k)}"


def beside(formula: str, found: float, expected: float) -> list[str]:
    """Return '2,667', the formula, and '= 2,667', or NOT if they differ by more than rounding."""
    return [f"{found:,.0f}", formula, verdict(round(found, 6), round(expected, 6), f"{expected:,.0f}")]


if __name__ == "__main__":
    run(lambda: show(world()))
