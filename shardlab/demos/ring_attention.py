"""Attention in a ring, each rank with its own positions: `mpirun -np 4 python -m shardlab.demos.ring_attention`.

It shows how the positions of a text are dealt out so that all ranks have the same work, how keys and values travel
around the ring while each rank attends to those that it has, and that nothing is lost on the way (Liu et al. 2023).
"""
from typing import Any

import numpy as np

from mpi_impl.layers.context_attention import arrived, attend, pass_on, ring_attention_backward, ring_attention_forward
from reference.ops import CoreInputs, attention_core, attention_core_backward
from reference.positions import deal, in_order, visible_blocks, work_of_ranks, zigzag
from shardlab.demos.printing import first_elements, preview, span
from shardlab.demos.runner import Demo, Size, program, run_demo

SAMPLES, HEADS, HEAD_SIZE = 1, 2, 4
CHUNK = Size("--chunk-length", "ring_attention", "N", least=2, help="positions in a chunk, of which a rank has two",
             numbers=lambda c, n: 4 * HEADS * (2 * c * n)**2)

INTRODUCTION = """\
A text may be so long that the activations of all its positions do not fit on one rank, however layers are sharded.
Context parallelism shards the positions themselves: each of {ranks} (processes, each with memory of its own) has
s/c of them, through the whole model. Norms, MLPs and the loss treat every position by itself, so they need no other
rank. Only attention does: a query needs the keys and values of all positions before it.

So keys and values travel. The ranks form a ring. Each attends to its own keys, while it sends them to the next rank and
receives those of the rank before; then to these, while it passes them on. After c - 1 steps it has seen all, and never
had more than its own and those that were arriving. But softmax needs a sum over all keys. Online softmax keeps three
things for each query: the largest score m so far, the sum l of exp(score - m), and the sum o of exp(score - m) v.
When a later block has a larger m, l and o are scaled down. At the end o / l is attention's result.
"""


@program(CHUNK.parse)
def show(demo: Demo, n: int) -> None:
    demo.introduce(INTRODUCTION)
    s = 2 * demo.n * n
    chunks = zigzag(demo.n, s)
    show_work(demo, s)
    q, k, v, dy = np.random.default_rng(1).normal(size=(4, SAMPLES, s, HEADS, HEAD_SIZE))   # identical on every rank,
    own_q, own_k, own_v, own_dy = (deal(x, chunks)[demo.rank] for x in (q, k, v, dy))      # which takes its own
    mine = CoreInputs(own_q, own_k, own_v, causal=True, site=None)
    show_steps(demo, mine, chunks)
    with demo.phase("forward"):
        y, cache = ring_attention_forward(mine, chunks, demo.ranks)
    with demo.phase("backward"):
        gradients = ring_attention_backward(own_dy, cache, chunks, demo.ranks)
    demo.say("\nForward, and backward from a random dY: keys and values go around once more, and the gradients dK "
             "and dV\nfollow them, gathering each rank's part, until they are home. The first elements of each rank:")
    demo.say_aligned(f"Y {preview(y)}", f"dK: {first_elements(gradients[1])}")
    demo.say_traffic(f"2 b s/c a d = {2 * mine.k.size} elements of keys and values, c - 1 times:")
    whole_y, core = attention_core(q, k, v, True)
    for name, found, whole in zip(("Y", "dQ", "dK", "dV"), (y, *gradients),
                                  (whole_y, *attention_core_backward(dy, core))):
        demo.equal(name, found, deal(whole, chunks)[demo.rank])


def show_work(demo: Demo, s: int) -> None:
    """Print which positions each rank has, and its work, if they are dealt out in order and zigzag."""
    c = demo.n
    demo.say(f"Who has which of s = {s} positions, and how many pairs of a query and a key before it, or itself. In "
             "order the last\nrank has nearly twice the mean, and all wait for it. So a rank gets a chunk from the "
             "front, and one from the back:")
    found = [(deal_[demo.rank], work_of_ranks(deal_)[demo.rank]) for deal_ in (in_order(c, s), zigzag(c, s))]
    (naive, naive_work), (own, work) = found
    demo.say_aligned(f"in order {positions(naive)}: {naive_work} pairs;", f"zigzag {positions(own)}: {work} pairs")


def positions(chunks: list[slice]) -> str:
    """Return 'positions 0 to 1 and 14 to 15'."""
    return " and ".join(span(chunk.start, chunk.stop, "position") for chunk in chunks).replace("and positions", "and")


def show_steps(demo: Demo, mine: CoreInputs, chunks: list[list[slice]]) -> None:
    """Go around the ring once, step by step, and print what each rank does and knows after each step."""
    c, own, found = demo.n, chunks[demo.rank], [None] * len(chunks[demo.rank])
    travelling, cells = np.stack([mine.k, mine.v]), []
    with demo.phase("step by step"):
        for step in range(c):
            following = pass_on(travelling, demo.ranks, "keys and values") if step < c - 1 else None
            source = (demo.rank - step) % c
            attend(mine, travelling, own, chunks[source], found, demo.ranks)
            work = sum(block.work for block in visible_blocks(own, chunks[source], causal=True))
            cells.append(f"{source}'s {work};" if step else f"own {work};")
            travelling = arrived(following)
    demo.say("\nThe ring, step by step: how many pairs each rank computes with its own keys, with those of the rank "
             "before it, ...\nAnd what it knows at the end of its last query, for the first head: m and l.")
    last: Any = found[-1]
    demo.say_aligned(*cells, f"m {last.highest[0, 0, -1, 0]:+.3f}, l {last.total[0, 0, -1, 0]:.3f}")


if __name__ == "__main__":
    run_demo(show)
