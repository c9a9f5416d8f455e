"""Each operation against its definition, and each backward against central differences of its forward."""
import math

import numpy as np
from hypothesis import given, strategies as st

from reference import ops
from reference.config import ModelConfig
from reference.layers import rope
from reference.params import HOST
from reference.random.dropout import Dropout
from tests.cases import close

SEEDS = st.integers(0, 2**32 - 1)
SMALL, TINY = st.integers(1, 5), st.integers(1, 3)
RATES = [0.1, 0.5, 0.9]


def draw(seed, *shape):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def lengths(b, s):
    """Draw the lengths of b samples of s positions: int64 [b], each 1, s or anything between; or None."""
    each = st.one_of(st.just(1), st.just(s), st.integers(1, s))
    return st.none() | st.lists(each, min_size=b, max_size=b).map(np.array)


def central_differences(function, x, dy, step=1e-5):
    """Measure the gradient of <function(x), dy> by x, by elements: the error is of order step^2 and rounding / step."""
    dx = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        saved = x[i]
        x[i] = saved + step
        above = (function(x) * dy).sum()
        x[i] = saved - step
        below = (function(x) * dy).sum()
        x[i] = saved
        dx[i] = (above - below) / (2 * step)
    return dx


def gradient_is_right(gradient, function, x, dy):
    close(gradient, central_differences(function, x, dy), 1e-6)


def with_gradients(seed, forward, backward, *args):
    """Return y of forward(*args), which also returns a cache. Check backward(dy, cache), which returns the gradients by
    the first of these arguments, or by all of them, for a random dy.
    """
    y, cache = forward(*args)
    dy = draw(seed + 9, *y.shape)
    gradients = backward(dy, cache)
    for gradient, x in zip(gradients if isinstance(gradients, tuple) else [gradients], args):
        gradient_is_right(gradient, lambda _: forward(*args)[0], x, dy)
    return y


# ---- activations ------------------------------------------------------------------------------------------------


@given(st.sampled_from(sorted(ops.ACTIVATIONS)), SMALL, SEEDS)
def test_activations_backward(name, n, seed):
    x = draw(seed, n, 3) * 2
    x[np.abs(x) < 1e-3] += 0.1                          # ReLU has no derivative at 0
    with_gradients(seed, *ops.ACTIVATIONS[name], x)


@given(SMALL, SMALL, SEEDS)
def test_swiglu(n, f, seed):
    x = draw(seed, n, 2, f) * 2
    close(with_gradients(seed, ops.swiglu, ops.swiglu_backward, x), x[:, 0] / (1 + np.exp(-x[:, 0])) * x[:, 1])


@given(st.floats(-30, 30) | st.sampled_from([0.0, -0.0, 0.46875, -0.46875, 4.0, 5.9, 6.1, 1e3, -1e300, 1e-300]))
def test_erf_is_the_error_function(x):
    """It equals the C library's to the last bits of float64, at its seams too."""
    with np.errstate(all="raise", under="ignore"):
        assert abs(ops.erf(np.array([x]))[0] - math.erf(x)) <= 4e-16


def test_gelu_is_x_phi_of_x():
    """The exact one by the definition; the tanh form within the 5e-4 that it promises."""
    x = np.linspace(-6, 6, 1001)
    phi = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x])
    close(ops.gelu_exact(x)[0], x * phi, 1e-15)
    assert 1e-5 < np.abs(ops.gelu(x)[0] - x * phi).max() < 5e-4


# ---- linear, normalisation --------------------------------------------------------------------------------------


@given(SMALL, SMALL, SMALL, SMALL, SEEDS)
def test_linear(b, s, n, m, seed):
    x, w, bias = draw(seed, b, s, n), draw(seed, n, m), draw(seed, m)
    y = with_gradients(seed, lambda *args: (ops.linear(*args), args), lambda dy, args: ops.linear_backward(
        dy, *args[:2]), x, w, bias)
    close(y, x @ w + bias)
    close(ops.batched_matmul(x, x.swapaxes(1, 2)), x @ x.swapaxes(1, 2))


@given(SMALL, SMALL, st.integers(2, 6), SEEDS)
def test_layer_norm(b, s, h, seed):
    x, weight, bias = draw(seed, b, s, h), draw(seed, h), draw(seed + 1, h)
    y = with_gradients(seed, lambda *args: ops.layer_norm(*args, 1e-2),
                       lambda dy, cache: ops.layer_norm_backward(dy, weight, cache), x, weight, bias)
    close(y, (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-2) * weight + bias)


@given(SMALL, SMALL, st.integers(1, 6), SEEDS)
def test_rms_norm(b, s, h, seed):
    x, weight = draw(seed, b, s, h), draw(seed, h)
    y = with_gradients(seed, lambda *args: ops.rms_norm(*args, 1e-2),
                       lambda dy, cache: ops.rms_norm_backward(dy, weight, cache), x, weight)
    close(y, x / np.sqrt((x**2).sum(-1, keepdims=True) / h + 1e-2) * weight)


@given(SMALL, SMALL, SEEDS)
def test_softmax(n, m, seed):
    """It survives large numbers."""
    x = draw(seed, n, m)
    y = with_gradients(seed, lambda x: (ops.softmax(x),) * 2, ops.softmax_backward, x)
    close(y, np.exp(x) / np.exp(x).sum(-1, keepdims=True))
    close(ops.softmax(x + 1e4), y, 1e-10)


# ---- attention --------------------------------------------------------------------------------------------------


def attention_by_definition(q, k, v, causal, real=None, factors=None):
    """Compute attention for one head, one query at a time; `factors` [b, a, s, s] multiply the probabilities."""
    out = np.zeros_like(q)
    for i, n, head in np.ndindex(q.shape[:3]):
        seen = min(n + 1 if causal else q.shape[1], q.shape[1] if real is None else real[i])
        its = head // (q.shape[2] // k.shape[2])                         # the head of keys and values of its group
        scores = k[i, :seen, its] @ q[i, n, head] / math.sqrt(q.shape[3])
        probs = ops.softmax(scores) * (1 if factors is None else factors[i, head, n, :seen])
        out[i, n, head] = probs @ v[i, :seen, its]
    return out


def attention_dropout(rate, b, s, a, seed):
    """Return the site of a few samples and heads of a larger model, and the factors that its mask stands for."""
    model = ModelConfig(1, 2 * (a + 1), a + 1, 3, s + 1, attention_dropout=rate)
    site = Dropout(model, seed, step=1, sample=10, layer=0).attention(first_head=1)
    return site, None if site is None else ops.draw_mask(site, (b, a, s, s), HOST).keep * site.scale


@given(st.data(), TINY, TINY, TINY, TINY, SMALL, st.booleans(), st.sampled_from([0, 0, *RATES]), SEEDS)
def test_attention(data, b, s, g, each, d, causal, rate, seed):
    """Scores are divided by the root of the *head's* size, not of the model's, a d; and what is real is seen.

    Probabilities are dropped after the softmax, so that a query's need not sum to 1, and are kept before. The content
    of padding changes no bit, and its keys and values have a gradient of exactly 0.
    """
    a, real = each * g, data.draw(lengths(b, s))
    q, k, v = (draw(seed + i, b, s, heads, d) for i, heads in enumerate((a, g, g)))
    site, factors = attention_dropout(rate, b, s, a, seed)

    def forward(*qkv):
        return ops.attention_core(*qkv, causal, site, real)

    y = with_gradients(seed, forward, ops.attention_core_backward, q, k, v)
    close(y, attention_by_definition(q, k, v, causal, real, factors))
    _, cache = forward(q, k, v)
    close(cache.probs.sum(-1), np.ones((b, a, s)))
    if real is not None:
        padding = np.arange(s) >= real[:, None]                          # [b, s]
        _, dk, dv = ops.attention_core_backward(draw(seed + 4, b, s, a, d), cache)
        assert (dk[padding] == 0).all() and (dv[padding] == 0).all()
        k[padding], v[padding] = 1e6, -1e6
        np.testing.assert_array_equal(forward(q, k, v)[0], y)


def test_rope_turns_by_the_angles_of_the_paper():
    """Su et al. 2021, equation 15: pair i of a head of 4, which is i and i + 2, turns by n / 10000^(i/2) at n."""
    x = np.zeros((1, 4, 1, 4))
    x[..., 0], x[..., 1] = 1, 1
    y = rope.rotate(x, rope.rotary_cos_sin(4, 4, x))
    for n in range(4):
        close(y[0, n, 0], np.array([math.cos(n), math.cos(n / 100), math.sin(n), math.sin(n / 100)]))


@given(SMALL, st.integers(1, 2), st.integers(0, 2), SEEDS)
def test_rope_is_a_rotation_of_the_first_dimensions(s, half, rest, seed):
    """Lengths stay, position 0 stays, the rest of the head stays, and the backward undoes the forward."""
    x = draw(seed, 2, s, 3, 2 * half + rest)
    angles = rope.rotary_cos_sin(s, 2 * half, x)
    y = rope.rotate(x, angles)
    close((y**2).sum(-1), (x**2).sum(-1))
    close(y[:, 0], x[:, 0])
    assert (y[..., 2 * half:] == x[..., 2 * half:]).all()
    close(rope.rotate_backward(y, angles), x)


# ---- vocabulary -------------------------------------------------------------------------------------------------


@given(SMALL, SMALL, SMALL, SEEDS)
def test_lookup(b, s, n, seed):
    """The lookup is a product with one-hot rows, and so is its gradient: repeated words add up."""
    ids, table, dy = np.random.default_rng(seed).integers(0, n, (b, s)), draw(seed, n, 3), draw(seed, b, s, 3)
    one_hot = np.eye(n)[ids]
    close(ops.lookup(ids, table), one_hot @ table)
    close(ops.lookup_backward(dy, ids, np.ones_like(table)), 1 + ops.rows(one_hot).T @ ops.rows(dy))


@given(SMALL, SMALL, SMALL, SEEDS)
def test_cross_entropy(b, s, n, seed):
    logits = draw(seed, b, s, n)
    targets = np.random.default_rng(seed).integers(0, n, (b, s))
    loss = with_gradients(seed, lambda logits: ops.cross_entropy(logits, targets), ops.cross_entropy_backward, logits)
    close(loss, -np.log(np.take_along_axis(ops.softmax(logits), targets[..., None], -1))[..., 0])
