"""The loss from one rank's V/t logits, sending 3 b s elements. Its twin is reference/layers/cross_entropy.py."""
import numpy as np

from reference.layers.cross_entropy import softmax_minus_target
from reference.layers.embedding import local_ids


def cross_entropy_forward(logits, targets, group):
    """logits [b, s, V/t], targets [b, s] -> loss [b, s], alike on all ranks. Overwrites logits.

    All in the dtype of the logits; of float16, sums are float32 until they are rounded, in NumPy as on a GPU.
    """
    highest = group.all_reduce(logits.max(-1), "loss: maximum", op="max")
    logits -= highest[..., None]
    ids, held = local_ids(targets, group.rank * logits.shape[-1], logits.shape[-1])
    picked = np.where(held, np.take_along_axis(logits, ids[..., None], -1)[..., 0], 0)
    exp = np.exp(logits, out=logits)
    total = group.all_reduce(exp.sum(-1), "loss: sum of exp")
    picked = group.all_reduce(picked, "loss: logit of the target")
    exp /= total[..., None]
    return np.log(total) - picked, (exp, ids, held)


def cross_entropy_backward(dloss, cache):
    """dloss [b, s] -> dlogits [b, s, V/t]. Nothing to send: every rank has what it needs."""
    return softmax_minus_target(dloss, *cache)
