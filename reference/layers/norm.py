"""The norm that a model chooses, `normalization`: a layer norm, or an RMS norm. The tensors' type tells them apart."""
from reference.layers.layer_norm import layer_norm_backward, layer_norm_forward, layer_norm_tensors
from reference.layers.rms_norm import RMSNorm, rms_norm_backward, rms_norm_forward, rms_norm_tensors


def norm_tensors(c):
    """Declare the tensors for a ModelConfig."""
    return rms_norm_tensors(c) if c.normalization == "RMSNorm" else layer_norm_tensors(c)


def norm_forward(x, p, epsilon):
    """Map x [b, s, h] -> [b, s, h]."""
    return (rms_norm_forward if isinstance(p, RMSNorm) else layer_norm_forward)(x, p, epsilon)


def norm_backward(dy, p, cache):
    """Return dx [b, s, h] and the gradients, of the type of p, for dy [b, s, h]."""
    return (rms_norm_backward if isinstance(p, RMSNorm) else layer_norm_backward)(dy, p, cache)
