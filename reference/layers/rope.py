"""Rotary position embedding (Su et al. 2021): queries and keys are rotated by an angle that grows with the position."""
from math import pi

import numpy as np


def rotary_cos_sin(s, size, like, base=10_000.0, first=0, scaling=None):
    """Return cos and sin [s, 1, size/2] of the angle by which rope rotates pair i at position n: n / base^(2 i / size).

    The s positions begin with `first`. `scaling` is a RopeScaling (config/rope_scaling.py), or None.
    """
    position = np.arange(first, first + s, dtype=np.float64, like=like).reshape(-1, 1, 1)
    pair = np.arange(size // 2, dtype=np.float64, like=like)
    frequency = base ** (-2 * pair / size)
    angle = position * (scaled(frequency, scaling) if scaling else frequency)
    return np.cos(angle).astype(like.dtype), np.sin(angle).astype(like.dtype)


def scaled(frequency, scaling):
    """Return Llama 3.1's frequencies in place of these, in radians a position."""
    turns = frequency * (scaling.original / (2 * pi))
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = 1 - np.maximum(1 - np.maximum(share, 0), 0)            # between 0 and 1
    return frequency * (kept + (1 - kept) / scaling.factor)


def rotate(x, angles):
    """Rotate the first dimensions of each head by its position (Su et al. 2021, section 3.2): x [b, s, a, d] -> same.

    Pair i is (i, i + half), as in GPT-NeoX and Megatron. q k^T then depends only on the distance of two positions.
    """
    cos, sin = angles
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


def rotate_backward(dy, angles):
    """Rotate back: the transpose of a rotation is its inverse."""
    cos, sin = angles
    return rotate(dy, (cos, -sin))
