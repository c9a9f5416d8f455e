"""Collectives, the operations of all ranks: `mpirun -np 4 python -m mpi_impl.demos.collectives`.

It shows broadcast, reduce-scatter, all-gather and all-reduce of a few whole numbers, so that you can check every sum in
your head; then reduce, gather and scatter, for which one rank works alone; then the ring of sends and receives that
explains why the others cost less (Patarasuk and Yuan 2009).
"""
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpi_impl.comm.group import Group, world
from mpi_impl.demos.printing import Check, count, say, say_aligned, span, traffic_table
from mpi_impl.demos.sizes import ShardedSize
from mpi_impl.launch.entry import run
from reference.comm import collectives as textbook

SHOWN = 8      # numbers of an array, and steps of a ring, that a line can hold
ELEMENTS = ShardedSize(
    "collectives", "Show the collectives.", "elements", "N", least=4,
    help="of each rank's array, a multiple of the number of ranks (default: the first from 4 on)",
    why="Every rank gets a piece of the same size.", numbers=lambda n, N: n * 8 * N)

INTRODUCTION = """\
This program runs on {ranks}. A rank is a process with a number, from 0 on: all run the same lines, but each has
memory of its own, which no other can see. If one rank needs data of another, it must be sent.

A collective is an operation of all ranks together. Each calls it, with an array of its own, and it ends when the last
rank has joined. Megatron needs little more than four of them. "Reduce" means to add up, first elements with first
elements, second ones with second ones. "Scatter" means that each rank gets a piece, "gather" that pieces are joined,
and "all" that every rank has the result.

How would you add up? If all ranks sent their arrays to rank 0, it would have to receive n - 1 of them, and to send
n - 1 results, while the others wait. In a ring every rank works all the time, and sends to its neighbour only.
"""

COSTS = """\
What moved: collectives on each rank, sends on rank 0. Here N = {N} numbers of {itemsize} bytes, on n = {ranks}. In a
ring a rank sends a piece, N/n numbers, in each of n - 1 steps: N (n-1)/n. An all-gather does the same, so an all-reduce
sends 2 N (n-1)/n, and never more than 2 N, on any number of ranks. (In a broadcast around the ring the last rank has
nobody to send to: this is the mean.)"""


class CollectiveResults(NamedTuple):
    """The results of all operations on this rank; None where another rank has the result."""

    copy: Any           # of rank 0's array
    piece: Any          # of the sum
    joined: Any         # the pieces of all ranks
    total: Any
    at_root: Any        # the sum by sends and receives
    gathered: Any
    scattered: Any
    sent: list          # around the ring
    kept: Any


def show(ranks: Group, argv: Sequence[str] | None = None) -> None:
    N, n = ELEMENTS.parse(argv, ranks.size), ranks.size
    say(ranks, INTRODUCTION.format(ranks=count(n)))
    x = np.arange(1, N + 1) + ranks.rank * (10 if N < 10 else 100)      # the leading digits show the rank
    results = compute(ranks, x)
    say_collectives(ranks, x, results)
    say_by_hand(ranks, results)
    say(ranks, f"\n{COSTS.format(N=N, itemsize=x.itemsize, ranks=count(n))}\n{traffic_table(ranks.ledger)}\n")
    compare(ranks, x, results)


def compute(ranks: Group, x) -> CollectiveResults:
    """Apply each operation to the ranks' arrays x [N]."""
    with ranks.ledger.phase("collective"):
        copy = ranks.broadcast(x.copy(), "rank 0's array")
        piece = ranks.reduce_scatter(x, 0, "pieces of the sum")
        joined = ranks.all_gather(piece, 0, "pieces of the sum")
        total = ranks.all_reduce(x.copy(), "the sum")
    with ranks.ledger.phase("to one rank"):
        at_root = reduce_by_hand(ranks, x)
        gathered = gather_by_hand(ranks, piece)
        scattered = scatter_by_hand(ranks, x)
    with ranks.ledger.phase("by hand"):
        sent, kept = ring_reduce_scatter(ranks, x)
    return CollectiveResults(copy, piece, joined, total, at_root, gathered, scattered, sent, kept)


def say_collectives(ranks: Group, x, results: CollectiveResults) -> None:
    """Print each rank's array before and after each collective."""
    piece, wide = results.piece, width(results)
    before, of_sum = numbers(x, wide), numbers(results.total, wide)
    mine = f"{span(ranks.rank * len(piece), (ranks.rank + 1) * len(piece), 'element')}: {numbers(piece, wide)}"
    say(ranks, "Broadcast. Every rank gets rank 0's array:")
    say_aligned(ranks, before, "->", numbers(results.copy, wide))
    say(ranks, "\nReduce-scatter. The arrays are added up, and each rank gets its piece of the sum:")
    say_aligned(ranks, before, "->", mine)
    say(ranks, "\nAll-gather. Every rank gets all pieces, joined in rank order:")
    say_aligned(ranks, mine, "->", numbers(results.joined, wide))
    say(ranks, "\nAll-reduce. Every rank gets the sum. It is the last two, one after the other:")
    say_aligned(ranks, before, "->", of_sum)


def say_by_hand(ranks: Group, results: CollectiveResults) -> None:
    """Print the results of the operations made of sends and receives, and the steps of the ring."""
    n, wide = ranks.size, width(results)
    say(ranks, "\nReduce, gather and scatter, by hand. The sum is on rank 0 only, and so are the joined pieces of the "
               "sum; and it is\nrank 0's array that is scattered. What the others get or give passes through rank 0:")
    say_aligned(ranks, *(f"{what}: {'nothing' if x is None else numbers(x, wide, SHOWN // 2)}" for what, x in
                         (("reduce", results.at_root), ("gather", results.gathered), ("scatter", results.scattered))))
    say(ranks, f"\nThe ring, by hand: a reduce-scatter in {count(n - 1, 'step')}. In each, every rank sends a piece to "
               "the next rank, and adds its own\nto the piece that it gets. That it sends on in the next step:")
    few = max(1, 2 * SHOWN // n)
    steps = [f"{numbers(one, wide, few)}," for one in results.sent[:SHOWN]] + ["...,"] * (n - 1 > SHOWN)
    say_aligned(ranks, "sends", *(steps or ["nothing,"]), f"keeps {numbers(results.kept, wide, few)}")


def compare(ranks: Group, x, results: CollectiveResults) -> None:
    """Compare this rank's results with the textbook's."""
    check, xs = Check(), ranks.allgather_objects(x)
    pieces = textbook.reduce_scatter(xs, 0)
    check.equal("broadcast", results.copy, textbook.broadcast(xs)[ranks.rank])
    check.equal("reduce-scatter", results.piece, pieces[ranks.rank])
    check.equal("all-gather", results.joined, textbook.all_gather(pieces, 0)[ranks.rank])
    check.equal("all-reduce", results.total, textbook.all_reduce(xs)[ranks.rank])
    for name, found, expected in (("reduce", results.at_root, textbook.reduce(xs)[ranks.rank]),
                                  ("gather", results.gathered, textbook.gather(pieces, 0)[ranks.rank])):
        if ranks.rank == 0:
            check.equal(name, found, expected)
    check.equal("scatter", results.scattered, textbook.scatter(xs, 0)[ranks.rank])
    check.equal("the ring", results.kept, pieces[ranks.rank])
    check.conclude(ranks)


def reduce_by_hand(ranks: Group, x):
    """Return the sum of all ranks' x on rank 0, None on the others."""
    found = sent_to_root(ranks, x, "for the sum")
    return None if found is None else sum(found)


def gather_by_hand(ranks: Group, piece):
    """Return all ranks' pieces, joined, on rank 0, None on the others."""
    found = sent_to_root(ranks, piece, "a piece for rank 0")
    return None if found is None else np.concatenate(found)


def sent_to_root(ranks: Group, x, reason: str):
    """Return all ranks' arrays in a list on rank 0, None on the others. Rank 0 receives n - 1 times as much as any."""
    if ranks.rank:
        ranks.post_send(x, 0, ranks.rank, reason).wait()
        return None
    arrived = [np.empty_like(x) for _ in range(1, ranks.size)]
    for pending in [ranks.post_receive(out, i, i, reason) for i, out in enumerate(arrived, 1)]:
        pending.wait()
    return [x, *arrived]


def scatter_by_hand(ranks: Group, x):
    """Return this rank's piece [N/n] of rank 0's x [N]."""
    pieces = np.split(x.copy(), ranks.size)
    if ranks.rank:
        ranks.post_receive(pieces[0], 0, ranks.rank, "a piece of rank 0's").wait()
    else:
        for pending in [ranks.post_send(pieces[i], i, i, "a piece of rank 0's") for i in range(1, ranks.size)]:
            pending.wait()
    return pieces[0]


def ring_reduce_scatter(ranks: Group, x):
    """Return the pieces [N/n] of x [N] that this rank sends to the next one, in order, and its piece of the sum.

    Rank i's piece starts as that of rank i + 1, and goes once around the ring.
    """
    pieces, sent, n = np.split(x.copy(), ranks.size), [], ranks.size
    for step in range(n - 1):
        outgoing, incoming = (ranks.rank - step - 1) % n, (ranks.rank - step - 2) % n
        arrived = np.empty_like(pieces[incoming])
        receive = ranks.post_receive(arrived, (ranks.rank - 1) % n, step, "a piece, one step on")
        send = ranks.post_send(pieces[outgoing], (ranks.rank + 1) % n, step, "a piece, one step on")
        receive.wait()      # both are posted: if all ranks first waited for their send, nobody would receive
        send.wait()
        sent.append(pieces[outgoing])
        pieces[incoming] += arrived
    return sent, pieces[ranks.rank]


def width(results: CollectiveResults) -> int:
    """Return how many characters the largest number has."""
    return len(str(results.total.max()))


def numbers(x, wide: int, few: int = SHOWN) -> str:
    """Return the first few of an array's whole numbers as text, each `wide` characters wide."""
    return " ".join(f"{value:{wide}}" for value in x[:few]) + (" ..." if len(x) > few else "")


if __name__ == "__main__":
    run(lambda: show(world()))
