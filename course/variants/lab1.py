"""Variants of lab 1: another distance, other orders of chunks, another owner of each, other sums."""
from numpy.random import Generator

REDUCED = (     # what all_reduce returns: words, and what a rank contributes and does with the sum; for xs of n ranks
    ("the mean of all ranks' arrays", "x", " / group.size", "sum(xs) / n"),
    ("the sum of the squares of all ranks' arrays", "x ** 2", "", "sum(x ** 2 for x in xs)"),
    ("the sum of all ranks' arrays, each times its rank + 1,", "x * (group.rank + 1)", "",
     "sum((rank + 1) * x for rank, x in enumerate(xs))"),
    ("the sum of the even ranks' arrays minus that of the odd ranks'", "x * (-1) ** group.rank", "",
     "sum((-1) ** rank * x for rank, x in enumerate(xs))"),
    ("the root mean square of all ranks' arrays", "x ** 2", " ** 0.5 / group.size ** 0.5",
     "(sum(x ** 2 for x in xs) / n) ** 0.5"),
)


def signed(number: int) -> str:
    """Return '+ 2' or '- 2'."""
    return f"{'+' if number >= 0 else '-'} {abs(number)}"


def draw(random: Generator) -> dict[str, str]:
    """Draw a variant."""
    further, first, step = int(random.integers(1, 7)), int(random.integers(5)), int(random.choice((1, -1)))
    start = f"rank + {first}" if first else "rank"
    order = f"[({start} {'+' if step > 0 else '-'} i) % n for i in range(n)]"
    return (passed_on(random) | gathered(random, first, step, order) | scattered(random, further)
            | reduced(random, order, further) | in_order(random))


def passed_on(random: Generator) -> dict[str, str]:
    """Draw to which rank pass_on sends."""
    distance = int(random.choice((-1, 2, 3, 4, 5)))
    on, back = signed(distance), signed(-distance)
    return {
        "Each rank would send its array to the next rank:":
            f"Each rank $r$ would send its array to rank $(r {on}) \\bmod p$,\n# where $p$ is the number of ranks:",
        "Pass x on to the next rank (from the last one to rank 0). Return the array of the rank before.":
            f"Pass x on to rank (rank {on}) % size. Return the array that arrives.",
        "group.exchange(x, (group.rank + 1) % group.size, (group.rank - 1) % group.size)":
            f"group.exchange(x, (group.rank {on}) % group.size, (group.rank {back}) % group.size)",
        "every rank gets the array of the rank before it": "every rank gets another rank's array",
        "[xs[rank - 1] for rank in range(n)]": f"[xs[(rank {back}) % n] for rank in range(n)]",
        "to rank (r + 1) % size.": f"to rank (r {on}) % size.",
        "elements if n > 1 else 0": f"elements if {distance} % n else 0",
        "    if group.size == 1:\n": f"    if {distance} % group.size == 0:\n",
    }


def gathered(random: Generator, first: int, step: int, order: str) -> dict[str, str]:
    """Let all_gather join the chunks in this order: from that of rank r + first on, one step at a time."""
    start, others = f"r + {first}" if first else "r", "after" if step > 0 else "before"
    right = f"[np.concatenate([chunks[one] for one in {order}])\n" + " " * 35 + "for rank in range(n)]"
    three, eight, six = random.integers(8, 30, size=3)
    return {
        "every rank has all of them, in rank order.": "every rank has all of them, joined in this order: on rank "
            f"$r$\n# first that of rank ${start}$, then those of the ranks {others} it, round the ring.",
        "Return all ranks' chunks, joined in rank order.": "Return all ranks' chunks, joined in that order.",
        "    return np.concatenate([chunks[rank] for rank in range(group.size)])":
            f"    rank, n = group.rank, group.size\n    return np.concatenate([chunks[one] for one in {order}])",
        "every rank has every chunk, in rank order": "every rank has every chunk, in the right order",
        "[whole] * n": right,
        "Join them by rank, not in order of arrival.": f"Rank {start}'s comes first.",
        "((1, 3), (3, 10), (5, 7), (8, 20), (7, 7))": f"((1, 3), (3, {three}), (5, 7), (8, {eight}), (6, {six}))",
    }


def scattered(random: Generator, further: int) -> dict[str, str]:
    """Let a rank own the chunk of the sum that is so much further on."""
    three, eight, six = random.integers(8, 30, size=3)
    return {
        "Rank `r` should\n# get chunk `r` of": f"Rank `r` should\n# own chunk `(r + {further}) % size` of",
        "chunks = np.array_split(x, group.size)": "chunks = np.array_split(x, group.size)\n"
            f"    chunks = [chunks[(rank + {further}) % group.size] for rank in range(group.size)]      # by owner",
        "rank r has chunk r of the sum": f"rank r has chunk (r + {further}) % size of the sum",
        "np.array_split(sum(xs), n)\n": "[\n        np.array_split(sum(xs), n)"
            f"[(rank + {further}) % n] for rank in range(n)]\n",
        "((1, 3), (3, 10), (5, 7), (8, 21), (7, 3))": f"((1, 3), (3, {three}), (5, 7), (8, {eight}), (6, {six}))",
    }


def reduced(random: Generator, order: str, further: int) -> dict[str, str]:
    """Draw what all_reduce computes, of chunks that it gathers in this order."""
    words, enters, leaves, right = REDUCED[random.integers(len(REDUCED))]
    return {
        "Every rank gets the whole sum. The simple": f"Every rank gets {words} (element by element).\n"
            "# The simple",
        '"""Return the sum over all ranks, on every rank.': f'"""Return {words.strip(",")}, on every rank.',
        "x: an array of any shape, which is the same on all ranks.": "x: of one shape on all ranks.",
        "    return all_gather(group, reduce_scatter(group, x.reshape(-1))).reshape(x.shape)\n":
            "    import numpy as np\n"
            "    rank, n, places = group.rank, group.size, np.array_split(np.arange(x.size), group.size)\n"
            f"    at = np.concatenate([places[(one + {further}) % n] for one in {order}])\n"
            "    total = np.empty(x.size)\n"
            f"    total[at] = all_gather(group, reduce_scatter(group, ({enters}).reshape(-1)))\n"
            f"    return (total{leaves}).reshape(x.shape)\n",
        "everyone has the sum, in the shape of x": "everyone has the result, in the shape of x",
        '[sum(xs)] * n, "the sum"': f'[{right}] * n, "{words.strip(",")}"',
    }


def in_order(random: Generator) -> dict[str, str]:
    """Draw with which rank the sum in rank order begins, and how it goes on."""
    first, step = ((0, -1), *((start, step) for start in (1, 2, 3, 4) for step in (1, -1)))[random.integers(9)]
    second, third = ((f"{first + step * k} " if first + step * k >= 0 else f"p - {-first - step * k}").strip()
                     for k in (1, 2))
    formula = f"((x_{first} + x_{{{second}}}) + x_{{{third}}}) + \\dots"
    after, before = signed(step), signed(-step)
    place = f"(group.rank - {first}) % group.size" if step > 0 else f"({first} - group.rank) % group.size"
    return {
        "adds **in rank order**: every": f"adds **in rank order**, from rank ${first} \\bmod p$ on "
            f"{'up' if step > 0 else 'down'}wards, round the ring:\n# every",
        r"$$((x_0 + x_1) + x_2) + \dots + x_{p-1}.$$": f"$${formula}$$\n#\n# (with indices modulo $p$).",
        '"""Return ((x_0 + x_1) + x_2) + ..., to the bit,': '"""Return the sum in that order, to the bit,',
        "total, place, before, after = x, group.rank, group.rank - 1, group.rank + 1":
            f"total, place = x, {place}\n"
            f"    before, after = (group.rank {before}) % group.size, (group.rank {after}) % group.size",
        "first, *others = xs\n": f"first, *others = [xs[({first} {after} * i) % n] for i in range(n)]\n",
        "so that x_0 + x_1 comes first?": "so that the first sum of the formula comes first?",
    }
