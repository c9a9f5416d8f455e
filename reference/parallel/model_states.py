"""Bytes of parameters, gradients and optimizer states on a rank, with and without ZeRO.

Rajbhandari et al. 2020 is 1910.02054. A GB is 10^9 bytes, as in its table.
"""
from typing import NamedTuple

from reference.config import check_zero_stage


class ModelStates(NamedTuple):
    """Bytes on each rank."""

    parameters: float   # the model's own: 16-bit in the papers
    gradients: float
    optimizer: float


def states_with_experts(psi: int, of_experts: int, d: int, e: int, *choices) -> ModelStates:
    """Return the bytes of psi parameters, of which this many are of experts that are dealt out to e of d replicas.

    All of a rank's are counted, but experts have only d/e copies to shard over. The choices are those of model_states.
    """
    dense, experts = model_states(psi - of_experts, d, *choices), model_states(of_experts, max(1, d // e), *choices)
    return ModelStates(*map(sum, zip(dense, experts)))


def model_states(psi: int, d: int, zero_stage: int = 0, w: int = 2, g: int = 2, k: int = 12) -> ModelStates:
    """Return the bytes of psi parameters, the rank's share of the model, with ZeRO over d replicas.

    w bytes a parameter, g a gradient (2 in the paper; 4 where float32 main gradients are kept), and K for Adam in mixed
    precision: a float32 copy and two moments are 12. Each stage shards one more of them over d ranks: K psi/d, then (g
    + K) psi/d, then (w + g + K) psi/d (Rajbhandari et al. 2020, section 5). Raises UserError unless the stage is 0 to
    3.

    With one dtype for everything there is no copy: in float32 w = 4, g = 4 and K = 8; in float64 8, 8 and 16.
    """
    check_zero_stage(zero_stage)
    return ModelStates(parameters=w * psi / (d if zero_stage >= 3 else 1),
                       gradients=g * psi / (d if zero_stage >= 2 else 1),
                       optimizer=k * psi / (d if zero_stage >= 1 else 1))
