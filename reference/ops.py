"""The local math of a transformer in plain NumPy: each function forward, then backward.

`y, cache = op(x)`, then `dx = op_backward(dy, cache)`. Results have the dtype of the inputs, float32 or float64; ids
and targets are integers. Everything here also runs on CuPy arrays, through NumPy's dispatch protocols: so new arrays
are made "like" an existing one, and matrix products are two-dimensional.
"""
from math import pi, sqrt
from typing import Annotated, Any, NamedTuple

import numpy as np

from reference.activations import Activation
from reference.random import counter_rng


def rows(x):
    """Flatten [..., n] to [product of the rest, n], so that a sum over batch and sequence is one matrix product."""
    return x.reshape(-1, x.shape[-1])


# ---- linear -----------------------------------------------------------------------------------------------------


def linear(x, w, b=None):
    """Compute x [..., n] @ w [n, m] + b [m] -> [..., m]."""
    y = (rows(x) @ w).reshape(*x.shape[:-1], w.shape[-1])
    return y if b is None else y + b


def linear_backward(dy, x, w):
    """Return dx [..., n], dw [n, m] and db [m] for dy [..., m]."""
    return linear(dy, w.T), rows(x).T @ rows(dy), rows(dy).sum(0)


def batched_matmul(x, y):
    """Compute x [..., n, k] @ y [..., k, m] -> [..., n, m] as one two-dimensional product for each leading index.

    On NumPy `x @ y` would be enough. CuPy's copies transposed inputs beyond two dimensions.
    """
    out = np.empty_like(x, shape=(*x.shape[:-1], y.shape[-1]))
    for i in np.ndindex(*x.shape[:-2]):
        np.matmul(x[i], y[i], out=out[i])
    return out


# ---- activations --------------------------------------------------------------------------------------------------


def gelu(x):
    """Compute x Phi(x) by GPT's tanh form (Hendrycks and Gimpel 2016), within 5e-4 of the exact value."""
    tanh = np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + tanh), (x, tanh)


def gelu_backward(dy, cache):
    """Return dx for dy, in the same shape."""
    x, tanh = cache
    inner = sqrt(2 / pi) * (1 + 3 * 0.044715 * x**2)                  # of the tanh's argument
    return dy * 0.5 * (1 + tanh + x * (1 - tanh**2) * inner)


def gelu_exact(x):
    """Compute x Phi(x), Phi the normal distribution function (Hendrycks and Gimpel 2016), as BERT does."""
    phi = 0.5 * (1 + erf(x / sqrt(2)))
    return x * phi, (x, phi)


def gelu_exact_backward(dy, cache):
    """Return dx for dy, in the same shape: Phi' is the normal density."""
    x, phi = cache
    return dy * (phi + x * np.exp(-0.5 * x**2) / sqrt(2 * pi))


def relu(x):
    """Compute max(x, 0) of x of any shape."""
    return np.maximum(x, 0), x > 0


def relu_backward(dy, positive):
    """Return dx for dy, in the same shape."""
    return dy * positive


ACTIVATIONS = {"gelu": (gelu, gelu_backward), "gelu_exact": (gelu_exact, gelu_exact_backward),
               "relu": (relu, relu_backward)}


def swiglu(x):
    """Compute silu(gate) * up of x = [gate, up] [..., 2, f] -> [..., f], silu(z) = z sigmoid(z) (Shazeer 2020)."""
    gate, up = x[..., 0, :], x[..., 1, :]
    sigmoid = 0.5 * (1 + np.tanh(0.5 * gate))
    return gate * sigmoid * up, (x, sigmoid)


def swiglu_backward(dy, cache):
    """Return dx [..., 2, f] for dy [..., f]."""
    x, sigmoid = cache
    gate, up = x[..., 0, :], x[..., 1, :]
    slope = sigmoid * (1 + gate * (1 - sigmoid))                      # of silu
    return np.stack([dy * up * slope, dy * gate * sigmoid], -2)


def pre_activation(kept, cache):
    """Return the input of an activation function, the first array that its kernel keeps; ReLU's keeps the sign alone.
    """
    x = kept[0] if isinstance(kept, tuple) else kept
    return None if x.dtype == bool else x


# ---- normalisation ------------------------------------------------------------------------------------------------


class NormCache(NamedTuple):
    """The arrays that the backward of a norm needs."""

    normed: Annotated[Any, Activation(inside=False)]        # [..., h]
    inverse_std: Annotated[Any, Activation(inside=False)]   # [..., 1]


def layer_norm(x, weight, bias, epsilon):
    """Compute (x - mean) / sqrt(variance + epsilon) * weight + bias, x [..., h], weight, bias [h] (Ba et al. 2016)."""
    centred = x - x.mean(-1, keepdims=True)
    inverse_std = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    normed = centred * inverse_std
    return normed * weight + bias, NormCache(normed, inverse_std)


def layer_norm_backward(dy, weight, cache):
    """Return dx [..., h], dweight [h] and dbias [h] for dy [..., h]."""
    normed, inverse_std = cache
    dnormed = dy * weight
    # Adding a constant to x does not change the output, nor (but for epsilon) does scaling x - mean: so dx has no
    # component along ones, nor along x - mean.
    dx = dnormed - dnormed.mean(-1, keepdims=True) - normed * (dnormed * normed).mean(-1, keepdims=True)
    return dx * inverse_std, rows(dy * normed).sum(0), rows(dy).sum(0)


def rms_norm(x, weight, epsilon):
    """Compute x / sqrt(mean of x^2 + epsilon) * weight, x [..., h], weight [h] (Zhang and Sennrich 2019)."""
    inverse_rms = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    normed = x * inverse_rms
    return normed * weight, NormCache(normed, inverse_rms)


def rms_norm_backward(dy, weight, cache):
    """Return dx [..., h] and dweight [h] for dy [..., h]. But for epsilon, scaling x does not change the output."""
    normed, inverse_rms = cache
    dnormed = dy * weight
    dx = dnormed - normed * (dnormed * normed).mean(-1, keepdims=True)
    return dx * inverse_rms, rows(dy * normed).sum(0)


def softmax(x):
    """Compute exp(x) / sum of exp(x) over the last axis of x [..., n], less the maximum so that exp cannot overflow."""
    exp = np.exp(x - x.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def softmax_backward(dy, y):
    """Return dx [..., n] for dy [..., n] and y = softmax(x). A constant added to all of dy changes nothing."""
    return y * (dy - (dy * y).sum(-1, keepdims=True))


# ---- dropout ------------------------------------------------------------------------------------------------------


class Mask(NamedTuple):
    """The elements that dropout keeps, and the factor that preserves the mean."""

    keep: Any      # bool, in the shape of the array
    scale: float   # 1 / (1 - rate)


def kept_elements(mask, cache):
    """Return the elements that a Mask keeps, bool; None where the mask is None."""
    return None if mask is None else mask.keep


def draw_mask(site, shape, like):
    """Draw the Mask of an array of this shape at a Site of reference/random/dropout.py; None where site is None."""
    if site is None:
        return None
    index = counter_rng.indices(shape, site.whole, site.first, like)
    return Mask(counter_rng.bits(site.key, index) >= site.threshold, site.scale)


def masked(x, mask):
    """Scale x where the mask keeps it and zero the rest; return x itself where the mask is None."""
    return x if mask is None else np.where(mask.keep, x * mask.scale, 0)


def dropout(x, site):
    """Drop each element of x by chance and scale up the others (Srivastava et al. 2014, section 10).

    The expected value is x, so evaluation, which drops nothing, needs no other scale.
    """
    mask = draw_mask(site, x.shape, x)
    return masked(x, mask), mask


def dropout_backward(dy, mask):
    """Return dx for dy, in the same shape: the factors of x multiply dy."""
    return masked(dy, mask)


# ---- attention ----------------------------------------------------------------------------------------------------


def kept_probs(mask, core):
    """Return the probabilities that a Mask keeps, bool, without those that are 0; None where the mask is None."""
    return None if mask is None else mask.keep & (core.probs != 0)


Queries = Annotated[Any, Activation(axis=2)]
Keys = Annotated[Any, Activation(axis=2, of_keys=True)]
Probs = Annotated[Any, Activation(axis=1)]
ProbsMask = Annotated[Any, Activation("probs_mask", axis=1, array=kept_probs)]


class CoreInputs(NamedTuple):
    """The arguments of attention_core, from which it can be recomputed."""

    q: Queries     # [b, s, a, d]
    k: Keys        # [b, s, g, d]: head i of k and v serves heads i a/g to (i + 1) a/g - 1 of q
    v: Keys
    causal: bool
    site: Any      # where dropout draws, or None
    lengths: Any = None   # int64 [b]: how many positions of each sample are real, or None: all


class AttentionCore(NamedTuple):
    """The arrays that attention's backward needs."""

    q: Queries        # [b, s, a, d]
    k: Keys           # [b, s, g, d]
    v: Keys
    probs: Probs      # [b, a, s, s], before dropout
    mask: ProbsMask   # a Mask of probs, or None


def attention_core(q, k, v, causal, site=None, lengths=None):
    """Compute dropout(softmax(q k^T / sqrt(d))) v for each head: q [b, s, a, d], k, v [b, s, g, d] -> [b, s, a, d].

    d is the size of one head, not of the model (Vaswani et al. 2017, equation 1). Each head of k and v serves a group
    of a/g neighbouring heads of q, one or several (Ainslie et al. 2023): their queries are like further positions. With
    `causal`, a position attends to itself and to earlier ones. `site` is where dropout draws, or None: no dropout. The
    first lengths[i] positions of sample i are real, at least one; the others are padding, and no query attends to them.
    Queries in the padding attend to the real positions, but nothing uses their results. lengths is int64 [b], or None:
    all are real.
    """
    inputs = q, k, v
    q, k, v = (x.swapaxes(1, 2) for x in inputs)                      # [b, s, a, d] -> [b, a, s, d]
    # [b, g, a/g s, d] @ [b, g, d, s] -> [b, a, s, s]
    scores = by_heads(batched_matmul(by_groups(q, k), k.swapaxes(2, 3)), q) / sqrt(q.shape[-1])
    if causal:
        past = np.tril(np.ones_like(scores, shape=scores.shape[2:], dtype=bool))
        scores = np.where(past, scores, -np.inf)
    if lengths is not None:
        real = np.arange(k.shape[2], like=k) < lengths[:, None]       # [b, s]
        scores = np.where(real[:, None, None], scores, -np.inf)
    probs = softmax(scores)
    dropped, mask = dropout(probs, site)
    context = by_heads(batched_matmul(by_groups(dropped, v), v), q)   # [b, g, a/g s, s] @ [b, g, s, d] -> [b, a, s, d]
    return context.swapaxes(1, 2), AttentionCore(*inputs, probs, mask)


def by_groups(x, k):
    """View the heads of a group as one: x [b, a, s, n] -> [b, g, a/g s, n], for k [b, g, s, d]."""
    return x.reshape(*k.shape[:2], -1, x.shape[-1])


def by_heads(x, q):
    """Invert by_groups: x [b, g, a/g s, n] -> [b, a, s, n], for q [b, a, s, d]."""
    return x.reshape(*q.shape[:3], -1)


def attention_core_backward(dcontext, cache):
    """Return dq [b, s, a, d], dk and dv [b, s, g, d] for dcontext [b, s, a, d].

    Masked scores have probability 0 and gradient 0. The dropped probabilities are recomputed: of the arrays [b, a, s,
    s] only probs and the mask are kept. The paper's 5 a s^2 b bytes (Korthikanti et al. 2022, section 4.1) are 2 an
    element for probs, 1 for the mask, and 2 for these.
    """
    *inputs, probs, mask = cache
    q, k, v = (x.swapaxes(1, 2) for x in inputs)
    dcontext, dropped = by_groups(dcontext.swapaxes(1, 2), v), by_groups(masked(probs, mask), v)
    # forward: context = dropped @ v
    ddropped, dv = batched_matmul(dcontext, v.swapaxes(2, 3)), batched_matmul(dropped.swapaxes(2, 3), dcontext)
    # forward: dropped = dropout(probs)
    dprobs = dropout_backward(by_heads(ddropped, q), mask)
    # forward: scores = q @ k^T / sqrt(d); probs = softmax(scores)
    dscores = by_groups(softmax_backward(dprobs, probs) / sqrt(q.shape[-1]), k)
    dq, dk = by_heads(batched_matmul(dscores, k), q), batched_matmul(dscores.swapaxes(2, 3), by_groups(q, k))
    return tuple(x.swapaxes(1, 2) for x in (dq, dk, dv))


def cached_attention(q, k, v):
    """Compute causal attention_core for the last n positions of m: q [b, n, a, d], k, v [b, m, g, d] -> [b, n, a, d].

    Generation needs it for a new token: q is its own, n = 1, while k and v come from the KV cache. Nothing is trained,
    so there is no backward and no cache for one.
    """
    n, m = q.shape[1], k.shape[1]
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    # [b, g, a/g n, d] @ [b, g, d, m] -> [b, a, n, m]
    scores = by_heads(batched_matmul(by_groups(q, k), k.swapaxes(2, 3)), q) / sqrt(q.shape[-1])
    past = np.tril(np.ones_like(scores, shape=(n, m), dtype=bool), m - n)
    probs = softmax(np.where(past, scores, -np.inf))
    # [b, g, a/g n, m] @ [b, g, m, d] -> [b, n, a, d]
    return by_heads(batched_matmul(by_groups(probs, v), v), q).swapaxes(1, 2)


# ---- vocabulary ---------------------------------------------------------------------------------------------------


def lookup(ids, table):
    """Return the table's row for each id: ids [b, s], table [V, h] -> [b, s, h]."""
    return table[ids]


def lookup_backward(dy, ids, dtable):
    """Add dy [b, s, h] to dtable [V, h], in place: a row that was looked up several times gets the sum."""
    np.add.at(dtable, ids.reshape(-1), rows(dy))
    return dtable


class LossCache(NamedTuple):
    """The arrays that the backward of the loss needs."""

    probabilities: Any   # [b, s, V]
    targets: Any         # [b, s]


def cross_entropy(logits, targets):
    """Compute -log softmax(logits) at the target: logits [b, s, V], targets [b, s] -> loss [b, s]."""
    shifted = logits - logits.max(-1, keepdims=True)
    exp = np.exp(shifted)
    total = exp.sum(-1, keepdims=True)
    picked = np.take_along_axis(shifted, targets[..., None], -1)
    return (np.log(total) - picked)[..., 0], LossCache(exp / total, targets)


def cross_entropy_backward(dloss, cache):
    """Return dlogits [b, s, V] = (softmax - one at the target) x dloss for dloss [b, s]."""
    probs, targets = cache
    dlogits = probs * dloss[..., None]
    at = targets[..., None]
    np.put_along_axis(dlogits, at, np.take_along_axis(dlogits, at, -1) - dloss[..., None], -1)
    return dlogits


# ---- the error function, which NumPy does not have ------------------------------------------------------------------

# Rational functions for erf, by W. J. Cody, "Rational Chebyshev Approximations for the Error Function", 1969: in x^2
# where |x| <= 0.46875, in |x| up to 4, in 1/x^2 beyond. Coefficients from the highest power down.
ERF_SMALL = ((1.85777706184603153e-1, 3.16112374387056560e0, 1.13864154151050156e2, 3.77485237685302021e2,
              3.20937758913846947e3),
             (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3))
ERFC_MIDDLE = ((2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594e0, 6.61191906371416295e1,
                2.98635138197400131e2, 8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3,
                1.23033935479799725e3),
               (1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
                3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3))
ERFC_LARGE = ((1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1, 1.25781726111229246e-1,
               1.60837851487422766e-2, 6.58749161529837803e-4),
              (1.0, 2.56852019228982242e0, 1.87295284992346047e0, 5.27905102951428412e-1, 6.05183413124413191e-2,
               2.33520497626869185e-3))


def erf(x):
    """Compute the error function to the rounding of x's dtype."""
    if hasattr(x, "erf"):                                             # exact numbers have one, of no particular values
        return x.erf()
    size = np.minimum(abs(x), 6)                                      # erf(6) is 1 in float64
    middle, square = np.maximum(size, 0.46875), size * size
    inverse = 1 / (middle * middle)
    near = x * ratio(ERF_SMALL, np.minimum(square, 0.46875**2))
    tail = np.where(size <= 4, ratio(ERFC_MIDDLE, middle),
                    (1 / sqrt(pi) - inverse * ratio(ERFC_LARGE, inverse)) / middle)
    return np.where(size <= 0.46875, near, np.sign(x) * (1 - np.exp(-square) * tail))


def ratio(coefficients, x):
    """Divide one polynomial by another, both by Horner's rule."""
    numerator, denominator = (np.full_like(x, first) for first, *_ in coefficients)
    for a, b in zip(coefficients[0][1:], coefficients[1][1:]):
        numerator, denominator = numerator * x + a, denominator * x + b
    return numerator / denominator
