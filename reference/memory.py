"""What a rank must hold, in bytes, as the papers' formulas: model states, and activations.

Rajbhandari et al. 2020 is 1910.02054 (ZeRO), Korthikanti et al. 2022 is 2205.05198. Letters as in reference/cost.py.
A GB is 10^9 bytes, as in the papers' tables.
"""
from typing import NamedTuple

from reference.config import ModelConfig, require_one_of
from reference.cost import RECOMPUTE, check_zero_stage

# ---- model states ---------------------------------------------------------------------------------------------------


class ModelStates(NamedTuple):
    """Bytes on each rank."""

    parameters: float   # the 16-bit ones that compute
    gradients: float
    optimizer: float


def model_states(psi: int, d: int, zero_stage: int = 0, gradient_bytes: int = 2, k: int = 12) -> ModelStates:
    """Of psi parameters, the rank's share of the model, with ZeRO over d replicas. Raises UserError for no stage 0-3.

    2 bytes a parameter, g a gradient (2 in the paper; 4 where float32 main gradients are kept), and K for Adam in mixed
    precision: a float32 copy and two moments are 12. Each stage cuts one more of them into d parts: K psi/d, then
    (g + K) psi/d, then (2 + g + K) psi/d (Rajbhandari et al. 2020, section 5).
    """
    check_zero_stage(zero_stage)
    return ModelStates(parameters=2 * psi / (d if zero_stage >= 3 else 1),
                       gradients=gradient_bytes * psi / (d if zero_stage >= 2 else 1),
                       optimizer=k * psi / (d if zero_stage >= 1 else 1))


# ---- activations ----------------------------------------------------------------------------------------------------


class LayerActivations(NamedTuple):
    """Bytes that one layer keeps on each rank for the backward of one microbatch."""

    replicated: float   # outside the tensor-parallel regions: on every rank, unless the sequence is split
    split: float        # inside them: a rank has its heads and its columns
    core: float         # of attention: softmax, its dropout mask and what is left after it, a s^2 of each


def layer_activations(c: ModelConfig, b: int, s: int, t: int = 1, sequence_parallel: bool = False,
                      recompute: str = "none") -> LayerActivations:
    """Of 16-bit activations and one-byte dropout masks (Korthikanti et al. 2022, equations 1 to 4, and table 2).

    In units of s b h:  10   inputs of two layer norms 4, of QKV 2, of the MLP 2; two dropout masks after the branches 2
                        24   Q, K and V 6, input of attention's output layer 2, of GELU 8, of the MLP's second layer 8
                  5 a s/h    softmax 2, dropout's mask 1 and output 2

    Sequence parallelism divides the 10 by t too (the gathered inputs are not kept, but gathered again). `selective`
    recomputes the core. `full` keeps the layer's input, 2 s b h, of which a rank has 1/t if the sequence is split
    (the paper's table 2 has it whole, for there `full` stands without sequence parallelism).
    Raises UserError for an unknown `recompute`.
    """
    require_one_of("The recompute of activations", recompute, RECOMPUTE)
    sbh, outside = s * b * c.hidden_size, t if sequence_parallel else 1
    if recompute == "full":
        return LayerActivations(2 * sbh / outside, 0, 0)
    core = 5 * c.num_attention_heads * s**2 * b / t
    return LayerActivations(10 * sbh / outside, 24 * sbh / t, core if recompute == "none" else 0)


def activations_outside_layers(c: ModelConfig, b: int, s: int, t: int, p: int) -> float:
    """Bytes on a rank of the first stage, with sequence parallelism (Korthikanti et al. 2022, section 4.3).

    The dropout mask after the embedding, for p microbatches in flight; and where the first stage is also the last, what
    the head keeps: inputs of the final layer norm and of the logits, 2 each, and the logits in float32, 4 V.
    """
    sbh, V = s * b * c.hidden_size, c.vocab_size
    return p * sbh / t + (4 * sbh / t * (1 + V / c.hidden_size) if p == 1 else 0)


def most_in_flight(schedule: str, p: int, m: int, rank: int, v: int = 1) -> int:
    """Stages' worth of activations that a rank holds at once, at most. Raises UserError for an unknown schedule.

    GPipe keeps all m; 1F1B one for each rank from this to the last (Narayanan et al. 2021, section 2.2), so that the
    first always holds p x L/p layers' worth: cutting the pipeline further saves nothing. Interleaved, a stage is 1/v
    of a rank's layers, and the first rank holds L (1 + (p - 1)/(p v)) layers' worth (Korthikanti et al. 2022, section
    4.2.3). ZB-H1 holds p everywhere, ZB-H2 2p - 1 (Qi et al. 2023, section 2.3, table 2).
    """
    bounds = {"gpipe": m, "1f1b": p - rank, "interleaved": 2 * (p - rank - 1) + (v - 1) * p + 1,
              "zb-h1": p, "zb-h2": 2 * p - 1}
    require_one_of("The schedule", schedule, tuple(bounds))
    return min(bounds[schedule], v * m)
