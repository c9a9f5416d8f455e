"""The loss from logits that are sharded by vocabulary: three ways, each cheaper to send or safer than the one before.

loss = log(sum over tokens of exp(logit)) - logit of the target, for each of b s positions. The t ranks must send:

1. The gathered logits, b s V elements. Simple, and the largest message forward. (Megatron's parallel_output=False.)
2. The sums of exp(logit), each rank's over its own shard (b s), and each rank's sum of the losses of the targets that
   it holds: b s + t elements. But exp overflows for logits above 88 (float32), and only the losses' sum is known.
3. The maximum, the sum of exp, and the target's logit: 3 b s elements, safe, a loss for every position
   (Shoeybi et al. 2019, section 3, with the maximum that the paper leaves out). The machine does this.
"""
import numpy as np

from reference import ops
from reference.comm.collectives import all_gather, all_reduce
from reference.layers.embedding import local_ids

NO_TOKEN = np.iinfo(np.int64).min + 1     # below every token's negative


def cross_entropy_forward(logits, targets):
    """Map logits [b, s, V], targets [b, s] -> loss [b, s]."""
    return ops.cross_entropy(logits, targets)


def cross_entropy_backward(dloss, cache):
    """Return dlogits [b, s, V] for dloss [b, s]."""
    return ops.cross_entropy_backward(dloss, cache)


def gathered_cross_entropy(logits, targets):
    """Map each rank's logits [b, s, V/t] -> loss [b, s], the first way."""
    return ops.cross_entropy(all_gather(logits, -1)[0], targets)[0]          # b s V elements


def unsafe_cross_entropy(logits, targets):
    """Map each rank's logits [b, s, V/t] -> the sum of the losses, the second way. Overflows where exp does."""
    total = all_reduce([np.exp(shard).sum(-1) for shard in logits])[0]     # b s elements
    losses = []
    for rank, shard in enumerate(logits):
        ids, held = local_ids(targets, rank * shard.shape[-1], shard.shape[-1])
        picked = np.take_along_axis(shard, ids[..., None], -1)[..., 0]
        losses.append(np.where(held, np.log(total) - picked, 0).sum())
    return all_reduce(losses)[0]                                         # one element from each rank


def sharded_cross_entropy_forward(logits, targets):
    """Map each rank's logits [b, s, V/t] -> loss [b, s], identical on every rank, the third way."""
    highest = all_reduce([shard.max(-1) for shard in logits], np.maximum)[0]        # b s elements
    sums, picked, exps, caches = [], [], [], []
    for rank, shard in enumerate(logits):
        shifted = shard - highest[..., None]
        ids, held = local_ids(targets, rank * shard.shape[-1], shard.shape[-1])
        picked.append(np.where(held, np.take_along_axis(shifted, ids[..., None], -1)[..., 0], 0))
        exps.append(np.exp(shifted))
        sums.append(exps[-1].sum(-1))
        caches.append((ids, held))
    total = all_reduce(sums)[0]                                          # b s elements
    loss = np.log(total) - all_reduce(picked)[0]                         # b s elements
    return loss, [(exp / total[..., None], *cache) for exp, cache in zip(exps, caches)]


def sharded_cross_entropy_backward(dloss, caches):
    """Return each rank's dlogits [b, s, V/t] for dloss [b, s], identical on every rank. Sends nothing."""
    return [softmax_minus_target(dloss, *cache) for cache in caches]


def softmax_minus_target(dloss, probs, ids, held):
    """Compute (probs - one at the target, where this rank holds it) x dloss."""
    dlogits = probs * dloss[..., None]
    at, dtarget = ids[..., None], (dloss * held)[..., None]
    np.put_along_axis(dlogits, at, np.take_along_axis(dlogits, at, -1) - dtarget, -1)
    return dlogits


# ---- the predicted token --------------------------------------------------------------------------------------------


def argmax_token(logits):
    """Return the token with the largest logit: logits [b, s, V] -> [b, s]. The first wins ties, common in 16 bits."""
    return logits.argmax(-1)


def sharded_argmax_token(logits):
    """Return the token with the largest logit: each rank's logits [b, s, V/t] -> [b, s], identical on every rank."""
    highest = all_reduce([shard.max(-1) for shard in logits], np.maximum)[0]        # b s elements
    found = []
    for rank, shard in enumerate(logits):
        token = rank * shard.shape[-1] + shard.argmax(-1)
        found.append(np.where(shard.max(-1) == highest, -token, NO_TOKEN))  # the first token has the largest negative
    return -all_reduce(found, np.maximum)[0]                             # b s elements
