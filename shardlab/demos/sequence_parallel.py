"""Sequence parallelism, in one transformer block: `mpirun -np 4 python -m shardlab.demos.sequence_parallel`.

It runs the same block twice: with f and g, and with an all-gather and a reduce-scatter instead. It shows which
positions each rank has, that the same amount is sent, and how much less is kept (Korthikanti et al. 2022, section
4.2.2, figure 5).
"""
from mpi_impl.comm.ledger import ring_bytes
from mpi_impl.comm.regions import SequenceParallelRegion, TensorParallelRegion
from mpi_impl.runtime.tables import aligned
from reference.array_bytes import arrays_under
from reference.config import ModelConfig, round_up
from reference.costs.volumes import tensor_parallel_traffic
from reference.layer_context import LayerContext
from reference.layers.block import block_tensors
from reference.params import leaves
from reference.random.dropout import Dropout
from shardlab.demos.layer_case import LayerCase
from shardlab.demos.printing import preview, shape
from shardlab.demos.runner import Demo, Size, program, run_demo

SAMPLES, HEAD_SIZE = 2, 4
SEQ_LENGTH = Size("--seq-length", "sequence_parallel", "S", least=8, help="positions")

INTRODUCTION = """\
A block of a transformer is attention, and then an MLP. Each has a layer norm before it, and after it dropout and a sum
that adds the norm's input again. Tensor parallelism shards attention by heads and the MLP by columns. The layers
between them are replicated: {ranks} (processes, each with memory of its own) all compute it, on all of b texts with s
positions, x [b, s, h], and all keep the same for the backward.

But norm, dropout and sum treat each position by itself. So shard x by positions there: each of t ranks has s/t of
them, does 1/t of the work, and keeps 1/t of the memory. Heads and columns need all positions, so the edges have to
convert:

                                   x whole: with f and g                      x sharded by positions
  f, before attention and the MLP  forward nothing, backward an all-reduce    all-gather, reduce-scatter
  g, after them                    forward an all-reduce, backward nothing    reduce-scatter, all-gather

A reduce-scatter sums over the ranks and gives each its piece of the sum; an all-gather gives every rank all pieces.
One after the other they are an all-reduce, so the same amount is sent. (Why not shard by positions all the way? The
attention of every position needs the keys and values of all before it, and each rank would need all weights.)
"""

TOGETHER = """\
Together: f and g {whole:,.0f} bytes; what is in their places {sharded:,.0f}, as much. The inputs of attention and MLP
are kept sharded, so the backward gathers them again: {again:,.0f} more. And weights outside, such as those of norms,
saw other positions on each rank, so their gradients are summed: {outside:,.0f} more."""


@program(SEQ_LENGTH.parse)
def show(demo: Demo, s: int) -> None:
    demo.introduce(INTRODUCTION)
    t, a = demo.n, round_up(4, demo.n)
    c = ModelConfig(1, a * HEAD_SIZE, a, 1, s, init_method_std=0.2)
    context, tensors = LayerContext(Dropout(c, seed=1, step=0, layer=0)), block_tensors(c)
    case = LayerCase(demo, tensors, c, SAMPLES)
    x, expected = case.x, case.in_textbook(context)
    mine = slice(None), demo.own(s)

    demo.say(f"Who has what: x {shape(x)} has b = {SAMPLES}, s = {s}, h = {c.hidden_size}. Positions outside "
             "attention and MLP; heads and columns inside:")
    demo.say_each(f"{demo.share(s, 'position')} {shape(x[mine])};", f"{demo.share(a, 'head')} of attention,",
                     f"{demo.share(4 * c.hidden_size, 'column')} of the MLP, at all positions")
    replicated = case.on_rank(TensorParallelRegion(demo.ranks), context=context, name="whole: ")
    sharded = case.on_rank(SequenceParallelRegion(demo.ranks), mine, context, "sharded: ")
    with demo.phase("sharded: after"):
        for (_, tensor), (_, grad) in zip(leaves(tensors), leaves(sharded.grads)):
            if tensor.split is None:      # each rank applied these weights to its own positions only
                demo.ranks.all_reduce(grad, "weights outside")
    case.compare(replicated, expected)
    case.compare(sharded, expected, mine)

    demo.say("\nForward and backward, from a random dY. The first elements of what each rank has at the end:")
    demo.say_each(f"Y {preview(sharded.y)}", f"dX {preview(sharded.dx)}")
    pairs = zip(arrays_under(replicated.cache).values(), arrays_under(sharded.cache).values())
    rows = [[names[0], shape(one), shape(other)] for (names, one), (_, other) in pairs if one.shape != other.shape]
    demo.say("\nWhat a rank keeps for the backward of what was b s h on every rank, and is b s h/t:\n"
             f"{aligned([['', 'whole, f and g', 'sharded by positions'], *rows])}")
    demo.say_traffic(f"Of N elements an all-reduce sends 2 N (t-1)/t, each half of it N (t-1)/t; t = {t}:")
    sent = dict.fromkeys(("whole", "sharded", "again", "outside"), 0.0)
    for entry, total in demo.ranks.ledger.totals.items():
        last = entry.reason.split()[-1]
        sent[last if last in sent else entry.phase.split(":")[0]] += ring_bytes(entry, total)
    demo.say(f"{TOGETHER.format(**sent)}\n")
    formulas = [x.itemsize * tensor_parallel_traffic(SAMPLES, s, c.hidden_size, t, again) for again in (False, True)]
    demo.equal("what is sent", [sent["whole"], sent["sharded"], sent["sharded"] + sent["again"]],
               [formulas[0], *formulas])


if __name__ == "__main__":
    run_demo(show)
