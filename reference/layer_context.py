"""The arguments that all layers of one forward pass share, besides their input and their parameters."""
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reference.config import Recompute
from reference.kv_cache import any_layer


@dataclass
class AuxiliaryLosses:
    """The losses of the routers of one microbatch (layers/router.py), as a part of the means over the global batch.

    Each layer's forward notes its own in `found`.
    """

    sequences: int           # in the global batch
    tokens: int              # in the global batch, without padding
    scale: float = 1.0       # of their gradients: the loss scale of mixed precision
    found: dict[int | None, Any] = field(default_factory=dict)     # by layer: the two losses, [2]

    @property
    def total(self):
        """Return the sum over the layers of each loss, [2], or 0 if there is none."""
        return sum(self.found.values())


class LayerContext(NamedTuple):
    """One microbatch's context. The caller of a model chooses the first five fields; the model adds the others."""

    dropout: Any = None                   # a Dropout, or None where nothing is dropped
    recompute: Recompute = Recompute()    # which activations are not kept for the backward
    training: bool = True                 # False: no backward follows, so nothing is kept for one
    auxiliary: AuxiliaryLosses | None = None   # of experts, in training; None: no such losses
    kv_cache: Any = None                  # in generation: a KVCache for each layer, by its number
    part: Any = None                      # with context parallelism: the SequencePart of this rank
    rotary: Any = None                    # rope's cos and sin of the positions; None where positions are learned
    lengths: Any = None                   # [b]: the samples' lengths, with padding after them; None without padding
    layer: int | None = None              # the number of the layer, within one

    def at(self, layer):
        """Return the context of one layer: its own dropout and its own KVCache."""
        return self._replace(dropout=self.dropout and self.dropout.at(layer), layer=layer,
                             kv_cache=self.kv_cache and self.kv_cache[layer])

    def note_losses(self, parts) -> None:
        """Note the sum of these RouterLosses as those of the layer. A forward that is computed again finds the same."""
        if self.auxiliary:
            self.auxiliary.found[self.layer] = sum(part.values for part in parts)

    def groups(self, layers):
        """Return a stage's layers in groups, each with a bool: whether only the group's input is kept."""
        return self.recompute.groups(layers) if self.training else [(list(layers), True)]

    def runs(self, held):
        """Return where this rank's positions `held`, a slice, are in the whole sequence: one slice or more."""
        if self.part is not None:
            return self.part.runs(held)
        return [held] if self.kv_cache is None else any_layer(self.kv_cache).runs(held)

    def last(self, x):
        """Return each text's last new position, in generation: x [b, n, h] -> [texts, 1, h]."""
        return any_layer(self.kv_cache).last(x)


TRAINING = LayerContext()      # without dropout; everything is kept
EVALUATION = LayerContext(training=False)
