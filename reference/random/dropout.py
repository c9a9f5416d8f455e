"""Dropout with masks that are the same on one rank and on a thousand.

Whether an element is kept depends on (seed, step, layer, site, sample, head, position) alone. Imagine for each site, in
each layer and step, one mask over the whole global batch, all heads, and all positions up to the longest sequence. No
rank holds it. As with initial weights, a rank draws just the slice for its own shard of the array: its samples, its
heads, or with sequence parallelism its positions. So a run with dropout is the same run under every parallel topology,
and recomputation draws the same masks again without storing them. (A trainer makes a Dropout for each microbatch, in
its `contexts`; layers ask it for their sites.)

Megatron draws in order instead, and so has two generator states. One is identical on all tensor-parallel ranks: it
drops outside the regions, where every rank holds the same activations. The other, whose seed contains the rank, drops
inside the regions (and with sequence parallelism outside too), where every rank holds another shard. The mask of an
element then depends on the rank that draws it and on everything drawn before: another t or p is another run, recompute
must restore the states, and a checkpoint must hold them. And when the two states are mixed up, nothing reports an
error. With the rank's own state outside, activations that should be identical drift apart, and g adds up partial
results of different inputs. With the common state inside, the first heads of all ranks share one mask, the second heads
another: draws that should be independent are the same t times over.
"""
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from reference.config import ModelConfig
from reference.positions import SequencePart
from reference.random import counter_rng

FROM_THE_FIRST = slice(0, None)


class Site(NamedTuple):
    """A place where dropout draws for one array of a microbatch, which is a slice of a whole array that no rank has."""

    key: tuple[int, int]     # stands for seed, step, layer and name
    rate: float              # the share that is dropped
    whole: tuple[int, ...]   # shape of the whole array; the global batch may be of any size, so whole[0] is 0
    first: tuple[Any, ...]   # coordinates, in the whole, of the array's first element; of two chunks: both positions

    @property
    def threshold(self) -> int:
        """Return the number that an element's 32 random bits must reach for the element to be kept."""
        return int(self.rate * 2**32)

    @property
    def scale(self) -> float:
        """Return the factor for the elements that are kept."""
        return 1 / (1 - self.rate)

    def moved(self, *steps: int) -> "Site":
        """Return the Site of the part of this array that begins at these indices, 0 along the axes after them."""
        return self._replace(first=tuple(map(sum, zip_longest(self.first, steps, fillvalue=0))))


@dataclass(frozen=True)
class Dropout:
    """The Sites of one microbatch of a training step. Evaluation has none."""

    c: ModelConfig
    seed: int
    step: int
    sample: int = 0            # index, in the global batch, of the microbatch's first sample
    layer: int | None = None   # index in the whole model; None: outside the layers
    part: SequencePart | None = None     # with context parallelism, the positions of the rank that draws

    def at(self, layer: int) -> "Dropout":
        """Return the Dropout of one layer."""
        return replace(self, layer=layer)

    def hidden(self, name: str, positions: slice = FROM_THE_FIRST) -> Site | None:
        """Return the Site of an array [b, s, h] of these positions; None if nothing is dropped.

        The whole array has the longest sequence that the model takes, so a mask does not depend on the batch's length.
        With context parallelism the positions are those that the rank has, and may be two runs of the whole sequence.
        """
        whole = (0, self.c.max_position_embeddings, self.c.hidden_size)
        starts = tuple(run.start for run in self.part.runs(positions)) if self.part else (positions.start,)
        first = starts[0] if len(starts) == 1 else starts
        return self.site(name, self.c.hidden_dropout, whole, (self.sample, first, 0))

    def attention(self, first_head: int = 0) -> Site | None:
        """Return the Site of probabilities [b, a, s, s] that begin at this head; None if nothing is dropped."""
        n = self.c.max_position_embeddings
        return self.site("probs", self.c.attention_dropout, (0, self.c.num_attention_heads, n, n),
                         (self.sample, first_head, 0, 0))

    def site(self, name, rate, whole, first) -> Site | None:
        """Return the Site of this name in this layer and step."""
        if rate == 0:
            return None
        return Site(counter_rng.key(self.seed, "dropout", self.step, self.layer, name), rate, whole, first)
