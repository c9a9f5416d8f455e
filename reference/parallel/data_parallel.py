"""Data parallelism: d replicas of one model take different samples of a batch and sum their gradients.

Each replica takes its samples in m microbatches of b, one after another, and adds up their gradients: B = m d b. Every
loss is divided by the size of the *global* batch immediately, so the replicas' gradients are summed, not averaged, and
the assignment of samples to replicas changes nothing.
"""
from dataclasses import replace

import numpy as np

from reference.comm.collectives import all_reduce
from reference.config import number_of_microbatches
from reference.layer_context import AuxiliaryLosses, LayerContext
from reference.models.gpt import gpt_backward, gpt_forward
from reference.params import tree_map


def samples_of(replica: int, microbatch: int, d: int, b: int) -> slice:
    """Return the samples of the global batch in a microbatch of one of d replicas, in Megatron's order."""
    first = (microbatch * d + replica) * b
    return slice(first, first + b)


def data_parallel_gradients(tokens, targets, p, c, d, b, dropout=None):
    """Compute the loss and each replica's gradients, all identical, in one process; tokens, targets are [B, s].

    p is a whole GPT, of which every replica has a copy; c is its ModelConfig, `dropout` the batch's Dropout, or None.
    """
    losses, grads = [], []
    for replica in range(d):
        loss, total = 0.0, tree_map(np.zeros_like, p)
        for k in range(number_of_microbatches(len(tokens), b, d)):
            mine = samples_of(replica, k, d, b)
            context = LayerContext(dropout and replace(dropout, sample=mine.start),
                                   auxiliary=AuxiliaryLosses(len(tokens), tokens.size))   # of the global batch, too
            microbatch, cache = gpt_forward(tokens[mine], p, c, targets[mine], context)
            dloss = np.full_like(microbatch, 1 / tokens.size)       # 1 / (B s), not 1 / (b s)
            _, grad = gpt_backward(dloss, p, cache, c)
            loss, total = loss + (microbatch * dloss).sum(), tree_map(np.add, total, grad)
        losses.append(loss)
        grads.append(total)
    return all_reduce(losses)[0], all_reduce_trees(grads)


def weighted_loss(losses, weights):
    """Return the loss over all ranks, and each rank's gradient of it, from each rank's losses and their weights.

    The ranks have other samples, or with context parallelism other positions. Both sums are over all of them.
    """
    total = all_reduce([weight.sum() for weight in weights])[0]
    return all_reduce([(loss * weight).sum() / total for loss, weight in zip(losses, weights)])[0], [
        weight / total for weight in weights]


def mean_of_means(losses, weights):
    """Do the same by the mean of the ranks' means, which is wrong where their weights differ: a rank with few tokens
    that count gives each of them more weight.

    With context parallelism that is the rule, not the exception: padding is at the end of a sequence, and so on a few
    ranks. With one token that counts, on one of c = 2 ranks, loss and gradient are halved (NVIDIA/Megatron-LM #7452).
    """
    shares = [weight / max(weight.sum(), 1) / len(weights) for weight in weights]
    return all_reduce([(loss * share).sum() for loss, share in zip(losses, shares)])[0], shares


def all_reduce_trees(trees):
    """All-reduce every tensor. (The machine's gradients lie in one flat buffer, and take a single all-reduce.)"""
    total = tree_map(lambda *xs: all_reduce(xs)[0], *trees)
    return [total for _ in trees]
