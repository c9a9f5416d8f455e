"""Dropout whose masks are alike on one rank and on a thousand: a function of what is dropped, not of who drops it.

Whether an element is kept depends on (seed, step, layer, site, sample, head, position) alone. Imagine for each site, in
each layer and step, one mask over the whole global batch, all heads, and all positions up to the longest sequence. No
rank holds it. As with initial weights, a rank draws just the slice that belongs to its part of the array, whichever
part that is: its samples, its heads, or with sequence parallelism its positions. So a run with dropout is the same run
under every parallel topology, and what is recomputed finds the masks of the first time without having kept them.

Megatron draws in order instead, and so has two generator states. One is alike on all tensor-parallel ranks: it drops
outside the regions, where every rank holds the same activations. The other, whose seed has the rank's number in it,
drops inside (and with sequence parallelism outside too), where every rank holds another part. What an element gets
then depends on who draws it and on all that was drawn before: another t or p is another run, recompute must put the
states back, and a checkpoint must hold them. And where the two are mixed up, nothing reports an error. With the rank's
own state outside, activations that should be alike drift apart, and g adds up partial results of different inputs.
With the common state inside, the first heads of all ranks have one mask, the second heads another: draws that should be
independent are the same t times over.
"""
from dataclasses import dataclass, replace
from typing import NamedTuple

from reference import counter_rng
from reference.config import ModelConfig


class Site(NamedTuple):
    """Where dropout draws for one array of a microbatch, which is a part of a whole one that no rank has."""

    key: tuple[int, int]     # stands for seed, step, layer and name
    rate: float              # the share that is dropped
    whole: tuple[int, ...]   # shape of the whole array; the global batch may be of any size, so whole[0] is 0
    first: tuple[int, ...]   # coordinates, in the whole, of the array's first element

    @property
    def threshold(self) -> int:
        """An element is kept if its 32 random bits are at least this number."""
        return int(self.rate * 2**32)

    @property
    def scale(self) -> float:
        """What is kept is multiplied by this."""
        return 1 / (1 - self.rate)


@dataclass(frozen=True)
class Dropout:
    """Gives the Sites of one microbatch of a training step. In evaluation there is none."""

    c: ModelConfig
    seed: int
    step: int
    sample: int = 0            # index, in the global batch, of the microbatch's first sample
    layer: int | None = None   # index in the whole model; None: outside the layers

    def at(self, layer: int) -> "Dropout":
        """The same for a layer."""
        return replace(self, layer=layer)

    def hidden(self, name: str, first_position: int = 0) -> Site | None:
        """For an array [b, s, h] that begins at this position; None if there is nothing to drop.

        The whole has the longest sequence that the model takes, so a mask does not depend on the batch's length.
        """
        whole = (0, self.c.max_position_embeddings, self.c.hidden_size)
        return self.site(name, self.c.hidden_dropout, whole, (self.sample, first_position, 0))

    def attention(self, first_head: int = 0) -> Site | None:
        """For probabilities [b, a, s, s] that begin at this head; None if there is nothing to drop."""
        n = self.c.max_position_embeddings
        return self.site("probs", self.c.attention_dropout, (0, self.c.num_attention_heads, n, n),
                         (self.sample, first_head, 0, 0))

    def site(self, name, rate, whole, first) -> Site | None:
        """The Site of this name in this layer and step."""
        if rate == 0:
            return None
        return Site(counter_rng.key(self.seed, "dropout", self.step, self.layer, name), rate, whole, first)
