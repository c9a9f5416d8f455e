"""The number of parameters of a model, in total and on each rank, counted from the declarations of its tensors.

The papers' letters: reference/config. Narayanan et al. 2021 is 2104.04473 ("PTD-P").
"""
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import prod

from reference.config import ModelConfig
from reference.layers.block import Block, block_tensors
from reference.models.model import model_tensors
from reference.params import leaves


def parameters(c: ModelConfig) -> int:
    """Return the number of elements, without padding: of a GPT, V h + s h + L (12 h^2 + 13 h) + 2 h.

    A layer has 3h^2 + 3h for Q, K and V, h^2 + h for attention's output, 8h^2 + 5h for the MLP and 4h for two norms;
    s is the longest sequence, and the 2 h are the final layer norm's. Mixtral 8x7B has 46.7 billion, and computes a
    token with 12.9 billion of them (Jiang et al. 2024, 2401.04088, section 2).
    """
    return parameters_of_stage(replace(c, make_vocab_size_divisible_by=1), 1, range(c.num_layers))


def published_parameters(c: ModelConfig) -> float:
    """Return P = 12 L h^2 (1 + 13/(12h) + (V + s)/(12 L h)) (Narayanan et al. 2021, section 5.1, equation 2).

    It is for a GPT with learned positions and tied logits, and leaves out the 2h of the final layer norm.
    """
    L, h, V, s = c.num_layers, c.hidden_size, c.vocab_size, c.max_position_embeddings
    return 12 * L * h**2 * (1 + 13 / (12 * h) + (V + s) / (12 * L * h))


def parameters_of_stage(c: ModelConfig, t: int, layers: Sequence[int], e: int = 1) -> int:
    """Count the elements on one of t tensor-parallel ranks of the stage with these layers, one of e that share experts.

    It holds its shards of the sharded tensors, padding included, and all of the rest. The first stage embeds; the last
    has the final norm and the heads. Tied logits need the word table there too: a copy, unless the stage is both.
    """
    return ((elements_of_ends(c, t, layers[0], layers[-1]) if {0, c.num_layers - 1} & {layers[0], layers[-1]} else 0)
            + sum(n * elements_of_block(c, experts, t, e) for experts, n in kinds_of_blocks(c, layers).items()))


def dealt_parameters(c: ModelConfig, layers: Sequence[int], t: int, e: int) -> int:
    """Count the elements of experts in these layers on one of t ranks and of e; 0 if none are dealt out."""
    return 0 if e == 1 else kinds_of_blocks(c, layers)[True] * elements_of_block(c, True, t, e, dealt=True)


def kinds_of_blocks(c: ModelConfig, layers: Sequence[int]) -> Counter[bool]:
    """Count the blocks of a stage that have experts, and those that have none."""
    return Counter(map(c.has_experts, c.with_own_blocks(layers)))


def declared_block(c: ModelConfig, experts: bool) -> Block:
    """Declare the tensors of a layer of this model with experts, or of one without."""
    return block_tensors(c if experts else replace(c, experts=None))


@cache
def elements_of_block(c: ModelConfig, experts: bool, t: int, e: int, dealt: bool = False) -> int:
    """Count the elements of a layer on one of t ranks and of e; with `dealt` only those of its experts."""
    return sum(prod(tensor.local_shape(t, e)) for _, tensor in leaves(declared_block(c, experts))
               if tensor.dealt or not dealt)


@cache
def elements_of_ends(c: ModelConfig, t: int, first: int, last: int) -> int:
    """Count a rank's elements of embedding, final norm and heads, on the stage with the layers first to last."""
    ends = replace(model_tensors(c, range(first, last + 1)), blocks={})
    return sum(prod(tensor.local_shape(t)) for _, tensor in leaves(ends))
