"""The loss from one rank's V/t logits, sending 3 b s elements. Its twin is reference/layers/cross_entropy.py."""
from typing import Any, NamedTuple

import numpy as np

from mpi_impl import kernels
from mpi_impl.runtime.arrays import is_half, widened
from reference.layers.cross_entropy import NO_TOKEN
from reference.layers.embedding import local_ids


class LossCache(NamedTuple):
    """The arrays that the backward needs."""

    kept: Any         # [b, s, V/t]: exp(logits - highest), or logits of halves; the backward overwrites it
    highest: Any      # [b, s]: the largest logit of all
    total: Any        # [b, s]: the sum of exp(logits - highest) over all words
    ids: Any          # int64 [b, s]: the target's column
    held: Any         # bool [b, s]: whether it is one of this rank's

    @property
    def probabilities(self):
        """Compute the probabilities [b, s, V/t] of this rank's words."""
        exps = np.exp(widened(self.kept) - self.highest[..., None]) if is_half(self.kept) else self.kept
        return exps / self.total[..., None]


def cross_entropy_forward(logits, targets, group, widen=False):
    """Map logits [b, s, V/t], targets [b, s] -> loss [b, s], identical on every rank. May overwrite logits.

    All but the logits' gradient is in their dtype, or with `widen` in float32 if they are halves. (For those, sums are
    float32 until they are rounded, in NumPy as on a GPU.)
    """
    highest = kernels.largest(logits)
    highest = group.all_reduce(widened(highest) if widen else highest, "loss: maximum", op="max")
    ids, held = local_ids(targets, group.rank * logits.shape[-1], logits.shape[-1])
    picked = np.where(held, np.take_along_axis(logits, ids[..., None], -1)[..., 0] - highest, 0)
    picked = picked.astype(highest.dtype, copy=False)        # which CuPy's `where` has widened, if it is bfloat16
    kept, total = kernels.exp_and_sum(logits, highest)
    total = group.all_reduce(total, "loss: sum of exp")
    picked = group.all_reduce(picked, "loss: logit of the target")
    return np.log(total) - picked, LossCache(kept, highest, total, ids, held)


def cross_entropy_backward(dloss, cache):
    """Return dlogits [b, s, V/t] for dloss [b, s], in the cache's memory and the logits' dtype. Sends nothing."""
    kept, highest, total, ids, held = cache
    return kernels.cross_entropy_backward(kept, highest, total, dloss, ids, held)


def argmax_token(logits, group):
    """Return the token with the largest logit [b, s], identical on every rank: logits [b, s, V/t]. Sends 2 b s
    elements.

    The first token wins ties, as the largest of the negatives.
    """
    mine = logits.max(-1)
    highest = group.all_reduce(mine.copy(), "argmax token: maximum", op="max")
    token = group.rank * logits.shape[-1] + logits.argmax(-1)
    return -group.all_reduce(np.where(mine == highest, -token, NO_TOKEN), "argmax token", op="max")
