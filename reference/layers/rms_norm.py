"""RMS norm: layer norm without the mean and the bias (Zhang and Sennrich 2019). Its gain is replicated."""
from dataclasses import dataclass
from typing import Any

from reference import ops
from reference.layers.layer import Layer
from reference.params import gain


@dataclass(frozen=True)
class RMSNorm:
    """The tensor of an RMS norm, or its gradient: replicated."""

    weight: Any   # [h]


def rms_norm_tensors(c):
    """Declare the tensor for a ModelConfig."""
    return RMSNorm(gain((c.hidden_size,)))


def rms_norm_forward(x, p, epsilon):
    """Map x [b, s, h] -> [b, s, h]."""
    return ops.rms_norm(x, p.weight, epsilon)


def rms_norm_backward(dy, p, cache):
    """Return dx [b, s, h] and the gradient, as an RMSNorm, for dy [b, s, h]."""
    dx, dweight = ops.rms_norm_backward(dy, p.weight, cache)
    return dx, RMSNorm(dweight)


LAYER = Layer("norm", RMSNorm, rms_norm_tensors, rms_norm_forward, rms_norm_backward,
              chosen=lambda c: c.normalization == "RMSNorm", order="weight normed inverse_std output")
