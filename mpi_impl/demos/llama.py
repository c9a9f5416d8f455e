"""A Llama's attention and MLP, sharded over all ranks: `mpirun -np 4 python -m mpi_impl.demos.llama`.

It shows which ranks hold copies of a head of keys and values, whose gradients are parts of one sum; and that gate and
up must be sharded together, or all shapes are right and the result is wrong.
"""
from collections.abc import Iterable, Sequence

import numpy as np

from mpi_impl.comm.group import Group, world
from mpi_impl.comm.mappings import TensorParallelRegion
from mpi_impl.demos.printing import (Check, colored, count, first_elements, say, say_aligned, say_each, shape, span,
                                     traffic_table)
from mpi_impl.demos.sizes import ShardedSize
from mpi_impl.launch.entry import run
from mpi_impl.layers.gated_mlp import gated_mlp_backward, gated_mlp_forward
from mpi_impl.layers.grouped_attention import grouped_attention_backward, grouped_attention_forward
from mpi_impl.parallel.sinks import ImmediateSink
from mpi_impl.runtime.tables import WIDTH
from reference.config import ModelConfig
from reference.layers import gated_mlp, grouped_attention as grouped
from reference.params import initialize, split, tree_map

SAMPLES, POSITIONS, HEAD_SIZE, GROUPS = 2, 4, 4, 2
NUM_HEADS = ShardedSize(
    "llama", "Show how ranks shard a Llama's attention and MLP.", "num_attention_heads", "A", least=4,
    help="a multiple of the number of ranks (default: the first from 4 on)",
    why="Every rank gets an equal number of heads.",
    numbers=lambda n, a: n * 36 * (a * HEAD_SIZE)**2)      # ten matrices, gradients, the textbook's

INTRODUCTION = """\
In the attention of a Llama several heads of queries, a group, share one head of keys and values, so that the cache
of generation is small. The heads of queries are distributed over {ranks}. Where there are fewer groups than ranks,
neighbours hold copies of the same head of keys and values. Each rank's gradient of its copy comes from its own queries
only. So these gradients, and no others, are summed over the ranks with copies; without that the copies drift apart.

Its MLP has a gate: silu(x G) is multiplied with x U, column by column. G and U are one tensor [h, 2, f], and a rank has
the same columns of both. If you cut a matrix [h, 2f] instead, the first ranks have the gate alone. f and g are those
of every layer: g sums over the ranks forward, f backward.
"""


def show(ranks: Group, argv: Sequence[str] | None = None) -> None:
    a, d, t = NUM_HEADS.parse(argv, ranks.size), HEAD_SIZE, ranks.size
    g = GROUPS if a % GROUPS == 0 and (GROUPS % t == 0 or t % GROUPS == 0) else 1
    say(ranks, INTRODUCTION.format(ranks=count(t)))
    c = ModelConfig(1, a * d, a, 1, POSITIONS, num_query_groups=g, swiglu=True, add_bias_linear=False,
                    ffn_hidden_size=3 * a, init_method_std=0.3)
    tensors = {"attention": grouped.grouped_attention_tensors(c), "mlp": gated_mlp.gated_mlp_tensors(c)}
    whole = initialize(tensors, seed=1, dtype=np.float64)
    mine = split(whole, tensors, t)[ranks.rank]
    x, dy = np.random.default_rng(1).normal(size=(2, SAMPLES, POSITIONS, a * d))      # identical on every rank
    copies = tensors["attention"].w_kv.copies(t)
    say_who_owns_what(ranks, a, g, mine, copies)
    if 6 * a < WIDTH - 30:
        say(ranks, picture(a, g, t))

    region, grads = TensorParallelRegion(ranks), tree_map(np.zeros_like, mine)
    with ranks.ledger.phase("forward"):
        y, core = grouped_attention_forward(x, mine["attention"], c, region)
        z, gate = gated_mlp_forward(y, mine["mlp"], c, region)
    say(ranks, "\nForward: the result of the MLP behind attention, the same on every rank:")
    say_each(ranks, f"Z {shape(z)}: {first_elements(z)}")
    with ranks.ledger.phase("backward"):
        dx = gated_mlp_backward(dy.copy(), mine["mlp"], gate, c, grads["mlp"], ImmediateSink(), region)
        dx = grouped_attention_backward(dx, mine["attention"], core, c, grads["attention"], ImmediateSink(), region)
    sum_copies(ranks, grads["attention"].w_kv, copies)
    say(ranks, f"\nWhat moved, on each rank:\n{traffic_table(ranks.ledger)}\n")

    textbook_y, textbook_core = grouped.grouped_attention_forward(x, whole["attention"], c)
    textbook_z, textbook_gate = gated_mlp.gated_mlp_forward(textbook_y, whole["mlp"], c)
    dz, mlp = gated_mlp.gated_mlp_backward(dy, whole["mlp"], textbook_gate, c)
    textbook_dx, attention = grouped.grouped_attention_backward(dz, whole["attention"], textbook_core, c)
    wrong = gated_mlp.side_by_side_mlp_forward(textbook_y, whole["mlp"], c, t)
    off = np.abs(wrong - textbook_z).max() / np.abs(textbook_z).max()
    say(ranks, f"Gate beside up, cut as a matrix [h, 2f] into {count(t, 'block')}: Z is off by {off:.0%} of its "
               "largest element.\n")
    check = Check()
    check.equal("Z", z, textbook_z)
    check.equal("dX", dx, textbook_dx)
    check.shards(ranks, "every weight's gradient", grads, {"attention": attention, "mlp": mlp}, tensors)
    check.conclude(ranks)


def say_who_owns_what(ranks: Group, a: int, g: int, mine, copies: int) -> None:
    say(ranks, f"Who owns what: {count(a, 'head')} of queries, {count(g, 'head')} of keys and values, "
               f"{3 * a} columns of gate and up")
    (_, heads, _), (_, _, groups, _), (_, _, columns) = (
        mine["attention"].w_q.shape, mine["attention"].w_kv.shape, mine["mlp"].w_in.shape)
    first, group, column = ranks.rank * heads, ranks.rank // copies * groups, ranks.rank * columns
    say_aligned(ranks, f"{span(first, first + heads, 'head')} of queries,",
                f"{span(group, group + groups, 'head')} of keys and values{f', on {copies} ranks' * (copies > 1)},",
                f"{span(column, column + columns, 'column')} of gate and up")


def picture(a: int, g: int, t: int) -> str:
    """Draw heads and columns as the numbers of the ranks that hold them; = is between copies."""
    def drawn(owners: Iterable[int], between: str = "") -> str:
        return between.join(colored(rank, str(rank % 10)) for rank in owners)

    def owners_of(columns: int) -> list[int]:
        return [i * t // columns for i in range(columns)]

    f, copies = 3 * a, max(t // g, 1)
    space = " " * (2 * (a // g - copies) + 1)       # below the heads of queries that share a head
    held = (range(j * copies, (j + 1) * copies) if copies > 1 else [j * t // g] for j in range(g))
    keys = space.join(drawn(owners, "=") for owners in held)
    side_by_side = owners_of(2 * f)
    return f"""
Each as the number of its rank, with = between copies:
  heads of queries          {drawn(owners_of(a), " ")}
  heads of keys and values  {keys}
  columns of gate and up    {drawn(owners_of(f))} {drawn(owners_of(f))}
  cut as [h, 2f], wrongly   {drawn(side_by_side[:f])} {drawn(side_by_side[f:])}"""


def sum_copies(ranks: Group, dw_kv, copies: int) -> None:
    """Sum the gradient [h, 2, g/t, d] over the neighbours that hold copies, in place, if there are any."""
    if copies == 1:
        return
    say(ranks, "\nBackward: a rank's part of the gradient of its keys and values; and the sum over the copies:")
    part = first_elements(dw_kv)
    neighbours = ranks.split(ranks.rank // copies, "copies")
    with ranks.ledger.phase("reduction"):
        neighbours.all_reduce(dw_kv, "gradients of copies")
    neighbours.free()
    say_each(ranks, f"{part}  ->  {first_elements(dw_kv)}")


if __name__ == "__main__":
    run(lambda: show(world()))
