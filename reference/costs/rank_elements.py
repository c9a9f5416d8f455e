"""Elements of a rank's activations, in one microbatch: what its topology leaves of [b, s, h] and the like.

The tensors that have them: activation_inventory.py. Letters as in reference/config.
"""
from dataclasses import dataclass

from reference.config import ModelConfig, ParallelConfig
from reference.models.model import sequences_of
from reference.precision import Precision


@dataclass(frozen=True)
class RankElements:
    """A microbatch of b sequences of s tokens, of which one rank has its shards."""

    c: ModelConfig
    b: int
    s: int
    precision: Precision
    parallel: ParallelConfig

    @property
    def sequences(self) -> int:
        """Return b, times the number of answers to a question for a model that chooses."""
        return self.b * sequences_of(self.c)

    @property
    def own(self) -> int:
        """Return s/c, the positions of a context-parallel rank."""
        return self.s // self.parallel.context_parallel_size

    @property
    def whole(self) -> int:
        """Return the elements of [b, s, h], of s/c positions with context parallelism."""
        return self.tokens * self.c.hidden_size

    @property
    def queries(self) -> int:
        """Return the elements of [b, s, a/t, d], a rank's heads of queries: those of [b, s, h/t], by default."""
        return self.tokens * self.c.num_attention_heads * self.c.head_size // self.parallel.tensor_model_parallel_size

    @property
    def keys(self) -> int:
        """Return the elements of a rank's heads of keys: at least one head."""
        return self.tokens * max(1, self.c.groups // self.parallel.tensor_model_parallel_size) * self.c.head_size

    @property
    def columns(self) -> int:
        """Return the elements of [b, s, f/t], a rank's columns of the MLP."""
        return self.tokens * self.c.ffn_size // self.parallel.tensor_model_parallel_size

    @property
    def tokens(self) -> int:
        """Return the elements of [b, s], of s/c positions with context parallelism."""
        return self.sequences * self.own

    @property
    def outside(self) -> int:
        """Return a rank's elements outside tensor-parallel regions: all of [b, s, h], or its own positions."""
        return self.whole // self.parallel.sequence_shards

    @property
    def logits(self) -> int:
        """Return the elements of [b, s, V/t]."""
        t = self.parallel.tensor_model_parallel_size
        return self.b * self.own * self.c.padded_vocab_size(t) // t
