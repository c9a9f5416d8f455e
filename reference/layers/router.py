"""The router of a layer with experts: which k of E experts compute a token, with which weights, and two losses.

Softmax over a token's E logits gives probabilities. The k largest logits choose its experts (the first wins ties), and
their probabilities are the weights of the experts' outputs: renormalised so that they add up to 1, as in Mixtral
(Jiang et al. 2024, 2401.04088, section 2.1: softmax over the k chosen logits alone is the same), or as they are
(--moe-router-pre-softmax).

The choice itself has no gradient. So nothing would keep a router from always choosing the same experts, but for the
*load-balancing loss*, E sum_e f_e P_e: f_e is the share of choices that fell on expert e, P_e the mean probability of e
(Fedus et al. 2021, 2101.03961, equations 4 to 6). It is 1 where both are even. The *z-loss*, the mean square of
log sum exp(logits), keeps logits small (Zoph et al. 2022, 2202.08906, equation 5).

**Over which tokens?** The first loss is a product of two means, so it is no sum over tokens: over the tokens of a
microbatch it would change with the size of the microbatch, and with the number of replicas. Over the global batch it
would need all forwards before the first backward. So it is taken over each *sequence* (as by Megatron's seq_aux_loss),
and the loss of the batch is the mean over all sequences of the global batch: no topology divides a sequence without a
way to sum up its E counts of choices. The z-loss is a mean over all tokens of the global batch. Padding has no part in
either. Both are multiplied by their coefficients and added to what is differentiated, but not to the loss of the
language model, next to which they are reported.
"""
from typing import Annotated, Any, NamedTuple

import numpy as np

from reference.activations import Activation
from reference.ops import softmax, softmax_backward


class Routing(NamedTuple):
    """The choices of a router for some tokens."""

    ids: Annotated[Any, Activation(inside=False)]       # int64 [b, s, k]: each token's experts, the most probable first
    weights: Annotated[Any, Activation(inside=False)]   # [b, s, k]: of their outputs
    probs: Annotated[Any, Activation(inside=False)]     # [b, s, E]


class RouterLosses(NamedTuple):
    """Both losses of some positions, and what their backward needs besides the probabilities."""

    shares: Any     # [b, s or 1, E]: E f_e of each sequence, times the weight of each of its tokens in the global batch
    size: Any       # [b, s, 1]: log sum exp(logits), times the weight of each token
    values: Any     # [2]: these positions' part of both losses
    scale: float    # of the gradients


def route(logits, c):
    """Choose experts for logits [b, s, E]. c is an ExpertsConfig."""
    probs, ids = softmax(logits), top_k(logits, c.moe_router_topk)
    chosen = np.take_along_axis(probs, ids, -1)                          # [b, s, k]
    return Routing(ids, chosen if c.moe_router_pre_softmax else chosen / chosen.sum(-1, keepdims=True), probs)


def route_backward(dweights, routing, c):
    """Return dlogits [b, s, E] for dweights [b, s, k]. The choice has no derivative, where it has one it is 0."""
    ids, weights, probs = routing
    # forward: weights = chosen / chosen.sum()
    if not c.moe_router_pre_softmax:
        total = np.take_along_axis(probs, ids, -1).sum(-1, keepdims=True)
        dweights = (dweights - (dweights * weights).sum(-1, keepdims=True)) / total
    # forward: chosen = probs[ids]
    dprobs = np.zeros_like(probs)
    np.put_along_axis(dprobs, ids, dweights, -1)
    return softmax_backward(dprobs, probs)


def top_k(logits, k):
    """Return the places of the k largest logits, in order: logits [..., E] -> int64 [..., k]. The first wins ties."""
    found = []
    for _ in range(k):
        found.append(logits.argmax(-1))
        taken = np.arange(logits.shape[-1], like=found[0]) == found[-1][..., None]
        logits = np.where(taken, -np.inf, logits)
    return np.stack(found, -1)


# ---- the losses -----------------------------------------------------------------------------------------------------


def choices_of_sequences(ids, num_experts, context, runs):
    """Count each sequence's choices of each expert at these positions: ids [b, s, k] -> int64 [b, E]. Padding does not
    count.
    """
    chosen = (ids[..., None] == np.arange(num_experts, like=ids)).sum(2)             # [b, s, E]
    return (chosen * real_positions(ids, context, runs)).sum(1)


def real_positions(like, context, runs):
    """Report which positions, slices of the sequence, are not padding: [b, s, 1], or [1, 1, 1] if there is none."""
    if context.lengths is None:
        return np.ones_like(like, shape=(1, 1, 1), dtype=bool)
    positions = np.concatenate([np.arange(run.start, run.stop, like=context.lengths) for run in runs])
    return (positions < context.lengths[:, None])[..., None]


def router_losses(logits, routing, choices, length, c, context, runs):
    """Compute both losses of some positions, and what their backward needs, as RouterLosses.

    logits [b, s, E] are those of the positions `runs`, slices of sequences of this length; `choices` [b, E] are counts
    over the whole sequences. c is an ExpertsConfig, `context` the layer's LayerContext: where it asks for no losses the
    result is None.
    """
    auxiliary, lengths = context.auxiliary, context.lengths
    if auxiliary is None:
        return None
    real = real_positions(choices, context, runs)
    tokens = np.full_like(choices, length, shape=(1, 1)) if lengths is None else lengths[:, None]        # [b, 1]
    even = c.moe_router_topk / c.num_experts                                         # the even share of f_e, in choices
    fractions = choices / (even * tokens)                                            # E f_e [b, E]
    shares = (fractions / (tokens * auxiliary.sequences)).astype(logits.dtype)[:, None] * real
    size = log_sum_exp(logits)
    weighted = size * (real / auxiliary.tokens).astype(logits.dtype)
    values = np.stack([(shares * routing.probs).sum(), (weighted * size).sum()])
    return RouterLosses(shares, weighted, values, auxiliary.scale)


def router_losses_backward(probs, losses, c):
    """Return dlogits [b, s, E] of both losses, times their coefficients and the loss scale; 0 where there are none."""
    if losses is None:
        return 0
    dlogits = softmax_backward(c.moe_aux_loss_coeff * losses.shares, probs)      # forward: (shares * probs).sum()
    dlogits += 2 * c.moe_z_loss_coeff * losses.size * probs                      # forward: (size * size).sum()
    return losses.scale * dlogits


def log_sum_exp(logits):
    """Compute log sum exp(logits) [..., 1], of which softmax is the derivative."""
    highest = logits.max(-1, keepdims=True)
    return highest + np.log(np.exp(logits - highest).sum(-1, keepdims=True))


# ---- the wrong way --------------------------------------------------------------------------------------------------


def balance_of_microbatches(probs, ids, parts):
    """Return the load-balancing loss as it is usually taken: over all tokens of a microbatch, whichever they are, then
    the mean over the microbatches. probs [B, s, E], ids [B, s, k].

    The mean of products is not the product of means: for other `parts`, the number of microbatches on all replicas
    together, it is another loss, and training is another run.
    """
    experts, losses = probs.shape[-1], []
    for some_probs, some_ids in zip(np.split(probs, parts), np.split(ids, parts)):
        fractions = np.bincount(some_ids.reshape(-1), minlength=experts) / some_ids.size
        losses.append(experts * (fractions * some_probs.mean((0, 1))).sum())
    return sum(losses) / parts
