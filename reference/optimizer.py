"""Adam with decoupled weight decay, clipping by the global norm, and the learning-rate schedule. Formulas only.

Updates are in place and element by element, so the same lines serve whole tensors, shards and slices of a flat buffer.
"""
from dataclasses import dataclass
from math import cos, pi

import numpy as np

from reference.config import option, require_not_negative, require_one_of, require_positive
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


def learning_rate(c: OptimizerConfig, iteration: int) -> float:
    """Return the rate at an iteration, counted from 1: a linear rise to lr, then a decay to min_lr, where it stays.

    The first iteration and the last of --lr-decay-iters both learn something. (Megatron's first step of a warm-up has
    rate 0.) The iteration after the warm-up has the full rate, and the one after --lr-decay-iters has min_lr.
    """
    if iteration <= c.lr_warmup_iters:
        return c.lr * iteration / c.lr_warmup_iters
    if c.lr_decay_style == "constant":
        return c.lr
    done = min(1.0, (iteration - 1 - c.lr_warmup_iters) / (c.lr_decay_iters - c.lr_warmup_iters))
    left = 1 - done if c.lr_decay_style == "linear" else 0.5 * (1 + cos(pi * done))
    return c.min_lr + (c.lr - c.min_lr) * left


def clip_coefficient(norm: float, clip_grad: float) -> float:
    """Return the factor for every gradient that makes their global norm at most clip_grad (Megatron's formula)."""
    return min(1.0, clip_grad / (norm + 1e-6)) if clip_grad > 0 else 1.0


def sum_of_squares(grad):
    """Sum the squares of one array. The global norm is the root of their sum over tensors, each tensor counted once."""
    return np.vdot(grad, grad)


def adam_update(param, grad, m, v, step: int, lr: float, decay: bool, c: OptimizerConfig) -> None:
    """Do one AdamW step (Loshchilov and Hutter 2019, algorithm 2), in place on param, m and v; `step` counts from 1.

    Decay is multiplied by the learning rate, as in PyTorch and Megatron; the paper has a schedule of its own for it.

    Where a gradient is zero but for rounding (the key bias: softmax ignores a constant added to every score) m /
    sqrt(v) is rounding over rounding, up to 1. There float32 runs diverge by up to lr a step, and nothing is wrong.
    """
    m *= c.adam_beta1
    m += (1 - c.adam_beta1) * grad
    v *= c.adam_beta2
    v += (1 - c.adam_beta2) * grad * grad
    m_hat, v_hat = m / (1 - c.adam_beta1**step), v / (1 - c.adam_beta2**step)
    if decay:
        decay_weights(param, lr, c)
    param -= lr * m_hat / (np.sqrt(v_hat) + c.adam_eps)


def decay_weights(param, lr: float, c: OptimizerConfig) -> None:
    """Apply the weight decay of an AdamW step in place. It does not depend on the gradient."""
    param *= 1 - lr * c.weight_decay
