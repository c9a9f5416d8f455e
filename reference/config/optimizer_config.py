"""Settings of Adam and Muon, and of their learning rate."""
from dataclasses import dataclass

from reference.config.checks import option, require_not_negative, require_one_of, require_positive
from reference.errors import UserError

DECAY_STYLES = ("constant", "linear", "cosine")
OPTIMIZERS = ("adam", "muon")
MUON_SCALE_MODES = ("spectral", "unit_rms_norm", "shape_scaling")    # reference/optimizers/muon.py has the formulas
MUON_TP_MODES = ("duplicated", "distributed")


@dataclass(frozen=True)
class OptimizerConfig:
    """Megatron's options for the optimizer and its learning rate. Raises UserError for values that make no sense."""

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
    optimizer: str = "adam"         # or "muon", with Adam for all that is not a matrix
    muon_momentum: float = 0.95
    muon_use_nesterov: bool = False
    muon_num_ns_steps: int = 5
    muon_scale_mode: str = "spectral"
    muon_extra_scale_factor: float = 1.0
    muon_tp_mode: str = "duplicated"   # how tensor-parallel ranks orthogonalize a matrix that they share

    @property
    def muon(self) -> bool:
        """Report whether matrices are Muon's."""
        return self.optimizer == "muon"

    def __post_init__(self):
        require_positive("lr_decay_iters", self.lr_decay_iters)
        require_one_of("optimizer", self.optimizer, OPTIMIZERS)
        check_muon(self)
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
        for name in ("adam_beta1", "adam_beta2", "muon_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{option(name)} is {getattr(self, name)}, but must be in [0, 1).")


def check_muon(c: OptimizerConfig) -> None:
    """Raise UserError for values of Muon's options that make no sense."""
    require_positive("muon_num_ns_steps", c.muon_num_ns_steps)
    require_not_negative("muon_extra_scale_factor", c.muon_extra_scale_factor)
    require_one_of("muon_scale_mode", c.muon_scale_mode, MUON_SCALE_MODES)
    if c.muon_tp_mode == "blockwise":
        raise UserError("--muon-tp-mode is blockwise, which orthogonalizes each rank's shard of a matrix as if it were "
                        "a matrix of its own: then the run depends on --tensor-model-parallel-size, and here none "
                        f"does. Choose {' or '.join(MUON_TP_MODES)}.")
    require_one_of("muon_tp_mode", c.muon_tp_mode, MUON_TP_MODES)
