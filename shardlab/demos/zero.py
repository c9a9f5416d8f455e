"""ZeRO, in its four stages, which shard what replicas would hold: `mpirun -np 4 python -m shardlab.demos.zero`.

It trains one tiny GPT four times, with each rank as a replica. It shows which part a rank owns, how many bytes it holds
between steps, and what it sends, next to the formulas of the paper (Rajbhandari et al. 2020, sections 5 and 7).
"""
from mpi_impl.comm.ledger import RING, Ledger
from mpi_impl.runtime.tables import aligned, count, verdict
from reference.comm.ring import ring_all_gather
from reference.config import ParallelConfig
from reference.costs.volumes import data_parallel_traffic
from reference.parallel.model_states import model_states
from shardlab.demos.runner import Demo, Size, program, run_demo
from shardlab.demos.tiny_gpt import FLOAT64, apart, check_tensors, step_and_compare, textbook_of, tiny_gpt, training_on
from shardlab.report.memory import FORMULAS

LAYERS, STEPS = 2, 2
BUCKET = 900        # elements, at least: somewhat more than a layer
MICROBATCHES = Size("--microbatches", "zero", "M", least=2, sharded=False,
                    help="of one sample each, per replica and step")

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
ALONE = """\
One rank has no other replica, so nothing is saved or sent: start more.
"""
LETTERS = """\
Psi is the number of parameters, with the padding that makes the buckets divide by N = {n}. A parameter has w = {w}
bytes, its gradient g = {g}, its states K = {k}. Traffic is counted in numbers, for collectives that run as rings. T is
the size of the embedding's tables: stage 3 gathers them forward only, since the gradient of a lookup needs no table.
"""
BAR = 48        # letters for what a rank holds at stage 0
STAGES = ("nothing is sharded", "optimizer states are sharded", "gradients, too", "parameters, too")
SENT = ("2 Psi (N-1)/N", "2 Psi (N-1)/N", "(m + 1) Psi (N-1)/N", "(3 m Psi - m T) (N-1)/N")


@program(MICROBATCHES.parse)
def show(demo: Demo, m: int) -> None:
    demo.introduce(INTRODUCTION + ("\n" + ALONE) * (demo.n == 1), m=m)
    rows = [["stage", "Psi", "holds, bytes", "the formula", "", "sends in a step", "the formula", ""]]
    rows += [train_at_stage(demo, stage, m) for stage in range(4)]
    w, g, k = FLOAT64.bytes_each
    demo.say(f"What each rank held and sent, next to the paper's formulas:\n{aligned(rows, left=(3, 6))}\n"
             f"{LETTERS.format(n=demo.n, w=w, g=g, k=k)}")


def train_at_stage(demo: Demo, stage: int, m: int) -> list[str]:
    """Run a few steps at one stage, print and check them. Return the stage's row of the table."""
    n, parallel = demo.n, ParallelConfig(data_parallel_size=demo.n, zero_stage=stage, ddp_bucket_size=BUCKET)
    with training_on(apart(demo.ranks), tiny_gpt(LAYERS), parallel) as trainer:
        textbook, layout = textbook_of(tiny_gpt(LAYERS)), trainer.state.layout
        for step in range(STEPS):
            step_and_compare(demo, trainer, textbook, step, m * n, b=1)
        check_tensors(demo, "every weight", trainer, trainer.state.parameters.own, textbook.params)
        psi, held, moved = layout.size, trainer.held()[:3], sent(trainer.ledger) / STEPS
        own = [layout.owned_piece(bucket, trainer.state.zero.part).in_buffer for bucket in layout.buckets]
    demo.say(f"Stage {stage}: {STAGES[stage]}. {count(psi, 'number')} in {count(len(own), 'bucket')}:")
    whole = sum(model_states(psi, n, 0, *FLOAT64.bytes_each))
    demo.say_each(f"owns {' '.join(f'{part.start}-{part.stop - 1}' for part in own)}", f"holds {sum(held):,}")
    bar = "".join(letter * round(BAR * size / whole) for letter, size in zip("pgo", held))
    demo.say(f"  of parameters (p), gradients (g) and optimizer states (o): {bar}\n")
    tables = sum(layout.bucket_of[unit].size for unit in ("embedding.word", "embedding.position"))
    less = m * ring_all_gather(tables, n) if stage == 3 else 0      # the gradient of a lookup needs no table
    states, traffic = model_states(psi, n, stage, *FLOAT64.bytes_each), data_parallel_traffic(psi, n, stage, m) - less
    demo.equal("bytes held", held, states)
    demo.equal("numbers sent", moved, traffic)
    return [str(stage), f"{psi:,}", f"{sum(held):,}", FORMULAS[stage], verdict(sum(held), round(sum(states))),
            f"{moved:,.0f}", SENT[stage], verdict(round(moved), round(traffic))]


def sent(ledger: Ledger) -> float:
    """Return the elements of gradients and parameters that a rank sends, if collectives run as rings."""
    return sum(RING[entry.operation](total.elements, entry.group_size) for entry, total in ledger.totals.items()
               if entry.reason in ("gradients", "parameters"))


if __name__ == "__main__":
    run_demo(show)
