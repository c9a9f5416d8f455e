"""FLOPs of a step, the utilization of the peak, and the duration of a run, as the papers have them.

The papers' letters: reference/config. Narayanan et al. 2021 is 2104.04473 ("PTD-P"), Korthikanti et al. 2022 is
2205.05198.
"""
from typing import NamedTuple

from reference.config import RECOMPUTE, ModelConfig, require_one_of
from reference.costs.experts import added_flops
from reference.costs.parameters import pooled_columns


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

    That is a GPT. In general a layer's matrices have h (2 a d + 2 g d) elements for attention, of a heads of queries
    and g of keys and values, each of size d, and 2 h f for the MLP, or with a gate 3 h f; and the core has a d for h.
    """
    queries, keys = c.num_attention_heads * c.head_size, c.groups * c.head_size
    weights = c.hidden_size * (2 * queries + 2 * keys + (3 if c.swiglu else 2) * c.ffn_size)
    return ForwardFlops(linear=c.num_layers * 2 * b * s * weights + added_flops(c, b, s),
                        attention=c.num_layers * (2 + 2) * b * s**2 * queries, logits=head_flops(c, b, s))


def head_flops(c: ModelConfig, b: int, s: int) -> int:
    """Count 2 b s h V for the logits. BERT has a layer before them, 2 b s h^2, and pooled heads, 2 b h^2."""
    h, words = c.hidden_size, ("lm" in c.heads) * c.vocab_size
    if c.causal:
        return 2 * b * s * h * words
    columns = pooled_columns(c)
    return 2 * b * h * (bool(words) * s * (h + words) + bool(columns) * h + columns)


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
