"""Self-attention, sharded by heads over all ranks: `mpirun -np 4 python -m mpi_impl.demos.attention`.

It shows which rank owns which heads, that a head's pattern needs no other rank, and the two all-reduces: one forward,
one backward (Shoeybi et al. 2019, section 3, figure 3b).
"""
from collections.abc import Sequence

import numpy as np

from mpi_impl.comm.group import Group, world
from mpi_impl.comm.mappings import TensorParallelRegion
from mpi_impl.demos.printing import Check, count, first_elements, say, say_aligned, say_each, shape, span, traffic_table
from mpi_impl.demos.sizes import ShardedSize
from mpi_impl.kernels import linear
from mpi_impl.launch.entry import run
from mpi_impl.layers.attention import attention_backward, attention_forward
from mpi_impl.parallel.sinks import ImmediateSink
from reference.config import ModelConfig
from reference.layers import attention as textbook
from reference.params import initialize, split, tree_map

SAMPLES, POSITIONS, HEAD_SIZE = 2, 4, 4
SHOWN = 4       # heads of a rank
NUM_HEADS = ShardedSize(
    "attention", "Show how ranks shard attention.", "num_attention_heads", "A", least=4,
    help="a multiple of the number of ranks (default: the first from 4 on)",
    why="Every rank gets an equal number of heads.",
    numbers=lambda n, a: n * 12 * (a * HEAD_SIZE)**2)      # four matrices, gradients, the textbook's

INTRODUCTION = """\
In attention every position of a text looks at others, and takes from each what it needs. X has a row of h numbers
for each of s positions. A matrix [h, 3h] makes three rows of each: a query Q (what am I looking for?), a key K (what
do I offer?) and a value V (what do I pass on?). The better a query fits a key, as measured by q k^T, the more of the
value is taken: softmax turns a position's scores into weights that add up to 1.

That is done a times, by a heads. Each has d = h/a columns of Q, of K and of V, and its own scores and weights. Heads
do not interact until a last matrix [h, h], the projection, mixes them. So distribute the heads over {ranks}
(processes, each with memory of its own): a rank gets its heads' columns of Q, K and V, and the rows of the projection
that read them. (If you split the [h, 3h] straight through, a rank has queries, but no keys. If you split a head in
two, each half has a part of the sum q k^T, which must be sent before softmax: s^2 numbers for each head and text.)

A rank's heads times its rows of the projection are a partial sum, as large as Y. Two operators mark the edges. g, at
the end, is an all-reduce forward: a sum over the ranks, of which every rank gets the result. f, before Q, K and V,
does nothing forward; backward it sums dX, since every rank used the whole X.
"""


def show(ranks: Group, argv: Sequence[str] | None = None) -> None:
    a, d = NUM_HEADS.parse(argv, ranks.size), HEAD_SIZE
    say(ranks, INTRODUCTION.format(ranks=count(ranks.size)))
    c = ModelConfig(num_layers=1, hidden_size=a * d, num_attention_heads=a, vocab_size=1,
                    max_position_embeddings=POSITIONS, init_method_std=0.3)
    tensors = textbook.attention_tensors(c)
    whole = initialize(tensors, seed=1, dtype=np.float64)
    mine = split(whole, tensors, ranks.size)[ranks.rank]
    x, dy = np.random.default_rng(1).normal(size=(2, SAMPLES, POSITIONS, a * d))      # identical on every rank

    say(ranks, f"Who owns what: a = {a} heads, each with d = {d} of h = {a * d} columns; X {shape(x)}")
    n = mine.b_qkv.shape[1]
    first = ranks.rank * n
    say_aligned(ranks, f"{span(first, first + n, 'head')}:",
                f"{span(first * d, (first + n) * d, 'column')} of Q, K and V {shape(mine.w_qkv)},",
                f"{span(first * d, (first + n) * d, 'row')} of the projection {shape(mine.w_out)}")

    region = TensorParallelRegion(ranks)
    with ranks.ledger.phase("forward"):
        y, cache = attention_forward(x, mine, c, region)
    say(ranks, f"\nForward. The weights with which the last of {POSITIONS} positions reads each, in every head; no "
               "rank needs another's:")
    say_each(ranks, patterns(first, cache.core.probs[0, :, -1]))
    say(ranks, f"A rank's partial sum {shape(y)}, its first elements; and after g the same on every rank, the whole Y:")
    say_each(ranks, f"{first_elements(linear(cache.context, mine.w_out))}  ->  {first_elements(y)}")

    grads = tree_map(np.zeros_like, mine)
    with ranks.ledger.phase("backward"):
        dx = attention_backward(dy.copy(), mine, cache, c, grads, ImmediateSink(), region)
    say(ranks, "\nBackward, from a random dY. Weight gradients are where their weights are, and not sent: of Q, K and "
               f"V\n{shape(grads.w_qkv)}, of the projection {shape(grads.w_out)}. After f the same on every rank, dX:")
    say_each(ranks, f"dX {shape(dx)}: {first_elements(dx)}")
    say(ranks, f"\nWhat moved, on each rank. Of N = b s h elements an all-reduce sends 2 N (t-1)/t, here with t = "
               f"{ranks.size}:\n{traffic_table(ranks.ledger)}\n")

    whole_y, whole_cache = textbook.attention_forward(x, whole, c)
    whole_dx, whole_grads = textbook.attention_backward(dy, whole, whole_cache, c)
    check = Check()
    check.equal("the attention of every head", cache.core.probs, whole_cache.core.probs[:, first:first + n])
    check.equal("Y", y, whole_y)
    check.equal("dX", dx, whole_dx)
    check.shards(ranks, "every weight's gradient", grads, whole_grads, tensors)
    check.conclude(ranks)


def patterns(first_head: int, probs) -> str:
    """Return a line for each of a rank's heads, with its attention weights from `probs` [a/t, s]."""
    lines = [f"head {first_head + i}: " + " ".join(f"{share:4.0%}" for share in shares)
             for i, shares in enumerate(probs[:SHOWN])]
    return "\n".join([*lines, "..."] if len(probs) > SHOWN else lines)


if __name__ == "__main__":
    run(lambda: show(world()))
