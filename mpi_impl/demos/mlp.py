"""The transformer's MLP, sharded over all ranks: `mpirun -np 4 python -m mpi_impl.demos.mlp`.

It shows which rank owns which columns of A and which rows of B, what each computes, and the two all-reduces that make
the result whole: one forward, one backward (Shoeybi et al. 2019, section 3, figure 3a).
"""
from collections.abc import Sequence

import numpy as np

from mpi_impl.comm.group import Group, world
from mpi_impl.comm.mappings import TensorParallelRegion
from mpi_impl.demos.printing import Check, count, first_elements, say, say_aligned, say_each, shape, span, traffic_table
from mpi_impl.demos.sizes import ShardedSize
from mpi_impl.kernels import ACTIVATIONS, linear
from mpi_impl.launch.entry import run
from mpi_impl.layers.mlp import mlp_backward, mlp_forward
from mpi_impl.parallel.sinks import ImmediateSink
from reference.config import ModelConfig
from reference.layers import mlp as textbook
from reference.params import initialize, split, tree_map

SAMPLES, POSITIONS = 2, 3
HIDDEN_SIZE = ShardedSize(
    "mlp", "Show how the MLP is sharded over the ranks.", "hidden_size", "H", least=8, times=4,
    help="4h must be a multiple of the number of ranks (default: the first such h from 8 on)",
    why="Every rank gets an equal number of columns.",
    numbers=lambda n, h: n * 24 * h**2)      # A and B, their gradients, and the textbook's

INTRODUCTION = """\
The MLP of a transformer is two matrix products with a nonlinear function between them: Y = GeLU(X A) B. X has a row of
h numbers for every token; A is [h, 4h] and B is [4h, h]. In a large model A and B are too big for one device.

Split A by columns over {ranks} (processes, each with memory of its own). Then every rank computes columns of X A and
can apply GeLU to them without data of any other rank. (Split by rows, A would give sums X1 A1 + X2 A2 that must be
added up before GeLU, since GeLU(u + v) is not GeLU(u) + GeLU(v).) A rank now holds columns of GeLU(X A), and they
multiply exactly the same rows of B. So split B by rows. Every rank gets a matrix as large as Y, a partial sum, and the
sum over the ranks is Y.

Two operators mark the edges. f, before A: forward it does nothing, backward it sums dX over the ranks, since each used
the whole X. g, after B: forward it sums the partial results, backward it does nothing. An all-reduce is such a sum, of
which every rank gets the result.
"""


def show(ranks: Group, argv: Sequence[str] | None = None) -> None:
    h = HIDDEN_SIZE.parse(argv, ranks.size)
    say(ranks, INTRODUCTION.format(ranks=count(ranks.size)))
    c = ModelConfig(num_layers=1, hidden_size=h, num_attention_heads=1, vocab_size=1,
                    max_position_embeddings=POSITIONS, init_method_std=0.5)
    tensors = textbook.mlp_tensors(c)
    whole = initialize(tensors, seed=1, dtype=np.float64)
    mine = split(whole, tensors, ranks.size)[ranks.rank]
    x, dy = np.random.default_rng(1).normal(size=(2, SAMPLES, POSITIONS, h))      # identical on every rank

    say(ranks, f"Who owns what: h = {h}, X {shape(x)}, A {shape(whole.w_in)}, B {shape(whole.w_out)}")
    n = mine.w_in.shape[1]
    first = ranks.rank * n
    say_aligned(ranks, f"{span(first, first + n, 'column')} of A {shape(mine.w_in)},",
                f"{span(first, first + n, 'row')} of B {shape(mine.w_out)}")

    region, act = TensorParallelRegion(ranks), ACTIVATIONS[c.activation][0]
    with ranks.ledger.phase("forward"):
        y, cache = mlp_forward(x, mine, c, region)
    a = act(linear(x, mine.w_in, mine.b_in))[0]                 # once more, to show it
    say(ranks, "\nForward. A rank's partial sum, its first elements, before g:")
    say_each(ranks, f"GeLU(X A) {shape(a)} -> partial sum {shape(y)}: {first_elements(linear(a, mine.w_out))}")
    say(ranks, "and after g the same on every rank, the whole Y:")
    say_each(ranks, f"Y {shape(y)}: {first_elements(y)}")

    grads = tree_map(np.zeros_like, mine)
    with ranks.ledger.phase("backward"):
        dx = mlp_backward(dy.copy(), mine, cache, c, grads, ImmediateSink(), region)
    say(ranks, "\nBackward, from a random dY. Weight gradients are where their weights are, and are not sent:")
    say_each(ranks, f"dA {shape(grads.w_in)}, dB {shape(grads.w_out)}; after f dX {shape(dx)}: {first_elements(dx)}")
    say(ranks, f"\nWhat moved, on each rank. Of N elements an all-reduce sends 2 N (t-1)/t, here with t = {ranks.size}:"
               f"\n{traffic_table(ranks.ledger)}\n")

    check = Check()
    whole_y, whole_cache = textbook.mlp_forward(x, whole, c)
    whole_dx, whole_grads = textbook.mlp_backward(dy, whole, whole_cache, c)
    check.equal("Y", y, whole_y)
    check.equal("dX", dx, whole_dx)
    check.shards(ranks, "every weight's gradient", grads, whole_grads, tensors)
    check.conclude(ranks)


if __name__ == "__main__":
    run(lambda: show(world()))
