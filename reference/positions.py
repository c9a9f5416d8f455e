"""The positions of every sequence that each of c context-parallel ranks holds, and the work that causal attention gives
to each.

Position i attends to i + 1 positions, so a later part of a sequence is more work. Dealt out in order (the naive way),
the last rank has (2c - 1)/c times the mean work, nearly twice, and all others wait for it. So the sequence is divided
into 2c chunks, and rank i gets the i-th from the front and the i-th from the back: little work and much. It is the same
sum for every rank.

    c = 4      chunk   0 1 2 3 4 5 6 7
    in order   rank    0 0 1 1 2 2 3 3
    zigzag     rank    0 1 2 3 3 2 1 0
"""
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


def zigzag(c: int, s: int) -> list[list[slice]]:
    """Return the chunks of each of c ranks, as slices of a sequence of s positions, which 2c divides."""
    if c == 1:
        return [[slice(0, s)]]
    assert s % (2 * c) == 0, f"{s} positions cannot be divided into {2 * c} chunks of one size"
    n = s // (2 * c)
    return [[slice(i * n, i * n + n), slice(s - i * n - n, s - i * n)] for i in range(c)]


def in_order(c: int, s: int) -> list[list[slice]]:
    """Return the same for ranks that take s/c positions each, one rank after the other: the naive way."""
    return [[slice(i * s // c, (i + 1) * s // c)] for i in range(c)]


@dataclass(frozen=True)
class SequencePart:
    """The part of every sequence that one of c ranks holds: its chunks, one after the other in its arrays."""

    rank: int
    chunks_of_ranks: list[list[slice]]

    @property
    def chunks(self) -> list[slice]:
        return self.chunks_of_ranks[self.rank]

    @property
    def has_first_position(self) -> bool:
        return self.chunks[0].start == 0

    def runs(self, held: slice) -> list[slice]:
        """Return where the rank's own positions `held` are in the whole sequence: in one slice, or two of one length.

        (`held` is everything, or what sequence parallelism leaves of it: t shards of equal size, of which only the
        middle one, for an odd t, has the end of one chunk and the beginning of the next.)
        """
        found, first = [], 0
        for chunk in self.chunks:
            start, stop = max(held.start - first, 0), min(held.stop - first, chunk.stop - chunk.start)
            if start < stop:
                found.append(slice(chunk.start + start, chunk.start + stop))
            first += chunk.stop - chunk.start
        return found


# ---- arrays ---------------------------------------------------------------------------------------------------------


def deal(x, chunks_of_ranks, axis=1):
    """Return each rank's positions of x, along this axis."""
    return [take(x, chunks, axis) for chunks in chunks_of_ranks]


def take(x, chunks, axis=1):
    """Return x at these chunks of positions, one after the other."""
    return np.concatenate([x[(slice(None),) * axis + (chunk,)] for chunk in chunks], axis)


def collect(xs, chunks_of_ranks, axis=1):
    """Return the whole sequence from each rank's positions: the inverse of `deal`."""
    placed = [(chunk.start, part) for x, chunks in zip(xs, chunks_of_ranks)
              for chunk, part in zip(chunks, np.split(x, len(chunks), axis))]
    return np.concatenate([part for _, part in sorted(placed, key=lambda pair: pair[0])], axis)


# ---- some positions of each sample -----------------------------------------------------------------------------------


class SomePositions(NamedTuple):
    """n of the s positions of each of b samples."""

    index: Any     # int64 [b, n]: the numbers of the positions, counted through all samples
    real: Any      # bool [b, n]: False for one that only fills the array
    s: int

    @classmethod
    def with_weight(cls, weights, most):
        """Choose every position that has a weight [b, s], of which a sample may have `most`, and behind them others, so
        that there are `most` of each sample: the size of arrays does not depend on the data then.
        """
        b, s = weights.shape
        if isinstance(weights, np.ndarray):     # nobody waits for a GPU to check this
            assert (weights != 0).sum(1).max() <= most, f"more than {most} positions of a sample have a weight"
        first = np.argsort(weights == 0, axis=1, kind="stable")[:, :most]
        index = first + s * np.arange(b, like=weights)[:, None]
        return cls(index, weights.reshape(-1)[index] != 0, s)

    def gather(self, x):
        """Return x [b, s, ...] at these positions, [b, n, ...]."""
        return x.reshape(-1, *x.shape[2:])[self.index]

    def scatter(self, x):
        """Return x [b, n, ...] at its positions in [b, s, ...], and 0 elsewhere: the adjoint of `gather`."""
        found = np.zeros_like(x, order="C", shape=(len(x) * self.s, *x.shape[2:]))
        found[self.index] = x
        return found.reshape(len(x), self.s, *x.shape[2:])

    def scatter_losses(self, losses):
        """Return losses [b, n] at their positions in [b, s], and 0 elsewhere."""
        return self.scatter(losses * self.real)

    def gather_losses(self, dlosses):
        """Return the losses' gradients [b, n] for [b, s]: the adjoint of `scatter_losses`."""
        return self.gather(dlosses) * self.real


# ---- blocks of attention's scores -----------------------------------------------------------------------------------


class ScoreBlock(NamedTuple):
    """A chunk of queries and a chunk of keys of which at least one is seen."""

    chunk: int             # the number of the queries' chunk on its rank
    queries: slice         # in the array of a rank's queries
    keys: slice            # in the array of keys
    first_query: int       # in the whole sequence
    first_key: int
    diagonal: bool         # whether these are the same positions, and a query sees only those before and itself

    @property
    def work(self) -> int:
        """Return the number of pairs of a query and a key that it sees."""
        n, m = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        return n * (n + 1) // 2 if self.diagonal else n * m


def visible_blocks(queries: list[slice], keys: list[slice], causal: bool) -> Iterator[ScoreBlock]:
    """Yield the blocks of queries at some chunks of positions with keys at others. All chunks have one size."""
    n = queries[0].stop - queries[0].start
    for i, query in enumerate(queries):
        for j, key in enumerate(keys):
            if not causal or key.start <= query.start:
                yield ScoreBlock(i, slice(i * n, i * n + n), slice(j * n, j * n + n), query.start, key.start,
                                 causal and key.start == query.start)


def work_of_ranks(chunks_of_ranks: list[list[slice]], causal: bool = True) -> list[int]:
    """Return the number of pairs of a query and a key that attention computes on each rank, for one head."""
    keys = [chunk for chunks in chunks_of_ranks for chunk in chunks]
    return [sum(block.work for block in visible_blocks(queries, keys, causal)) for queries in chunks_of_ranks]
