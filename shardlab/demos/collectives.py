"""Collectives, the operations of all ranks: `mpirun -np 4 python -m shardlab.demos.collectives`.

It shows broadcast, reduce-scatter, all-gather and all-reduce of a few whole numbers, so that you can check every sum in
your head; then reduce, gather and scatter, for which one rank works alone; then the ring of sends and receives that
explains why the others cost less (Patarasuk and Yuan 2009).
"""
import numpy as np

from mpi_impl.comm.group import Group
from reference.comm import collectives as textbook
from shardlab.demos.runner import Demo, Size, program, run_demo

SHOWN = 8      # numbers of an array, and steps of a ring, that a line can hold
ELEMENTS = Size("--elements", "collectives", "N", least=4, help="of each rank's array", most=1_000_000)

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
RING = """\
The ring, by hand: a reduce-scatter in n - 1 steps. In each, every rank sends a piece to the next rank, and adds its own
to the piece that it gets. That it sends on in the next step:"""


@program(ELEMENTS.parse)
def show(demo: Demo, N: int) -> None:
    demo.introduce(INTRODUCTION)
    x = np.arange(1, N + 1) + demo.rank * (10 if N < 10 else 100)      # the leading digits show the rank
    xs = demo.ranks.allgather_objects(x)      # for the textbook, which has them in a list
    firsts = [one[:N // demo.n] for one in xs]
    for name, says, given, on_ranks, *axis in (
            ("broadcast", "Every rank gets rank 0's array", xs,
             lambda ranks, x: ranks.broadcast(x, "rank 0's array")),
            ("reduce-scatter", "The arrays are added up, and each rank gets its piece of the sum", xs,
             lambda ranks, x: ranks.reduce_scatter(x, 0, "pieces of the sum"), 0),
            ("all-gather", "Every rank gets all pieces, joined in rank order", firsts,
             lambda ranks, x: ranks.all_gather(x, 0, "all pieces"), 0),
            ("all-reduce", "Every rank gets the sum. It is the last two, one after the other", xs,
             lambda ranks, x: ranks.all_reduce(x, "the sum")),
            ("reduce", "By hand: rank 0 gets the sum, and adds it up alone", xs, reduce),
            ("gather", "By hand: rank 0 gets all pieces", firsts, gather, 0),
            ("scatter", "By hand: each rank gets its piece of rank 0's array, which sends them all", xs, scatter, 0)):
        with demo.phase(name):
            found = on_ranks(demo.ranks, given[demo.rank].copy())
        demo.say(f"{name.capitalize()}. {says}:")
        demo.say_each(numbers(given[demo.rank]), f"->  {'nothing' if found is None else numbers(found)}")
        demo.say()
        if found is not None:
            demo.equal(name, found, getattr(textbook, name.replace("-", "_"))(given, *axis)[demo.rank])
    with demo.phase("ring"):
        sent, kept = ring_reduce_scatter(demo.ranks, x)
    demo.say(RING)
    few = max(1, 12 // demo.n)
    demo.say_each("sends", *(numbers(one, few) for one in sent[:SHOWN]), "... and" * (demo.n > SHOWN + 1),
                  f"keeps {demo.share(N, 'element')}: {numbers(kept, few)}")
    demo.equal("the ring", kept, textbook.reduce_scatter(xs, 0)[demo.rank])
    demo.say_traffic(COSTS.format(N=N, itemsize=x.itemsize, n=demo.n))


def numbers(x, few: int = SHOWN) -> str:
    """Return the first few of an array's whole numbers as text."""
    return " ".join(f"{value:4}" for value in x[:few]) + " ..." * (len(x) > few)


# ---- by hand --------------------------------------------------------------------------------------------------------


def reduce(ranks: Group, x):
    """Return the sum of all x on rank 0, None on the others."""
    return sum(arrays) if (arrays := sent_to_root(ranks, x, "for the sum")) else None


def gather(ranks: Group, x):
    """Return all x joined on rank 0, None on the others."""
    return np.concatenate(pieces) if (pieces := sent_to_root(ranks, x, "a piece for rank 0")) else None


def sent_to_root(ranks: Group, x, reason: str) -> list:
    """Return all ranks' arrays on rank 0, nothing on the others. Rank 0 receives n - 1 times as much as any."""
    if ranks.rank:
        ranks.post_send(x, 0, ranks.rank, reason).wait()
        return []
    arrived = [np.empty_like(x) for _ in range(1, ranks.size)]
    for pending in [ranks.post_receive(out, i, i, reason) for i, out in enumerate(arrived, 1)]:
        pending.wait()
    return [x, *arrived]


def scatter(ranks: Group, x):
    """Return this rank's piece [N/n] of rank 0's x [N]."""
    pieces, reason = np.split(x, ranks.size), "a piece of rank 0's"
    posted = ([ranks.post_receive(pieces[0], 0, ranks.rank, reason)] if ranks.rank else
              [ranks.post_send(pieces[i], i, i, reason) for i in range(1, ranks.size)])
    for pending in posted:
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


if __name__ == "__main__":
    run_demo(show)
