"""Adam with decoupled weight decay, clipping by the global norm, and the learning-rate schedule. Formulas only.

Updates are in place and element by element, so the same lines serve whole tensors, shards and slices of a flat buffer.
"""
from math import cos, pi

import numpy as np

from reference.config import OptimizerConfig


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
