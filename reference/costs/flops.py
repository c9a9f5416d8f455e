"""FLOPs of a step, the utilization of the peak, and the duration of a run, as the papers have them.

The papers' letters: reference/config. Narayanan et al. 2021 is 2104.04473 ("PTD-P"), Korthikanti et al. 2022 is
2205.05198.
"""
from collections import Counter
from functools import cache
from math import prod
from typing import NamedTuple

from reference.config import RECOMPUTE, ModelConfig, require_one_of
from reference.costs.parameters import declared_block
from reference.models.bert import CLASSIFIERS
from reference.models.model import model_tensors
from reference.params import leaves


class ForwardFlops(NamedTuple):
    """FLOPs of one forward pass's matrix products: [n, k] @ [k, m] takes n k m multiplications and n k m additions."""

    linear: int      # the layers' own matrices
    attention: int   # the core, which has no parameters
    logits: int      # and BERT's other heads


def forward_flops(c: ModelConfig, b: int, s: int) -> ForwardFlops:
    """Count the FLOPs for b sequences of s tokens, on all ranks together (Narayanan et al. 2021, appendix).

    A layer has 6 b s h^2 for Q, K and V, 2 b s h^2 for attention's output and 16 b s h^2 for the MLP, twice the weights
    for each token; and 2 b s^2 h for q k^T, and again for the probabilities times v. The causal mask hides half of that
    core, but the papers (and the textbook) compute all of it. Only matrix products count.

    That is a GPT. In general a matrix takes two FLOPs for each of its elements and each token; one of E experts sees
    only the k-th part of E that choose it. (Dispatch and combine are no matrix products.) The core has for h the
    columns of all heads.
    """
    multiplied = sum(n * multiplied_elements(c, experts) for experts, n in
                     Counter(map(c.has_experts, range(c.num_layers))).items())
    return ForwardFlops(linear=2 * b * s * multiplied,
                        attention=c.num_layers * (2 + 2) * b * s**2 * c.num_attention_heads * c.head_size,
                        logits=head_flops(c, b, s))


@cache
def multiplied_elements(c: ModelConfig, experts: bool) -> int:
    """Count the elements of a layer's matrices that compute a token, if the routers choose evenly."""
    block, share = declared_block(c, experts), 1.0
    if experts:
        assert c.experts
        share = c.experts.moe_router_topk / c.experts.num_experts
    return matrix_elements(block, dealt=False) + round(share * matrix_elements(block, dealt=True))


def matrix_elements(tensors, dealt: bool = False) -> int:
    """Count the elements of matrices, which are what weight decay applies to; of experts, or of everything else."""
    return sum(prod(tensor.shape) for _, tensor in leaves(tensors) if tensor.decay and tensor.dealt == dealt)


def head_flops(c: ModelConfig, b: int, s: int) -> int:
    """Count 2 b s h V for the logits; a BERT has them where it predicts a token. It has a layer before them, 2 b s h^2,
    and pooled heads, 2 b h^2; the one that finds answers has 4 b s h.
    """
    logits = c.hidden_size * c.vocab_size if "lm" in c.heads else 0
    if c.architecture == "gpt":
        return 2 * b * s * logits
    heads = model_tensors(c, range(c.num_layers - 1, c.num_layers))
    pooled = [heads.pooler, *(getattr(heads, name) for name in CLASSIFIERS.values())]
    everywhere = heads.lm_head, heads.span_head
    return 2 * b * (c.most_predicted(s) * logits + s * sum(map(matrix_elements, everywhere))
                    + sum(map(matrix_elements, pooled)))


def iteration_flops(c: ModelConfig, B: int, s: int, recompute: str = "none") -> int:
    """Count forward and backward of a global batch of B sequences. Raise UserError for an unknown `recompute`.

    For every product y = x w of the forward the backward has two, dy w^T and x^T dy: three times the forward. That is
    72 B s L h^2 (1 + s/(6h) + V/(12 L h)), the *model* FLOPs (Korthikanti et al. 2022, equation 7). `full` computes
    every layer, but not the logits, once more: 96 B s L h^2 (1 + s/(6h) + V/(16 L h)) (Narayanan et al. 2021, section
    5.1, equation 3). `selective` computes attention's core once more: 4 B s^2 h a layer.

    The last differs from Korthikanti et al.: their text adds the same 4 B s^2 h, but their equation 8 has s/(3h), which
    adds three times that. Their 2.7 and 1.6 % of overhead and their table of utilisations follow the equation.

    Megatron-LM's `num_floating_point_operations` has the padded vocabulary for V, so that its count grows with t; here
    V is the unpadded vocabulary. It counts only the logits of BERT's heads; and its later versions count half of
    attention's core, for the mask, also in a BERT, which has none. Here, as in the papers, all of it counts.
    """
    require_one_of("The recompute of activations", recompute, RECOMPUTE)
    linear, attention, logits = forward_flops(c, B, s)
    again = {"none": 0, "selective": attention, "full": linear + attention}[recompute]
    return 3 * (linear + attention + logits) + again


def utilization(flops: float, seconds: float, ranks: int, peak: float) -> float:
    """Return the fraction of their peak, in FLOP/s, that the ranks reach (Korthikanti et al. 2022, section 6.3).

    For the model FLOPs this is the MFU; for all computed FLOPs, recompute included, the HFU. Narayanan et al. 2021
    print the latter in their table 1.
    """
    return flops / (seconds * ranks * peak)


def training_seconds(tokens: float, psi: float, ranks: int, flops_per_second: float) -> float:
    """Return 8 T P / (n X): the time for T tokens and P = psi parameters, on n GPUs that each reach X FLOP/s.

    With full recompute a token costs 96 L h^2 FLOPs and the model has 12 L h^2 parameters, without the small terms of
    both: 8 FLOPs a token and parameter (Narayanan et al. 2021, section 5.1, equation 4). Without recompute it would be
    6. The days in their table 2 come from all of `iteration_flops`, and are 2 to 3 % more.
    """
    return 8 * tokens * psi / (ranks * flops_per_second)
