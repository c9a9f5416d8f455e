"""Attention in a ring, each rank with its own positions: `mpirun -np 4 python -m mpi_impl.demos.ring_attention`.

It shows how the positions of a text are dealt out so that all ranks have the same work, how keys and values travel
around the ring while each rank attends to those that it has, and that nothing is lost on the way (Liu et al. 2023).
"""
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpi_impl.comm.group import Group, world
from mpi_impl.demos.printing import Check, count, first_elements, say, say_aligned, shape, span, traffic_table
from mpi_impl.demos.sizes import check_size
from mpi_impl.launch.entry import ArgumentParser, run
from mpi_impl.layers.context_attention import arrived, attend, pass_on, ring_attention_backward, ring_attention_forward
from reference.ops import CoreInputs, attention_core, attention_core_backward
from reference.positions import deal, in_order, visible_blocks, work_of_ranks, zigzag

SAMPLES, HEADS, HEAD_SIZE, CHUNK = 1, 2, 4, 2

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


def show(ranks: Group, argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="mpi_impl.demos.ring_attention", description="Show attention in a ring of ranks.")
    parser.add_argument("--chunk-length", type=int, metavar="N", default=CHUNK,
                        help=f"positions in a chunk, of which a rank has two (default: {CHUNK})")
    n, c = parser.parse_args(argv).chunk_length, ranks.size
    check_size("chunk_length", n, 4 * HEADS * (2 * c * n)**2)
    s = 2 * c * n
    chunks, rng = zigzag(c, s), np.random.default_rng(1)
    say(ranks, INTRODUCTION.format(ranks=count(c)))
    show_work(ranks, s)

    q, k, v, dy = rng.normal(size=(4, SAMPLES, s, HEADS, HEAD_SIZE))      # identical on every rank, which takes its own
    own_q, own_k, own_v = (deal(x, chunks)[ranks.rank] for x in (q, k, v))
    mine = CoreInputs(own_q, own_k, own_v, causal=True, site=None)
    show_steps(ranks, mine, chunks)
    with ranks.ledger.phase("forward"):
        y, cache = ring_attention_forward(mine, chunks, ranks)
    with ranks.ledger.phase("backward"):
        gradients = ring_attention_backward(deal(dy, chunks)[ranks.rank], cache, chunks, ranks)
    say(ranks, "\nForward, and backward from a random dY: keys and values go around once more, and the gradients dK "
               "and dV\nfollow them, gathering each rank's part, until they are home. The first elements of each rank:")
    say_aligned(ranks, f"Y {shape(y)}: {first_elements(y)}", f"dK: {first_elements(gradients[1])}")
    say(ranks, f"\nWhat moved, on each rank: 2 b s/c a d = {2 * mine.k.size} elements of keys and values, c - 1 times\n"
               f"{traffic_table(ranks.ledger)}\n")

    check = Check()
    whole_y, core = attention_core(q, k, v, True)
    check.equal("Y", y, deal(whole_y, chunks)[ranks.rank])
    for name, found, whole in zip(("dQ", "dK", "dV"), gradients, attention_core_backward(dy, core)):
        check.equal(name, found, deal(whole, chunks)[ranks.rank])
    check.conclude(ranks)


def show_work(ranks: Group, s: int) -> None:
    """Print which positions each rank has, and its work, if they are dealt out in order and zigzag."""
    c = ranks.size
    say(ranks, f"Who has which of s = {s} positions, and how many pairs of a query and a key before it, or itself. In "
               "order the last\nrank has nearly twice the mean, and all wait for it. So a rank gets a chunk from the "
               "front, and one from the back:")
    found = [(deal_[ranks.rank], work_of_ranks(deal_)[ranks.rank]) for deal_ in (in_order(c, s), zigzag(c, s))]
    (naive, naive_work), (own, work) = found
    say_aligned(ranks, f"in order {positions(naive)}: {naive_work} pairs;", f"zigzag {positions(own)}: {work} pairs")


def positions(chunks: list[slice]) -> str:
    """Return 'positions 0 to 1 and 14 to 15'."""
    return " and ".join(span(chunk.start, chunk.stop, "position") for chunk in chunks).replace("and positions", "and")


def show_steps(ranks: Group, mine: CoreInputs, chunks: list[list[slice]]) -> None:
    """Go around the ring once, step by step, and print what each rank does and knows after each step."""
    c, own, found = ranks.size, chunks[ranks.rank], [None] * len(chunks[ranks.rank])
    travelling, cells = np.stack([mine.k, mine.v]), []
    with ranks.ledger.phase("step by step"):
        for step in range(c):
            following = pass_on(travelling, ranks, "keys and values") if step < c - 1 else None
            source = (ranks.rank - step) % c
            attend(mine, travelling, own, chunks[source], found, ranks)
            work = sum(block.work for block in visible_blocks(own, chunks[source], causal=True))
            cells.append(f"{source}'s {work};" if step else f"own {work};")
            travelling = arrived(following)
    say(ranks, "\nThe ring, step by step: how many pairs each rank computes with its own keys, with those of the rank "
               "before it, ...\nAnd what it knows at the end of its last query, for the first head: m and l.")
    last: Any = found[-1]
    say_aligned(ranks, *cells, f"m {last.highest[0, 0, -1, 0]:+.3f}, l {last.total[0, 0, -1, 0]:.3f}")


if __name__ == "__main__":
    run(lambda: show(world()))
