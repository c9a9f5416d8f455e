"""Settings of Adam and of its learning rate."""
from dataclasses import dataclass

from reference.config.checks import option, require_not_negative, require_one_of, require_positive
from reference.errors import UserError

DECAY_STYLES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class OptimizerConfig:
    """Megatron's options for Adam and its learning rate. Raises UserError for values that make no sense."""

    lr: float
    lr_decay_iters: int
    min_lr: float = 0.0
    lr_decay_style: str = "linear"
    lr_warmup_iters: int = 0
    weight_decay: float = 0.01
    clip_grad: float = 1.0          # largest global norm of the gradient; 0 does not clip
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8

    def __post_init__(self):
        require_positive("lr_decay_iters", self.lr_decay_iters)
        require_one_of("lr_decay_style", self.lr_decay_style, DECAY_STYLES)
        for name in ("lr", "min_lr", "weight_decay", "clip_grad", "adam_eps", "lr_warmup_iters"):
            require_not_negative(name, getattr(self, name))
        if self.adam_eps == 0:
            raise UserError("--adam-eps is 0.0, but must be above 0: a weight without gradient would be moved by "
                            "0 / 0.")
        if self.min_lr > self.lr:
            raise UserError(f"--min-lr is {self.min_lr}, but must not be above --lr, which is {self.lr}.")
        if self.lr_warmup_iters >= self.lr_decay_iters and self.lr_decay_style != "constant":
            raise UserError(f"The warm-up of {self.lr_warmup_iters} iterations must be shorter than --lr-decay-iters, "
                            f"which is {self.lr_decay_iters}: the rate must have come up before it can come down.")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{option(name)} is {getattr(self, name)}, but must be in [0, 1).")
