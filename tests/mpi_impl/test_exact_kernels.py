"""NumPy's fast kernels without rounding: on numbers of a prime field they are the textbook's formulas.

Softmax in tiles, which never sees a whole row, needs one law: exp(a - b) exp(b - c) = exp(a - c).

The kernels multiply constants with one another that the textbook multiplies with arrays. So that these products are
not rounded, sizes are powers of two here, and pi is 8. Compiled kernels and those for GPUs take floats only, and those
for 16 bits round by definition: `test_kernels.py` and `tests/gpu/` compare them within a tolerance.
"""
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl import kernels
from mpi_impl.kernels import blockwise, cpu, partial_attention, plain
from reference import online_softmax, ops
from reference.dropout import Site
from reference.exact import array, field
from reference.exact.array import ExactArray, random_array
from reference.exact.field import MINUS_INFINITY
from reference.layers.cross_entropy import softmax_minus_target
from tests.mpi_impl.test_kernels import attention_mask, block_backward_arguments, block_of
from tests.planted import planted
from tests.reference.test_ops import lengths
from tests.strategies import close

SMALL, HEAD_SIZES, WIDTHS = st.integers(1, 3), st.sampled_from([1, 4]), st.sampled_from([2, 4, 8])
SITE = Site((3, 4), 0.1, (0, 5, 7, 8), (2, 0, 0, 0))
GROUP = st.sampled_from([1, 2, 4])      # heads of queries for each of keys and values
SITES = st.sampled_from([None, SITE, Site((1, 2), 0.5, (0, 9, 9, 9), (0, 1, 2, 3))])
examples = settings(max_examples=settings().max_examples // 2)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Shrink the tiles, so that small arrays have several."""
    monkeypatch.setattr(cpu, "TILE", 8)
    monkeypatch.setattr(partial_attention, "ROOM", 8)
    monkeypatch.setattr(blockwise, "ROWS", 2)
    monkeypatch.setattr(blockwise, "FUTURE", blockwise.FUTURE[:2, :2])


def same(actual, expected):
    """Assert that all arrays are the same formulas."""
    for one, other in zip(actual, expected, strict=True):
        assert isinstance(one, ExactArray)
        close(one, other)


def test_the_table_offers_the_textbook():
    """Exact numbers are those of a library for which nothing is fast."""
    assert kernels.column(random_array(2)) == kernels.TEXTBOOK


# ---- each kernel ----------------------------------------------------------------------------------------------------


@examples
@given(SMALL, SMALL, SMALL, st.booleans())
def test_linear(n, h, m, biased):
    x, w, b = random_array((2, n, h), "x"), random_array((h, m), "w"), random_array(m, "b") if biased else None
    same([cpu.linear(x, w, b)], [ops.linear(x, w, b)])


@examples
@given(SMALL, WIDTHS)
def test_gelu(n, h):
    """With any pi that makes sqrt(2 / pi) a power of two, so that the kernel's constants are not rounded."""
    x, dy = random_array((2, n, h), "x"), random_array((2, n, h), "dy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "pi", 8.0)
        patch.setattr(cpu, "pi", 8.0)
        (y, cache), (expected, expected_cache) = cpu.gelu(x), ops.gelu(x)
        same([y, cpu.gelu_backward(dy, cache)], [expected, ops.gelu_backward(dy, expected_cache)])


@examples
@given(SMALL, WIDTHS)
def test_layer_norm(n, h):
    x, dy = random_array((2, n, h), "x"), random_array((2, n, h), "dy")
    weight, bias = random_array(h, "weight"), random_array(h, "bias")
    (y, cache), (expected, expected_cache) = (m.layer_norm(x, weight, bias, 1e-5) for m in (cpu, ops))
    same([y, *cpu.layer_norm_backward(dy, weight, cache)],
         [expected, *ops.layer_norm_backward(dy, weight, expected_cache)])


@examples
@given(SMALL, WIDTHS)
def test_rms_norm(n, h):
    x, dy, weight = random_array((2, n, h), "x"), random_array((2, n, h), "dy"), random_array(h, "weight")
    (y, cache), (expected, expected_cache) = (m.rms_norm(x, weight, 1e-5) for m in (cpu, ops))
    same([y, *cpu.rms_norm_backward(dy, weight, cache)], [expected, *ops.rms_norm_backward(dy, weight, expected_cache)])


@examples
@given(SMALL, WIDTHS)
def test_swiglu(n, f):
    x, dy = random_array((2, n, 2, f), "x"), random_array((2, n, f), "dy")
    (y, cache), (expected, expected_cache) = cpu.swiglu(x), ops.swiglu(x)
    same([y, cpu.swiglu_backward(dy, cache)], [expected, ops.swiglu_backward(dy, expected_cache)])


@examples
@given(SMALL, SMALL, WIDTHS, SITES)
def test_dropout(b, s, h, site):
    x, dy = random_array((b, s, 2, h), "x"), random_array((b, s, 2, h), "dy")
    (y, mask), (expected, expected_mask) = (m.dropout(x, site) for m in (cpu, ops))
    same([y, cpu.dropout_backward(dy, mask)], [expected, ops.dropout_backward(dy, expected_mask)])


@examples
@given(st.data(), SMALL, st.integers(1, 7), SMALL, GROUP, HEAD_SIZES, st.booleans(), SITES)
def test_attention_in_blocks_of_queries(data, b, s, g, each, d, causal, site):
    """With padding and dropout, which the kernel scales last."""
    q, k, v = (random_array((b, s, 3, each * g, d), "qkv")[:, :, i, :heads]
               for i, heads in enumerate((each * g, g, g)))
    dy, real = random_array((b, s, each * g, d), "dy"), data.draw(lengths(b, s))
    (y, cache), (expected, expected_cache) = (m.attention_core(q, k, v, causal, site, real)
                                                   for m in (blockwise, ops))
    same([y, cache.probs, *blockwise.attention_core_backward(dy, cache)],
         [expected, expected_cache.probs, *ops.attention_core_backward(dy, expected_cache)])
    assert (cache.probs * ~attention_mask(b, s, causal, real) == 0).all()


@examples
@given(SMALL, st.integers(1, 5), SMALL, SMALL, GROUP, HEAD_SIZES)
def test_cached_attention(b, n, before, g, each, d):
    m = n + before - 1
    q, (k, v) = random_array((b, n, each * g, d), "q"), random_array((2, b, m + 3, g, d), "kv")[:, :, :m]
    same([blockwise.cached_attention(q, k, v)], [ops.cached_attention(q, k, v)])


@examples
@given(st.data(), SMALL, st.integers(1, 5), st.integers(1, 5), SMALL, SMALL, HEAD_SIZES)
def test_block_attention(data, b, n, m, g, each, d):
    """Forward; and backward with any statistics of the other blocks."""
    def drawn(name, *shape):
        return random_array(shape, name)

    block, dy = block_of(data, drawn, b, n, m, g, each, d)
    same(partial_attention.block_attention(*block), online_softmax.block_attention(*block))
    arguments = block_backward_arguments(block, dy, drawn)
    same(partial_attention.block_attention_backward(*arguments), online_softmax.block_attention_backward(*arguments))


@examples
@given(SMALL, SMALL, SMALL)
def test_lookup_backward(s, V, h):
    ids, dy = np.random.default_rng(s).integers(V, size=(2, s)), random_array((2, s, h), "dy")
    tables = [random_array((V, h), "table") for _ in range(2)]
    same([cpu.lookup_backward(dy, ids, tables[0])], [ops.lookup_backward(dy, ids, tables[1])])


@examples
@given(SMALL, st.integers(1, 9))
def test_cross_entropy(s, V):
    """Both functions of exp's sums, and the gradient that is written over the probabilities."""
    logits, dloss = random_array((2, s, V), "logits"), random_array((2, s), "dloss")
    ids, held = np.random.default_rng(s).integers(V, size=(2, s)), np.arange(2 * s).reshape(2, s) % 3 > 0
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    for module in (cpu, plain):
        same(module.exp_and_sum(logits.copy(), logits.max(-1)), [exp, exp.sum(-1)])
    expected = softmax_minus_target(dloss, ops.softmax(logits), ids, held)
    same([plain.cross_entropy_backward(exp, logits.max(-1), exp.sum(-1), dloss, ids, held)], [expected])


@examples
@given(SMALL, SMALL, SMALL)
def test_gradients_of_a_linear_layer(s, h, m):
    x, dy, grad = random_array((2, s, h), "x"), random_array((2, s, m), "dy"), random_array((h, m), "grad")
    _, dw, db = ops.linear_backward(dy, x, random_array((h, m), "w"))
    expected = grad + dw
    plain.accumulate(grad, x, dy)
    same([grad, plain.total(ops.rows(dy))], [expected, db])


# ---- online softmax -------------------------------------------------------------------------------------------------


def online_attention(q, k, v, tile, correction=np.exp):
    """Compute softmax(q k^T) v of q [s, d], k, v [n, d] as FlashAttention does, with `tile` keys at a time.

    Only the maximum and the sum of each row so far are known (Milakov and Gimelshein 2018; Dao et al. 2022).
    """
    highest, total, context = np.full_like(q, -np.inf, shape=(len(q), 1)), 0.0, np.zeros_like(q)
    for start in range(0, len(k), tile):
        scores = q @ k[start:start + tile].T                                  # [s, d] @ [d, tile] -> [s, tile]
        before, highest = highest, np.maximum(highest, scores.max(-1, keepdims=True))
        exp, factor = np.exp(scores - highest), correction(before - highest)
        total = total * factor + exp.sum(-1, keepdims=True)
        context = context * factor + exp @ v[start:start + tile]
    return context / total


@examples
@given(st.integers(1, 4), st.integers(1, 9), SMALL, st.integers(1, 9))
def test_online_softmax_is_softmax(s, n, d, tile):
    """At any depth: corrections of corrections are one."""
    q, k, v = random_array((s, d), "q"), random_array((n, d), "k"), random_array((n, d), "v")
    close(online_attention(q, k, v, tile), ops.softmax(q @ k.T) @ v)


@examples
@given(st.permutations(range(6)), st.integers(1, 3))
def test_parts_of_a_softmax_can_be_joined_in_any_order(order, d):
    """As in ring attention: (maximum, sum, context) of each rank's keys, two at a time."""
    scores, v = random_array((2, 6, 3), "scores"), random_array((6, 3, d), "v")

    def part(i):
        highest = scores[:, i].max(-1, keepdims=True)
        exp = np.exp(scores[:, i] - highest)
        return highest, exp.sum(-1, keepdims=True), exp @ v[i]

    def joined(one, other):
        highest = np.maximum(one[0], other[0])
        factors = [np.exp(x[0] - highest) for x in (one, other)]
        return highest, *(one[i] * factors[0] + other[i] * factors[1] for i in (1, 2))

    found = part(order[0])
    for i in order[1:]:
        found = joined(found, part(i))
    close(found[2] / found[1], ops.softmax(scores.reshape(2, 18)) @ v.reshape(18, d))


def test_online_softmax_needs_its_correction():
    """One where it is needed: all factors 1, but for the first, which is exp(-infinity)."""
    q, k, v = (random_array((6, 2), name) for name in "qkv")
    with pytest.raises(AssertionError, match="other formulas"):
        close(online_attention(q, k, v, 1, np.isfinite), ops.softmax(q @ k.T) @ v)


def test_online_softmax_needs_the_law_of_exp(monkeypatch):
    """With any function in the place of exp it would be another formula, though softmax would not."""
    q, k, v = (random_array((6, 2), name) for name in "qkv")
    monkeypatch.setattr(array, "exp", array.elementwise(
        lambda x: 0 if x is MINUS_INFINITY else field.random_function("exp", x)))
    with pytest.raises(AssertionError, match="other formulas"):
        close(online_attention(q, k, v, 2), ops.softmax(q @ k.T) @ v)


# ---- bugs -----------------------------------------------------------------------------------------------------------

NO_PADDING = SimpleNamespace(draw=lambda lengths: None)
ATTENTION = (test_attention_in_blocks_of_queries, (NO_PADDING, 1, 5, 1, 1, 4, True, SITE))
GROUPS = (test_attention_in_blocks_of_queries, (NO_PADDING, 1, 3, 2, 2, 4, True, SITE))
BUGS = {
    "attention's scale": (*ATTENTION, "q[at] * scale, k[seen]", "q[at] * scale * (1 + 2**-50), k[seen]"),
    "a group's other heads": (*GROUPS, "x.sum(2, keepdims=True)", "x[:, :, :1]"),
    "heads dealt out to groups in turn": (*GROUPS, "groups.stop - groups.start, -1, *x.shape[2:])",
                                          "-1, groups.stop - groups.start, *x.shape[2:]).swapaxes(1, 2)"),
    "a row's sum": (*ATTENTION, "p *= 1 / (p @ ones[:keys])", "p *= 1 / (p @ ones[:keys] + 2**-50)"),
    "a hidden block": (*ATTENTION, "keys = end if causal else s", "keys = start + 1 if causal else s"),
    "softmax's gradient": (*ATTENTION, "dp -= dp.sum(-1, keepdims=True) * p",
                           "dp -= dp.sum(-1, keepdims=True) * p * (1 + 2**-50)"),
    "dropout's gradient": (*ATTENTION, "dropped, dy = p * keep, dy *", "dropped, dy = p, dy *"),
    "gelu": (test_gelu, (1, 4), "np.multiply(x_, sigmoid_, out=y_)", "np.multiply(x_, sigmoid_ + 2**-50, out=y_)"),
    "gelu's gradient": (test_gelu, (1, 4), "slope *= 6 * 0.044715", "slope *= 6 * 0.044715 * (1 + 2**-50)"),
    "epsilon outside the root": (test_layer_norm, (1, 4), "mean + x.dtype.type(epsilon)), out=inverse_std_",
                                 "mean) + x.dtype.type(epsilon), out=inverse_std_"),
    "a norm's gradient": (test_layer_norm, (1, 4), "scratch += dy_ @ weight_mean", "scratch += dy_ @ -weight_mean"),
    "an RMS norm with a mean": (test_rms_norm, (1, 4), "np.multiply(x_, x_, out=y_)\n        np.divide(1, np.sqrt(",
                                "np.multiply(x_, x_ - x_ @ mean, out=y_)\n        np.divide(1, np.sqrt("),
    "an RMS norm's gradient": (test_rms_norm, (1, 4), "np.multiply(normed_, scratch @ weight_mean, out=scratch)",
                               "np.multiply(normed_, dy_ @ weight_mean, out=scratch)"),
    "gate and up exchanged": (test_swiglu, (1, 4), "np.multiply(gate, sigmoid_, out=y_)\n            y_ *= up",
                              "np.multiply(up, sigmoid_, out=y_)\n            y_ *= up"),
    "the gate's gradient": (test_swiglu, (1, 4), "dgate *= dup\n", "dgate *= up\n"),
    "dropout's scale": (test_dropout, (1, 1, 4, SITE),
                        "np.multiply(dy_, mask.scale, out=dx_)", "np.multiply(dy_, mask.scale + 2**-50, out=dx_)"),
    "a cached token's scale": (test_cached_attention, (1, 3, 2, 1, 1, 4), "(q[:, :, :, block] * scale) @",
                               "(q[:, :, :, block] * scale * (1 + 2**-50)) @"),
    "the sum of exp": (test_cross_entropy, (1, 5), "logits_ -= highest_\n", "logits_ -= highest_ * (1 + 2**-50)\n"),
}


@pytest.mark.parametrize("name", BUGS)
def test_bugs_are_other_formulas(name):
    test, sizes, right, wrong = BUGS[name]
    test.hypothesis.inner_test(*sizes)
    module = "blockwise" if test in (test_attention_in_blocks_of_queries, test_cached_attention) else "cpu"
    with planted(f"mpi_impl.kernels.{module}", right, wrong), pytest.raises(AssertionError, match="other formulas"):
        test.hypothesis.inner_test(*sizes)
