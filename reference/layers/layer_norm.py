"""Layer normalisation. Its tensors are replicated; each rank normalises its own array outside the regions."""
from dataclasses import dataclass
from typing import Any

from reference import ops
from reference.layers.layer import Layer
from reference.params import bias, gain


@dataclass(frozen=True)
class LayerNorm:
    """Tensors of a layer norm, or their gradients: replicated."""

    weight: Any   # [h]
    bias: Any     # [h]


def layer_norm_tensors(c):
    """Declare the tensors for a ModelConfig."""
    return LayerNorm(gain((c.hidden_size,)), bias((c.hidden_size,)))


def layer_norm_forward(x, p, epsilon):
    """Map x [b, s, h] -> [b, s, h]."""
    return ops.layer_norm(x, p.weight, p.bias, epsilon)


def layer_norm_backward(dy, p, cache):
    """Return dx [b, s, h] and the gradients, as a LayerNorm, for dy [b, s, h]."""
    dx, dweight, dbias = ops.layer_norm_backward(dy, p.weight, cache)
    return dx, LayerNorm(dweight, dbias)


LAYER = Layer("norm", LayerNorm, layer_norm_tensors, layer_norm_forward, layer_norm_backward,
              order="weight bias normed inverse_std output")
