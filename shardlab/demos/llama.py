"""A Llama's attention and MLP, sharded over all ranks: `mpirun -np 4 python -m shardlab.demos.llama`.

It shows which ranks hold copies of a head of keys and values, whose gradients are parts of one sum; and that gate and
up must be sharded together, or all shapes are right and the result is wrong.
"""
import numpy as np

from mpi_impl.runtime.tables import WIDTH, count
from reference.config import ModelConfig
from reference.layers.block import block_tensors
from reference.layers.gated_mlp import gated_mlp_forward, side_by_side_mlp_forward
from shardlab.demos.layer_case import LayerCase
from shardlab.demos.printing import colored, first_elements, span
from shardlab.demos.runner import Demo, Size, program, run_demo

SAMPLES, POSITIONS, HEAD_SIZE, GROUPS = 2, 4, 4, 2
NUM_HEADS = Size("--num-attention-heads", "llama", "A", least=4)

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
    demo.say_each(f"{demo.share(a, 'head')} of queries,", f"{span(group, group + groups, 'head')} of keys and "
                     f"values{f', on {copies} ranks' * (copies > 1)},", f"{demo.share(3 * a, 'column')} of gate and up")
    if 6 * a < WIDTH - 30:
        demo.say(picture(3 * a, t))

    found, expected = case.show()
    sum_copies(demo, found.grads.attention.w_kv, copies)
    demo.say_all_reduces()
    x, mlp = case.x, case.whole.mlp
    right, wrong = gated_mlp_forward(x, mlp, c)[0], side_by_side_mlp_forward(x, mlp, c, t)
    demo.say(f"Gate beside up, cut as a matrix [h, 2f] into {count(t, 'block')}: the MLP's result is off by "
             f"{np.abs(wrong - right).max() / np.abs(right).max():.0%} of its largest element.\n")
    case.compare(found, expected)


def picture(f: int, t: int) -> str:
    """Draw the columns of gate and up as the numbers of the ranks that hold them."""
    def drawn(columns: range, whole: int) -> str:
        owners = (i * t // whole for i in columns)
        return "".join(colored(rank, str(rank % 10)) for rank in owners)

    return f"""
The columns of gate and up, each as the number of its rank:
  both sharded             {drawn(range(f), f)} {drawn(range(f), f)}
  cut as [h, 2f], wrongly  {drawn(range(f), 2 * f)} {drawn(range(f, 2 * f), 2 * f)}"""


def sum_copies(demo: Demo, dw_kv, copies: int) -> None:
    """Sum the gradient [h, 2, g/t, d] over the neighbours that hold copies, in place, if there are any."""
    if copies == 1:
        return
    demo.say("\nBackward: a rank's part of the gradient of its keys and values; and the sum over the copies:")
    part = first_elements(dw_kv)
    neighbours = demo.ranks.split(demo.rank // copies, "copies")
    with demo.phase("reduction"):
        neighbours.all_reduce(dw_kv, "gradients of copies")
    neighbours.free()
    demo.say_each(f"{part}  ->  {first_elements(dw_kv)}")


if __name__ == "__main__":
    run_demo(show)
