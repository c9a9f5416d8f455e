"""Collectives, the operations of all ranks: `mpirun -np 4 python -m shardlab.demos.collectives`.

It shows broadcast, reduce-scatter, all-gather and all-reduce of a few whole numbers, so that you can check every sum in
your head; then reduce, gather and scatter, for which one rank works alone; then the ring of sends and receives that
explains why the others cost less (Patarasuk and Yuan 2009).
"""
from functools import partial

import numpy as np

from mpi_impl.comm.group import Group
from mpi_impl.runtime.tables import count
from reference.comm import collectives as textbook
from shardlab.demos.runner import Demo, Size, program, run_demo

SHOWN = 8      # numbers of an array, and steps of a ring, that a line can hold
ELEMENTS = Size("--elements", "collectives", "N", least=4, times=1, help="of each rank's array;",
                numbers=lambda n, N: n * 8 * N)

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
(The sends are rank 0's.) There are N = {N} numbers of {itemsize} bytes, on n = {n} ranks.
In a ring a rank sends a piece, N/n numbers, in each of n - 1 steps: N (n-1)/n. An all-gather does the same, so an
all-reduce sends 2 N (n-1)/n, and never more than 2 N, on any number of ranks. (In a broadcast around the ring the last
rank has nobody to send to: this is the mean.)"""


@program(ELEMENTS.parse)
def show(demo: Demo, N: int) -> None:
    demo.introduce(INTRODUCTION)
    x = np.arange(1, N + 1) + demo.rank * (10 if N < 10 else 100)      # the leading digits show the rank
    xs = demo.ranks.allgather_objects(x)      # for the textbook, which has them in a list
    show_collectives(demo, x, xs)
    show_root(demo, x, xs)
    show_ring(demo, x, xs)
    demo.say_traffic(COSTS.format(N=N, itemsize=x.itemsize, n=demo.n))


def show_collectives(demo: Demo, x, xs) -> None:
    """Print each rank's array x [N] before and after each collective."""
    with demo.phase("collective"):
        copy = demo.ranks.broadcast(x.copy(), "rank 0's array")
        piece = demo.ranks.reduce_scatter(x, 0, "pieces of the sum")
        joined = demo.ranks.all_gather(piece, 0, "pieces of the sum")
        total = demo.ranks.all_reduce(x.copy(), "the sum")
    pieces, text = textbook.reduce_scatter(xs, 0), partial(numbers, wide=width(xs))
    mine = f"{demo.share(len(x), 'element')}: {text(piece)}"
    for name, says, before, after, found, expected in (
            ("Broadcast", "Every rank gets rank 0's array", text(x), text(copy), copy, textbook.broadcast(xs)),
            ("Reduce-scatter", "The arrays are added up, and each rank gets its piece of the sum", text(x), mine, piece,
             pieces),
            ("All-gather", "Every rank gets all pieces, joined in rank order", mine, text(joined), joined,
             textbook.all_gather(pieces, 0)),
            ("All-reduce", "Every rank gets the sum. It is the last two, one after the other", text(x), text(total),
             total, textbook.all_reduce(xs))):
        demo.say(f"{name}. {says}:")
        demo.say_aligned(before, "->", after)
        demo.say("")
        demo.equal(name.lower(), found, expected[demo.rank])


def show_root(demo: Demo, x, xs) -> None:
    """Print the results of the operations for which one rank works alone, made of sends and receives."""
    wide, first = width(xs), np.split(x, demo.n)[0]
    with demo.phase("to one rank"):
        summed = sum(sent_to_root(demo.ranks, x, "for the sum"))       # 0 where nothing arrives
        pieces = sent_to_root(demo.ranks, first, "a piece for rank 0")
        scattered = scatter_by_hand(demo.ranks, x)
    demo.say("Reduce, gather and scatter, by hand. The sum is on rank 0 only, and so are the joined first pieces of "
             "all arrays; and\nit is rank 0's array that is scattered. What the others get or give passes through "
             "rank 0:")
    reduced = joined = "nothing"
    if demo.rank == 0:
        demo.equal("reduce", summed, textbook.reduce(xs)[0])
        demo.equal("gather", np.concatenate(pieces), textbook.gather([one[:len(first)] for one in xs], 0)[0])
        reduced, joined = (numbers(one, wide, SHOWN // 2) for one in (summed, np.concatenate(pieces)))
    demo.equal("scatter", scattered, textbook.scatter(xs, 0)[demo.rank])
    demo.say_aligned(f"reduce: {reduced}", f"gather: {joined}", f"scatter: {numbers(scattered, wide, SHOWN // 2)}")


def show_ring(demo: Demo, x, xs) -> None:
    """Print the steps of the ring."""
    n, wide, few = demo.n, width(xs), max(1, 2 * SHOWN // demo.n)
    with demo.phase("by hand"):
        sent, kept = ring_reduce_scatter(demo.ranks, x)
    demo.say(f"\nThe ring, by hand: a reduce-scatter in {count(n - 1, 'step')}. In each, every rank sends a piece to "
             "the next rank, and adds its own\nto the piece that it gets. That it sends on in the next step:")
    steps = [f"{numbers(one, wide, few)}," for one in sent[:SHOWN]] + ["...,"] * (n - 1 > SHOWN)
    demo.say_aligned("sends", *(steps or ["nothing,"]), f"keeps {numbers(kept, wide, few)}")
    demo.equal("the ring", kept, textbook.reduce_scatter(xs, 0)[demo.rank])


def sent_to_root(ranks: Group, x, reason: str) -> list:
    """Return all ranks' arrays on rank 0, nothing on the others. Rank 0 receives n - 1 times as much as any."""
    if ranks.rank:
        ranks.post_send(x, 0, ranks.rank, reason).wait()
        return []
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


def width(xs: list) -> int:
    """Return how many characters the largest sum has."""
    return len(str(sum(xs).max()))


def numbers(x, wide: int, few: int = SHOWN) -> str:
    """Return the first few of an array's whole numbers as text, each `wide` characters wide."""
    return " ".join(f"{value:{wide}}" for value in x[:few]) + (" ..." if len(x) > few else "")


if __name__ == "__main__":
    run_demo(show)
