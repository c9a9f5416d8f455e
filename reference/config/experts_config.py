"""Sizes and choices of a mixture of experts."""
from dataclasses import dataclass

from reference.config.checks import require_not_negative, require_positive
from reference.errors import UserError


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a model, under Megatron's names. Raises UserError if its sizes do not fit together."""

    num_experts: int                                     # E, in each layer that has experts
    moe_router_topk: int = 2                             # k: the experts that compute a token
    moe_router_pre_softmax: bool = False                 # whether weights are softmax over all, or over the k chosen
    moe_ffn_hidden_size: int | None = None               # of each expert; None: as the MLP's
    moe_layer_freq: int = 1                              # every n-th layer has experts, layer 0 first
    moe_shared_expert_intermediate_size: int | None = None   # of an MLP that computes all tokens, too
    moe_aux_loss_coeff: float = 0.0                      # of the load-balancing loss
    moe_z_loss_coeff: float = 0.0                        # of the loss that keeps logits small
    moe_expert_capacity_factor: float | None = None      # None: no token is dropped

    def __post_init__(self):
        for name in ("num_experts", "moe_router_topk", "moe_layer_freq"):
            require_positive(name, getattr(self, name))
        for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
            if getattr(self, name) is not None:
                require_positive(name, getattr(self, name))
        for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
            require_not_negative(name, getattr(self, name))
        if self.moe_router_topk > self.num_experts:
            raise UserError(f"--moe-router-topk is {self.moe_router_topk}, but --num-experts is {self.num_experts}: "
                            f"each token chooses different experts. Choose at most {self.num_experts}.")
        if self.moe_expert_capacity_factor is not None and not 0 < self.moe_expert_capacity_factor < float("inf"):
            raise UserError(f"--moe-expert-capacity-factor is {self.moe_expert_capacity_factor}, but must be a number "
                            "above 0: an expert takes that many times its even share of the tokens.")
