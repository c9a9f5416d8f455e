"""A Llama's attention and MLP, sharded over all ranks: `mpirun -np 4 python -m mpi_impl.demos.llama`.

It shows which ranks hold copies of a head of keys and values, whose gradients are parts of one sum; and that gate and
up must be sharded together, or all shapes are right and the result is wrong.
"""
from collections.abc import Iterable

import numpy as np

from mpi_impl.demos.layer_case import LayerCase
from mpi_impl.demos.printing import colored, count, first_elements, span
from mpi_impl.demos.runner import Demo, Size, program, run_demo
from mpi_impl.runtime.tables import WIDTH
from reference.config import ModelConfig
from reference.layers.block import block_tensors
from reference.layers.gated_mlp import gated_mlp_forward, side_by_side_mlp_forward

SAMPLES, POSITIONS, HEAD_SIZE, GROUPS = 2, 4, 4, 2
NUM_HEADS = Size("--num-attention-heads", "llama", "A", least=4, times=1,
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


@program(NUM_HEADS.parse)
def show(demo: Demo, a: int) -> None:
    demo.introduce(INTRODUCTION)
    t = demo.n
    g = GROUPS if a % GROUPS == 0 and (GROUPS % t == 0 or t % GROUPS == 0) else 1
    c = ModelConfig(1, a * HEAD_SIZE, a, 1, POSITIONS, num_query_groups=g, swiglu=True, add_bias_linear=False,
                    normalization="RMSNorm", ffn_hidden_size=3 * a, init_method_std=0.3)
    case = LayerCase(demo, block_tensors(c), c, SAMPLES)
    copies = case.tensors.attention.w_kv.copies(t)
    demo.say(f"Who owns what: {count(a, 'head')} of queries, {count(g, 'head')} of keys and values, {3 * a} columns "
             "of gate and up")
    groups = case.mine.attention.w_kv.shape[2]
    group = demo.rank // copies * groups
    demo.say_aligned(f"{demo.share(a, 'head')} of queries,", f"{span(group, group + groups, 'head')} of keys and "
                     f"values{f', on {copies} ranks' * (copies > 1)},", f"{demo.share(3 * a, 'column')} of gate and up")
    if 6 * a < WIDTH - 30:
        demo.say(picture(a, g, t))

    found, expected = case.show()
    sum_copies(demo, found.grads.attention.w_kv, copies)
    demo.say_all_reduces()
    x, mlp = case.x, case.whole.mlp
    right, wrong = gated_mlp_forward(x, mlp, c)[0], side_by_side_mlp_forward(x, mlp, c, t)
    demo.say(f"Gate beside up, cut as a matrix [h, 2f] into {count(t, 'block')}: the MLP's result is off by "
             f"{np.abs(wrong - right).max() / np.abs(right).max():.0%} of its largest element.\n")
    case.compare(found, expected)


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


def sum_copies(demo: Demo, dw_kv, copies: int) -> None:
    """Sum the gradient [h, 2, g/t, d] over the neighbours that hold copies, in place, if there are any."""
    if copies == 1:
        return
    demo.say("\nBackward: a rank's part of the gradient of its keys and values; and the sum over the copies:")
    part = first_elements(dw_kv)
    neighbours = demo.ranks.split(demo.rank // copies, "copies")
    with demo.ledger.phase("reduction"):
        neighbours.all_reduce(dw_kv, "gradients of copies")
    neighbours.free()
    demo.say_each(f"{part}  ->  {first_elements(dw_kv)}")


if __name__ == "__main__":
    run_demo(show)
