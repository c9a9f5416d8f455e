"""Two convolutions with an activation between them, whole, and sharded over t ranks by channels.

The split of the transformer's MLP (Shoeybi et al. 2019, section 3, figure 3a) needs no transformer. It needs a linear
map, then a function of single numbers, then a linear map. A convolution is linear, and its channels take the part of
columns: the first is sharded by its output channels, so that every rank applies the activation to channels of its own,
and the second by its input channels, which takes these as they are. One all-reduce (g) forward, one (f) backward, and
not a pixel is exchanged. (The two MLPs of an MLP-Mixer are layers/mlp.py, the first of them on x transposed.)

It pays less than in a transformer. Forward, the all-reduce adds up b H W c numbers, and for each of these a rank does
4 k^2 f/t floating-point operations: 2,304/t for k = 3 and f = 64 channels, where the MLP of GPT-3 has 16 h/t, which is
196,608/t.
"""
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reference.ops import ACTIVATIONS, linear, linear_backward, rows
from reference.params import bias, weight


@dataclass(frozen=True)
class Convolutions:
    """Tensors of the two convolutions, or their gradients. Each of t ranks has f/t channels between the two."""

    w_in: Any    # A [k, k, c, f], split along axis 3
    b_in: Any    #   [f], split along axis 0
    w_out: Any   # B [k, k, f, c], split along axis 2
    b_out: Any   #   [c], replicated


def convolutions_tensors(k, c, f, std):
    """Declare the tensors of two convolutions of k x k pixels: from c channels to f, and back."""
    return Convolutions(weight((k, k, c, f), std, split=3), bias((f,), split=0),
                        weight((k, k, f, c), std, split=2), bias((c,)))


def convolutions_forward(x, p, activation):
    """Map x [b, H, W, c] -> y [b, H, W, c]."""
    act, _ = ACTIVATIONS[activation]
    a, act_cache = act(convolution(x, p.w_in) + p.b_in)      # [b, H, W, c] * [k, k, c, f] -> [b, H, W, f]
    y = convolution(a, p.w_out) + p.b_out                    # [b, H, W, f] * [k, k, f, c] -> [b, H, W, c]
    return y, (x, act_cache, a)


def convolutions_backward(dy, p, cache, activation):
    """Return dx [b, H, W, c] and the gradients, as Convolutions, for dy [b, H, W, c]."""
    x, act_cache, a = cache
    _, act_backward = ACTIVATIONS[activation]
    # forward: y = a * w_out + b_out
    da, dw_out = convolution_backward(dy, a, p.w_out)
    # forward: a = act(x * w_in + b_in)
    dz = act_backward(da, act_cache)
    dx, dw_in = convolution_backward(dz, x, p.w_in)
    return dx, Convolutions(dw_in, rows(dz).sum(0), dw_out, rows(dy).sum(0))


def sharded_convolutions_forward(xs, shards, activation, region):
    """Map each rank's x [b, H, W, c] -> its y [b, H, W, c], both identical on every rank."""
    act, _ = ACTIVATIONS[activation]
    entered, partial, caches = region.enter(xs), [], []                        # f
    for x, p in zip(entered, shards):
        a, act_cache = act(convolution(x, p.w_in) + p.b_in)  # [b, H, W, c] * [k, k, c, f/t] -> [b, H, W, f/t]
        partial.append(convolution(a, p.w_out))              # [b, H, W, f/t] * [k, k, f/t, c] -> a partial sum
        caches.append((x, act_cache, a))
    return [y + p.b_out for y, p in zip(region.leave(partial), shards)], caches   # g, and the bias once


def sharded_convolutions_backward(dys, shards, caches, activation, region):
    """Return each rank's dx [b, H, W, c] and gradients for its dy [b, H, W, c]."""
    partial, grads = [], []
    for dy, inner, p, cache in zip(dys, region.leave_backward(dys), shards, caches):
        dx, grad = convolutions_backward(inner, p, cache, activation)
        partial.append(dx)
        grads.append(replace(grad, b_out=rows(dy).sum(0)))   # forward: y = g(a * w_out) + b_out
    return region.enter_backward(partial), grads


# ---- a convolution is a matrix product of patches -------------------------------------------------------------------


def convolution(x, w):
    """Compute x [b, H, W, c] * w [k, k, c, m] -> [b, H, W, m], for an odd k. Beyond the edges x is 0."""
    return linear(patches(x, len(w)), w.reshape(-1, w.shape[-1]))    # [b, H, W, k k c] @ [k k c, m]


def convolution_backward(dy, x, w):
    """Return dx [b, H, W, c] and dw [k, k, c, m] for dy [b, H, W, m]."""
    k, (_, height, width, c) = len(w), x.shape
    dpatches, dw, _ = linear_backward(dy, patches(x, k), w.reshape(-1, w.shape[-1]))
    dx = np.pad(np.zeros_like(x), edges(k))
    for i, j in np.ndindex(k, k):        # forward: the pixel (i, j) of a patch is x, moved by i and j
        at = (i * k + j) * c
        dx[:, i:i + height, j:j + width] += dpatches[..., at:at + c]
    return dx[:, k // 2:k // 2 + height, k // 2:k // 2 + width], dw.reshape(w.shape)


def patches(x, k):
    """Return the k x k pixels around each pixel: x [b, H, W, c] -> [b, H, W, k k c]."""
    _, height, width, _ = x.shape
    padded = np.pad(x, edges(k))
    return np.concatenate([padded[:, i:i + height, j:j + width] for i, j in np.ndindex(k, k)], -1)


def edges(k):
    """Return what `np.pad` adds before and after each axis of [b, H, W, c]."""
    return (0, 0), (k // 2, k // 2), (k // 2, k // 2), (0, 0)
