"""Sequence parallelism, in one transformer block: `mpirun -np 4 python -m mpi_impl.demos.sequence_parallel`.

It runs the same block twice: with f and g, and with an all-gather and a reduce-scatter instead. It shows which
positions each rank has, that the same amount is sent, and how much less is kept (Korthikanti et al. 2022, section
4.2.2, figure 5).
"""
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpi_impl.comm.group import Group, world
from mpi_impl.comm.ledger import Ledger, ring_bytes
from mpi_impl.comm.mappings import SequenceParallelRegion, TensorParallelRegion
from mpi_impl.demos.printing import Check, count, first_elements, say, say_aligned, shape, span, traffic_table
from mpi_impl.demos.sizes import ShardedSize
from mpi_impl.launch.entry import run
from mpi_impl.layers.block import block_backward, block_forward
from mpi_impl.parallel.sinks import ImmediateSink
from mpi_impl.runtime.tables import aligned
from reference.config import ModelConfig, round_up
from reference.costs.volumes import tensor_parallel_traffic
from reference.dropout import Dropout
from reference.layer_context import LayerContext
from reference.layers import block as textbook
from reference.params import initialize, leaves, split, tree_map

SAMPLES, HEAD_SIZE = 2, 4
SEQ_LENGTH = ShardedSize(
    "sequence_parallel", "Show a block of which each rank has its positions.", "seq_length", "S", least=8,
    help="positions, a multiple of the number of ranks (default: the first from 8 on)",
    why="Every rank has the same number of positions.",
    numbers=lambda n, s: 8 * round_up(4, n) * SAMPLES * s**2)      # scores of attention, on all ranks

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


def show(ranks: Group, argv: Sequence[str] | None = None) -> None:
    s, t = SEQ_LENGTH.parse(argv, ranks.size), ranks.size
    say(ranks, INTRODUCTION.format(ranks=count(t)))
    a = round_up(4, t)
    c = ModelConfig(num_layers=1, hidden_size=a * HEAD_SIZE, num_attention_heads=a, vocab_size=1,
                    max_position_embeddings=s, init_method_std=0.2)
    tensors = textbook.block_tensors(c)
    whole = initialize(tensors, seed=1, dtype=np.float64)
    p = split(whole, tensors, t)[ranks.rank]
    x, dy = np.random.default_rng(1).normal(size=(2, SAMPLES, s, c.hidden_size))      # identical on every rank
    mine = slice(ranks.rank * s // t, (ranks.rank + 1) * s // t)

    say(ranks, f"Who has what: x {shape(x)} has b = {SAMPLES}, s = {s}, h = {c.hidden_size}. Positions outside "
               "attention and MLP; heads and columns inside:")
    heads, columns = p.attention.b_qkv.shape[1], len(p.mlp.b_in)
    say_aligned(ranks, f"{span(mine.start, mine.stop, 'position')} {shape(x[:, mine])};",
                f"{span(ranks.rank * heads, (ranks.rank + 1) * heads, 'head')} of attention,",
                f"{span(ranks.rank * columns, (ranks.rank + 1) * columns, 'column')} of the MLP, at all positions")
    replicated = through_block(ranks, "whole", x, dy, p, c, TensorParallelRegion(ranks))
    sharded = through_block(ranks, "sharded", x[:, mine], dy[:, mine], p, c, SequenceParallelRegion(ranks))
    with ranks.ledger.phase("sharded: after"):
        complete(ranks, sharded.grads, tensors)

    say(ranks, "\nForward and backward, from a random dY. The first elements of what each rank has at the end:")
    say_aligned(ranks, *(f"{name} {shape(array)}: {first_elements(array)}"
                         for name, array in (("Y", sharded.y), ("dX", sharded.dx))))
    say(ranks, "\nWhat a rank keeps for the backward of what was b s h on every rank, and is b s h/t:\n"
               f"{kept_table(replicated.cache, sharded.cache)}")
    sent = bytes_sent(ranks.ledger)
    say(ranks, "\nWhat moved, on each rank. Of N elements an all-reduce sends 2 N (t-1)/t, each half of it N (t-1)/t; "
               f"t = {t}:\n{traffic_table(ranks.ledger)}\n{TOGETHER.format(**sent)}\n")

    check = Check()
    whole_y, whole_cache = textbook.block_forward(x, whole, c, LayerContext(Dropout(c, seed=1, step=0, layer=0)))
    whole_dx, whole_grads = textbook.block_backward(dy, whole, whole_cache, c)
    for found, positions in ((replicated, slice(s)), (sharded, mine)):
        check.equal("Y", found.y, whole_y[:, positions])
        check.equal("dX", found.dx, whole_dx[:, positions])
        check.shards(ranks, "every weight's gradient", found.grads, whole_grads, tensors)
    formulas = [x.itemsize * tensor_parallel_traffic(SAMPLES, s, c.hidden_size, t, again) for again in (False, True)]
    check.equal("what is sent", [sent["whole"], sent["sharded"], sent["sharded"] + sent["again"]],
                [formulas[0], *formulas])
    check.conclude(ranks)


class Passed(NamedTuple):
    """The results of a block, and what its forward keeps for its backward."""

    y: Any
    cache: Any
    dx: Any
    grads: Any


def through_block(ranks: Group, name: str, x, dy, p, c: ModelConfig, region) -> Passed:
    """Run forward and backward on this rank's x and dy outside the regions: all positions, or its own."""
    with ranks.ledger.phase(f"{name}: forward"):
        y, cache = block_forward(x, p, c, region, LayerContext(Dropout(c, seed=1, step=0, layer=0)))
    grads = tree_map(np.zeros_like, p)
    with ranks.ledger.phase(f"{name}: backward"):
        dx = block_backward(dy, p, cache, c, grads, ImmediateSink(), region)
    return Passed(y, cache, dx, grads)


def complete(ranks: Group, grads, tensors) -> None:
    """Sum the gradients of replicated weights outside the regions: each rank applied them to its own positions only."""
    for (_, tensor), (_, grad) in zip(leaves(tensors), leaves(grads)):
        if tensor.split is None:
            ranks.all_reduce(grad, "weights outside")


def kept_table(replicated, sharded) -> str:
    """Return a table of the arrays outside the regions that a block's caches keep, with f and g and with sequence
    parallelism.
    """
    rows, sums = [["", "whole, f and g", "bytes", "sharded by positions", "bytes"]], [0, 0]
    for what, whole, part in zip(("x, normed, for the first norm", "input of attention", "mask of the dropout after it",
                                  "x, normed, for the second norm", "input of the MLP", "mask of the dropout after it"),
                                 arrays_outside(replicated), arrays_outside(sharded)):
        rows.append([what, shape(whole), f"{whole.nbytes:,}", shape(part), f"{part.nbytes:,}"])
        sums = [sums[0] + whole.nbytes, sums[1] + part.nbytes]
    return aligned([*rows, ["sum", "", f"{sums[0]:,}", "", f"{sums[1]:,}"]])


def arrays_outside(cache) -> list:
    """Return the arrays of a block's cache that are [b, s, h], or with sequence parallelism [b, s/t, h]."""
    return [cache.input_layernorm[0], cache.attention.x, cache.attention_mask.keep,
            cache.post_attention_layernorm[0], cache.mlp[0], cache.mlp_mask.keep]


def bytes_sent(ledger: Ledger) -> dict[str, float]:
    """Return what one rank sends: with f and g, with their replacements, and for what sequence parallelism needs
    besides.
    """
    sent = {"whole": 0.0, "sharded": 0.0, "again": 0.0, "outside": 0.0}
    for entry, total in ledger.totals.items():
        last = entry.reason.split()[-1]
        sent[last if last in sent else entry.phase.split(":")[0]] += ring_bytes(entry, total)
    return sent


if __name__ == "__main__":
    run(lambda: show(world()))
