"""The loss from logits that are split by vocabulary: three ways, each cheaper to send or safer than the one before.

loss = log(sum over words of exp(logit)) - logit of the target, for each of b s positions. What t ranks must send:

1. gather the logits: b s V elements. Simple, and the largest message of the forward pass.
2. sum exp(logit) locally, then over ranks (b s), and let each rank add up the losses of the targets that it holds:
   t numbers. b s + t elements, but exp overflows for logits above 88 (float32), and only the losses' sum is known.
3. share the maximum, the sum of exp, and the target's logit: 3 b s elements, safe, a loss for every position
   (Shoeybi et al. 2019, section 3, with the maximum that the paper leaves out). This is what the machine does.
"""
import numpy as np

from reference import ops
from reference.comm.collectives import all_gather, all_reduce
from reference.layers.embedding import local_ids

NO_WORD = np.iinfo(np.int64).min + 1     # below every word's negative


def cross_entropy_forward(logits, targets):
    """logits [b, s, V], targets [b, s] -> loss [b, s]."""
    return ops.cross_entropy(logits, targets)


def cross_entropy_backward(dloss, cache):
    """dloss [b, s] -> dlogits [b, s, V]."""
    return ops.cross_entropy_backward(dloss, cache)


def gathered_cross_entropy(logits, targets):
    """Way 1: each rank's logits [b, s, V/t] -> loss [b, s]."""
    return ops.cross_entropy(all_gather(logits, -1)[0], targets)[0]          # b s V elements


def unsafe_cross_entropy(logits, targets):
    """Way 2: each rank's logits [b, s, V/t] -> the sum of the losses. Overflows where exp does."""
    total = all_reduce([np.exp(part).sum(-1) for part in logits])[0]     # b s elements
    losses = []
    for rank, part in enumerate(logits):
        ids, held = local_ids(targets, rank * part.shape[-1], part.shape[-1])
        picked = np.take_along_axis(part, ids[..., None], -1)[..., 0]
        losses.append(np.where(held, np.log(total) - picked, 0).sum())
    return all_reduce(losses)[0]                                         # one element from each rank


def sharded_cross_entropy_forward(logits, targets):
    """Way 3: each rank's logits [b, s, V/t] -> loss [b, s], alike on all ranks."""
    highest = all_reduce([part.max(-1) for part in logits], np.maximum)[0]        # b s elements
    sums, picked, exps, caches = [], [], [], []
    for rank, part in enumerate(logits):
        shifted = part - highest[..., None]
        ids, held = local_ids(targets, rank * part.shape[-1], part.shape[-1])
        picked.append(np.where(held, np.take_along_axis(shifted, ids[..., None], -1)[..., 0], 0))
        exps.append(np.exp(shifted))
        sums.append(exps[-1].sum(-1))
        caches.append((ids, held))
    total = all_reduce(sums)[0]                                          # b s elements
    loss = np.log(total) - all_reduce(picked)[0]                         # b s elements
    return loss, [(exp / total[..., None], *cache) for exp, cache in zip(exps, caches)]


def sharded_cross_entropy_backward(dloss, caches):
    """dloss [b, s], alike on all ranks -> each rank's dlogits [b, s, V/t]. Nothing to send: each has what it needs."""
    return [softmax_minus_target(dloss, *cache) for cache in caches]


def softmax_minus_target(dloss, probs, ids, held):
    """(probs - one at the target, where this rank holds it) x dloss."""
    dlogits = probs * dloss[..., None]
    at, dtarget = ids[..., None], (dloss * held)[..., None]
    np.put_along_axis(dlogits, at, np.take_along_axis(dlogits, at, -1) - dtarget, -1)
    return dlogits


# ---- which word the logits are for ----------------------------------------------------------------------------------


def likeliest(logits):
    """logits [b, s, V] -> the word with the largest, [b, s]: of several, which are not rare in 16 bits, the first."""
    return logits.argmax(-1)


def sharded_likeliest(logits):
    """Each rank's logits [b, s, V/t] -> the likeliest words [b, s], alike on all ranks."""
    highest = all_reduce([part.max(-1) for part in logits], np.maximum)[0]        # b s elements
    found = []
    for rank, part in enumerate(logits):
        word = rank * part.shape[-1] + part.argmax(-1)
        found.append(np.where(part.max(-1) == highest, -word, NO_WORD))  # the first word is the largest of negatives
    return -all_reduce(found, np.maximum)[0]                             # b s elements
