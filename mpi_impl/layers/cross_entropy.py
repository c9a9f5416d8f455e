"""The loss from one rank's V/t logits, sending 3 b s elements. Its twin is reference/layers/cross_entropy.py."""
import numpy as np

from mpi_impl import kernels
from reference.layers.cross_entropy import NO_TOKEN
from reference.layers.embedding import local_ids


def cross_entropy_forward(logits, targets, group):
    """Map logits [b, s, V/t], targets [b, s] -> loss [b, s], identical on every rank. Overwrites logits.

    All is in the dtype of the logits; for float16, sums are float32 until they are rounded, in NumPy as on a GPU.
    """
    highest = group.all_reduce(logits.max(-1), "loss: maximum", op="max")
    ids, held = local_ids(targets, group.rank * logits.shape[-1], logits.shape[-1])
    picked = np.where(held, np.take_along_axis(logits, ids[..., None], -1)[..., 0] - highest, 0)
    picked = picked.astype(logits.dtype, copy=False)         # which CuPy's `where` has widened, if it is bfloat16
    total = group.all_reduce(kernels.exp_and_sum(logits, highest), "loss: sum of exp")
    picked = group.all_reduce(picked, "loss: logit of the target")
    logits /= total[..., None]
    return np.log(total) - picked, (logits, ids, held)


def cross_entropy_backward(dloss, cache):
    """Return dlogits [b, s, V/t] for dloss [b, s], in the cache's memory. Sends nothing."""
    probs, ids, held = cache
    return kernels.cross_entropy_backward(probs, dloss, ids, held)


def argmax_token(logits, group):
    """Return the token with the largest logit [b, s], identical on every rank: logits [b, s, V/t]. Sends 2 b s
    elements.

    The first token wins ties, as the largest of the negatives.
    """
    mine = logits.max(-1)
    highest = group.all_reduce(mine.copy(), "argmax token: maximum", op="max")
    token = group.rank * logits.shape[-1] + logits.argmax(-1)
    return -group.all_reduce(np.where(mine == highest, -token, NO_TOKEN), "argmax token", op="max")
