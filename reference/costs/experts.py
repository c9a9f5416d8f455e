"""The parameters and FLOPs that experts in the MLP's place add to a model, counted from the declared tensors.

An expert is a whole MLP, so the parameters grow with the number E of experts. The work grows with k, the number of
those that compute a token. Mixtral 8x7B has 46.7 billion parameters, and computes a token with 12.9 billion of them
(Jiang et al. 2024, 2401.04088, section 2).
"""
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import NamedTuple

from reference.config import ModelConfig
from reference.layers.experts import experts_tensors
from reference.layers.layer import declare
from reference.params import leaves


def added_parameters(c: ModelConfig, layers: Sequence[int], t: int = 1, e: int = 1) -> int:
    """Count how many elements more than MLPs the experts in these layers have, on one of t ranks and of e."""
    count = sum(map(c.has_experts, c.with_own_blocks(layers)))
    return count * (elements_of_layer(c, t, e).branch - elements_of_layer(c, t, e).mlp) if count else 0


def dealt_parameters(c: ModelConfig, layers: Sequence[int], t: int, e: int) -> int:
    """Count the elements of experts in these layers on one of t ranks and of e; 0 if none are dealt out."""
    count = sum(map(c.has_experts, c.with_own_blocks(layers)))
    return count * elements_of_layer(c, t, e).experts if count and e > 1 else 0


class LayerElements(NamedTuple):
    """The elements on a rank of a layer's experts, and of the MLP in whose place they are."""

    branch: int     # router, experts and shared expert
    experts: int
    mlp: int


@cache
def elements_of_layer(c: ModelConfig, t: int, e: int) -> LayerElements:
    tensors = experts_tensors(c)
    return LayerElements(elements(tensors, t, e), elements(tensors.experts, t, e), elements(declare("mlp", c), t))


def elements(tensors, t: int, e: int = 1) -> int:
    """Count the elements of a rank's shards."""
    return sum(prod(tensor.local_shape(t, e)) for _, tensor in leaves(tensors))


def added_flops(c: ModelConfig, b: int, s: int) -> int:
    """Count the FLOPs that a forward of b sequences of s tokens takes beyond those of MLPs, on all ranks together.

    A matrix takes two for each of its elements and each token: the router for every token, an expert for the k-th part
    of E that choose it, and a shared one for every token, too. Dispatch and combine are no matrix products.
    """
    count = sum(map(c.has_experts, range(c.num_layers)))
    if not count:
        return 0
    assert c.experts
    tensors, share = experts_tensors(c), c.experts.moe_router_topk / c.experts.num_experts
    active = weights(tensors.router) + weights(tensors.shared) + round(share * weights(tensors.experts))
    return count * 2 * b * s * (active - weights(declare("mlp", c)))


def weights(tensors) -> int:
    """Count the elements of matrices, which are what weight decay applies to."""
    return sum(prod(tensor.shape) for _, tensor in leaves(tensors) if tensor.decay)
