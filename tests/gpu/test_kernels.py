"""Every CUDA kernel is its textbook twin, on a GPU, or by the sources that a GPU gets on a CPU (emulated.py).

In float64 and float32 to rounding; in formats of two bytes within a few roundings of what the textbook makes of the
same halves in float64. Widths fit the 16 bytes that a thread takes at a time, or do not.
"""
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from mpi_impl import kernels
from mpi_impl.kernels import compiled, fused
from mpi_impl.kernels.cuda import flash
from mpi_impl.kernels.cuda.gemm import multiply
from mpi_impl.kernels.fused import core
from mpi_impl.runtime.arrays import dtype_of, is_half
from reference import online_softmax, ops, optimizer, rope
from reference.dropout import Site
from reference.optimizer import OptimizerConfig
from reference.precision import FORMATS
from tests.gpu import device, emulated
from tests.gpu.device import put
from tests.mpi_impl.test_kernels import GELUS, SEEDS, arrays, attention_mask, block_backward_arguments, block_of, sites
from tests.reference.test_ops import lengths
from tests.strategies import close

pytestmark = device.needs_somewhere
FORMS = st.sampled_from(["float64", "float32", "float16", "bfloat16"])
WIDTHS = st.one_of(st.integers(1, 40), st.sampled_from([64, 128, 160, 200]))
FEWER = settings(max_examples=settings().max_examples // 2)


@pytest.fixture(autouse=True)
def gpu():
    with device.gpu():
        yield


def draw(seed, form, *shape):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype_of(form))


def wide(*values):
    """Return these values in float64, in which the textbook computes."""
    return [x.astype(np.float64) if is_half(x) or getattr(x, "dtype", None) == np.float32 else x for x in values]


def same(actual, expected, form, roundings=1.0):
    """Assert that an array is on the device, in this format, and near the textbook's."""
    assert not isinstance(actual, np.ndarray) and actual.dtype == dtype_of(form)
    close(actual.get().astype(np.float64), np.asarray(expected, np.float64), bound_of(form, roundings))


def bound_of(form, roundings=1.0):
    return {"float64": 1e-11, "float32": 2e-5}.get(form) or roundings * FORMATS[form].epsilon / 2 + 1e-4


def stays(form):
    """Return the format of numbers that are not rounded to 16 bits: statistics, gradients of parameters."""
    return "float64" if form == "float64" else "float32"


# ---- products -------------------------------------------------------------------------------------------------------


def laid_out(x, how):
    """Copy x [..., r, c] to the device in this layout: contiguous rows, rows apart, contiguous columns, or neither.

    Where rows are apart, halves begin 2 bytes after a multiple of 4, as any of them may in a flat buffer.
    """
    if how == "apart":
        wider = np.zeros((*x.shape[:-1], 2 * x.shape[-1] + 3), x.dtype)
        wider[..., 1:1 + x.shape[-1]] = x
        return put(wider)[..., 1:1 + x.shape[-1]]
    if how == "columns":
        return put(np.ascontiguousarray(x.swapaxes(-1, -2))).swapaxes(-1, -2)
    if how == "neither":
        wider = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        wider[..., ::2] = x
        return put(wider)[..., ::2]
    return put(x)


LAYOUTS = st.sampled_from(["rows", "apart", "columns", "neither"])


@given(st.none() | st.integers(1, 3), *[st.integers(1, 9)] * 3, LAYOUTS, LAYOUTS, st.booleans(), st.booleans(), FORMS,
       SEEDS)
def test_products(n, r, k, c, how_x, how_y, apart, add, form, seed):
    """However the factors lie; to what is there, or over it; halves in their format or in float32."""
    batch = [] if n is None else [n]
    x, y = draw(seed, form, *batch, r, k), draw(seed + 1, form, *batch, k, c)
    for out_form in {form, stays(form)}:
        out = draw(seed + 2, out_form, *batch, r, c)
        expected = np.matmul(*wide(x, y)) + (wide(out)[0] if add else 0)
        place = laid_out(out, "apart" if apart else "rows")
        assert multiply(laid_out(x, how_x), laid_out(y, how_y), place, add=add) is place
        same(place, expected, out_form, 2)


def test_what_a_product_does_not_write():
    """Between rows that are apart."""
    wider = put(np.full((3, 9), 7.0))
    multiply(put(np.ones((3, 2))), put(np.ones((2, 4))), wider[:, 2:6])
    assert (wider.get() == [[7, 7, 2, 2, 2, 2, 7, 7, 7]] * 3).all()


@given(st.integers(1, 20), st.integers(1, 9), st.integers(1, 9), st.booleans(), FORMS, SEEDS)
def test_linear(n, h, m, biased, form, seed):
    x, w, b = draw(seed, form, 2, n, h), draw(seed, form, h, m), draw(seed, form, m) if biased else None
    same(kernels.linear(*map(put, (x, w, b))), ops.linear(*wide(x, w, b)), form, 3)


@given(st.integers(1, 20), st.integers(1, 9), st.integers(1, 9), FORMS, SEEDS)
def test_weight_gradients(n, h, m, form, seed):
    """Added in float32 where the factors are of halves, to what is there; sums over positions likewise."""
    x, dy, grad = draw(seed, form, 2, n, h), draw(seed, form, 2, n, m), draw(seed, stays(form), h, m)
    expected = grad.astype(np.float64) + np.matmul(*wide(ops.rows(x).T, ops.rows(dy)))
    grad = put(grad)
    kernels.accumulate(grad, put(x), put(dy))
    same(grad, expected, stays(form))
    same(kernels.total(put(dy)), wide(dy)[0].sum(0), stays(form))
    assert kernels.total(put(dy)).shape == (n, m)


# ---- activation -----------------------------------------------------------------------------------------------------


@GELUS
@given(st.integers(1, 9), st.integers(1, 5), WIDTHS, FORMS, SEEDS)
def test_gelu_behind_a_linear_layer(name, n, h, m, form, seed):
    x, w, b, dy = (draw(seed + i, form, *shape) for i, shape in enumerate([(1, n, h), (h, m), (m,), (1, n, m)]))
    y, cache = kernels.activated_linear(*map(put, (x, w, b)), name)
    plain, plain_backward = ops.ACTIVATIONS[name]
    expected, expected_cache = plain(ops.linear(*wide(x, w, b)))
    same(y, expected, form, 5)
    kept = cache if is_half(x) else cache[0]
    same(kept, expected_cache[0], form, 3)
    # from what was kept, which is rounded: the slope is steep only where nothing is large
    _, expected_cache = plain(*wide(kept.get()))
    same(kernels.ACTIVATIONS[name][1](put(dy), cache), plain_backward(*wide(dy), expected_cache), form, 2)


@GELUS
@pytest.mark.parametrize("form", ["float64", "float32", "bfloat16"])
def test_gelu_far_out(name, form):
    x = np.array([[-1e4, -100, 100, 1e4]], dtype_of(form))
    forward, backward = kernels.ACTIVATIONS[name]
    y, cache = forward(put(x))
    assert (y.get() == x * (x > 0)).all()
    assert (backward(put(np.ones_like(x)), cache).get() == (x > 0)).all()


@given(st.integers(1, 9), st.integers(1, 5), WIDTHS, FORMS, SEEDS)
def test_relu_behind_a_linear_layer(n, h, m, form, seed):
    """By CuPy's own functions, exact in every format but for the product."""
    x, w, b, dy = (draw(seed + i, form, *shape) for i, shape in enumerate([(1, n, h), (h, m), (m,), (1, n, m)]))
    y, positive = kernels.activated_linear(*map(put, (x, w, b)), "relu")
    same(y, ops.relu(ops.linear(*wide(x, w, b)))[0], form, 3)
    dx = kernels.ACTIVATIONS["relu"][1](put(dy), positive)
    assert dx.dtype == dy.dtype and (dx.get() == dy * (y.get() > 0)).all()


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), FORMS, SEEDS)
def test_rotate(b, s, a, pairs, form, seed):
    """Each element of halves is rounded once: also the small difference of large products."""
    x = draw(seed, form, b, s, a, 2 * pairs + 1)
    angles = rope.rotary_cos_sin(s, 2 * pairs, x)
    for name in ("rotate", "rotate_backward"):
        found = getattr(kernels, name)(put(x), tuple(map(put, angles)))
        expected = getattr(rope, name)(*wide(x), tuple(wide(*angles)))
        same(found, expected, form)
        assert (abs(found.get() - expected) <= FORMATS[form].epsilon / 2 * abs(expected) + 1e-6 * abs(x).max()).all()


@given(st.integers(1, 20), st.integers(1, 9), st.integers(1, 20), FORMS, SEEDS)
def test_lookup_backward(n, V, h, form, seed):
    """Halves are added in float32, to what the table has."""
    ids, dy = np.random.default_rng(seed).integers(V, size=(2, n)), draw(seed, form, 2, n, h)
    dtable = draw(seed + 1, stays(form), V, h)
    expected = ops.lookup_backward(*wide(dy), ids, *wide(dtable.copy()))
    same(kernels.lookup_backward(put(dy), put(ids), put(dtable)), expected, stays(form))


# ---- rows -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), WIDTHS, st.booleans(), FORMS, SEEDS)
def test_rows_are_added(n, h, single, form, seed):
    y, x = draw(seed, form, 2, n, h), draw(seed + 1, form, *(() if single else (2, n)), h)
    found = put(y)
    assert kernels.add_to(found, put(x)) is found
    same(found, wide(y)[0] + wide(x)[0], form)
    gaps = put(np.repeat(y, 2, -1))[..., ::2]       # where rows are not contiguous
    same(kernels.add_to(gaps, put(x)), wide(y)[0] + wide(x)[0], form)


@given(st.integers(1, 3), *[st.integers(1, 9)] * 3, FORMS, SEEDS)
def test_heads_are_stacked(parts, n, heads, d, form, seed):
    found = [draw(seed + i, form, 2, n, heads, d) for i in range(parts)]
    same(kernels.stack([put(x) for x in found]), np.stack(found, 2), form)
    together = put(np.stack(found, 2))              # what lies so already, on a real GPU, is not copied
    for order in (1, -1):
        views = [together[:, :, i] for i in range(parts)][::order]
        same(kernels.stack(views), np.stack(found[::order], 2), form)
        assert (getattr(views[0], "base", None) is kernels.stack(views)) == (device.REAL and (order > 0 or parts == 1))


# ---- dropout, residual, layer norm ----------------------------------------------------------------------------------


@given(st.integers(1, 9), WIDTHS, FORMS, SEEDS)
def test_layer_norm(n, h, form, seed):
    assume(h > 1)
    x, dy = draw(seed, form, 2, n, h) + dtype_of(form).type(3), draw(seed + 1, form, 2, n, h)
    weight, bias = draw(seed, form, h), draw(seed + 1, form, h)
    y, (normed, inverse_std) = kernels.layer_norm(*map(put, (x, weight, bias)), 1e-3)
    expected, (exact, exact_inverse_std) = ops.layer_norm(*wide(x, weight, bias), 1e-3)
    same(y, expected, form, 2)
    same(normed, exact, form, 2)
    same(inverse_std, exact_inverse_std, stays(form))
    found = kernels.layer_norm_backward(put(dy), put(weight), (normed, inverse_std))
    wanted = ops.layer_norm_backward(*wide(dy, weight), (*wide(normed.get()), exact_inverse_std))
    for actual, expected, its_form in zip(found, wanted, (form, stays(form), stays(form)), strict=True):
        same(actual, expected, its_form, 2)


@given(st.integers(1, 9), WIDTHS, FORMS, SEEDS)
def test_rms_norm(n, h, form, seed):
    """Rows may be as short as a head."""
    x, dy = draw(seed, form, 2, n, h) + dtype_of(form).type(1), draw(seed + 1, form, 2, n, h)
    weight = draw(seed, form, h)
    y, (normed, inverse_rms) = kernels.rms_norm(*map(put, (x, weight)), 1e-3)
    expected, (exact, exact_inverse_rms) = ops.rms_norm(*wide(x, weight), 1e-3)
    same(y, expected, form, 2)
    same(normed, exact, form, 2)
    same(inverse_rms, exact_inverse_rms, stays(form))
    found = kernels.rms_norm_backward(put(dy), put(weight), (normed, inverse_rms))
    wanted = ops.rms_norm_backward(*wide(dy, weight), (*wide(normed.get()), exact_inverse_rms))
    for actual, expected, its_form in zip(found, wanted, (form, stays(form)), strict=True):
        same(actual, expected, its_form, 2)


@given(st.integers(1, 9), WIDTHS, FORMS, SEEDS)
def test_swiglu(n, f, form, seed):
    x, dy = draw(seed, form, 2, n, 2, f), draw(seed + 1, form, 2, n, f)
    (y, cache), (expected, exact) = kernels.swiglu(put(x)), ops.swiglu(*wide(x))
    same(y, expected, form, 2)
    same(kernels.swiglu_backward(put(dy), cache), ops.swiglu_backward(*wide(dy), exact), form, 3)


@pytest.mark.parametrize("form", ["float32", "float16"])
def test_swiglu_far_out(form):
    """A gate far below 0 gives 0, and one far above gives gate * up, although exp overflows."""
    x = np.stack([np.array([[-3e4, -500, 500, 3e4]]), np.full((1, 4), 2)], 1).astype(dtype_of(form))
    y, _ = kernels.swiglu(put(x))
    assert (y.get() == [[0, 0, 1000, 6e4]]).all()


@pytest.mark.parametrize("threads", [32, 64])
@pytest.mark.parametrize("name, tensors", [("layer_norm", 2), ("rms_norm", 1)])
def test_norms_of_more_rows_than_blocks(monkeypatch, name, tensors, threads):
    """Each block takes several rows; a thread one pack of columns, or several, which it does not hold."""
    monkeypatch.setattr(fused, "BLOCKS", 3)
    monkeypatch.setattr(fused, "threads_for", lambda *_: threads)
    (norm, backward), (textbook, textbook_backward) = ((getattr(m, name), getattr(m, f"{name}_backward"))
                                                       for m in (kernels, ops))
    x, weight = draw(1, "float64", 1, 11, 122), draw(2, "float64", 122)
    _, cache = norm(*map(put, (x, *[weight] * tensors)), 1e-3)
    _, expected_cache = textbook(x, *[weight] * tensors, 1e-3)
    for actual, expected in zip(backward(put(x), put(weight), cache), textbook_backward(x, weight, expected_cache),
                                strict=True):
        same(actual, expected, "float64")


@given(arrays(3, 5, 70), st.booleans(), st.booleans(), FORMS, SEEDS)
def test_a_branch_is_added_and_normed(array, dropping, norming, form, seed):
    """The very bits of the textbook's mask, wherever the part begins."""
    shape, site = array
    y, x, weight, bias = (draw(seed + i, form, *s) for i, s in enumerate([shape, shape, shape[-1:], shape[-1:]]))
    site = site if dropping else None
    dropped, expected_mask = ops.dropout(*wide(y), site)
    expected = dropped + wide(x)[0]
    if norming:
        (total, mask), (normed, _) = kernels.add_branch_and_norm(*map(put, (y, x)), site,
                                                                 *map(put, (weight, bias)), 1e-3)
        # of the sum as it was rounded: the norm may magnify what was rounded away
        same(normed, ops.layer_norm(*wide(total.get(), weight, bias), 1e-3)[0], form, 2)
    else:
        total, mask = kernels.add_branch(put(y), put(x), site)
    same(total, expected, form, 2)
    assert (mask is None) if site is None else (mask.keep.get() == expected_mask.keep).all()


@given(arrays(3, 5, 70), FORMS, SEEDS)
def test_dropout(array, form, seed):
    shape, site = array
    x, dy = draw(seed, form, *shape), draw(seed + 1, form, *shape)
    (y, mask), (expected, expected_mask) = kernels.dropout(put(x), site), ops.dropout(*wide(x), site)
    assert (mask.keep.get() == expected_mask.keep).all() and mask.scale == expected_mask.scale
    same(y, expected, form)
    same(kernels.dropout_backward(put(dy), mask), ops.dropout_backward(*wide(dy), expected_mask), form)
    dy[..., ::2] = np.inf                    # what is dropped is 0 whatever it was: an overflow there is none
    found = kernels.dropout_backward(put(dy), mask).get()
    assert (found[~expected_mask.keep] == 0).all()


# ---- attention ------------------------------------------------------------------------------------------------------


@FEWER
@given(st.data(), st.integers(1, 3), st.integers(1, 17), st.integers(1, 3), st.integers(1, 3), st.integers(1, 6),
       st.booleans(), st.booleans(), FORMS, SEEDS)
def test_attention_core(data, b, s, g, each, d, causal, dropping, form, seed):
    """q, k and v as the layer hands them over: views of one array."""
    a = each * g
    site = data.draw(sites(b, a, s, s)) if dropping else None
    qkv, dcontext, real = draw(seed, form, b, s, 3, a, d), draw(seed + 1, form, b, s, a, d), data.draw(lengths(b, s))
    on_device = put(qkv)
    inputs = ops.CoreInputs(*(on_device[:, :, i, :n] for i, n in enumerate((a, g, g))), causal, site, put(real))
    y, cache = kernels.attention_core(*inputs)
    exact = [wide(qkv)[0][:, :, i, :n] for i, n in enumerate((a, g, g))]
    expected, expected_cache = ops.attention_core(*exact, causal, site, real)
    same(y, expected, form, 4)
    if not is_half(qkv):
        same(cache.probs, expected_cache.probs, form)
        if dropping:
            assert (cache.mask.keep.get() == expected_cache.mask.keep & attention_mask(b, s, causal, real)).all()
    wanted = ops.attention_core_backward(*wide(dcontext), expected_cache)
    found = kernels.attention_core_backward(put(dcontext), cache)
    for actual, expected in zip(found, wanted, strict=True):
        same(actual, expected, form, 16)
    if real is not None:
        assert all((gradient.get()[np.arange(s) >= real[:, None]] == 0).all() for gradient in found[1:])
    assert type(kernels.attention_core_again(inputs)) is type(cache)


@FEWER
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.integers(1, 3),
       st.integers(1, 6), FORMS, SEEDS)
def test_cached_attention(b, n, before, g, each, d, form, seed):
    """The keys and values lie in a buffer with room for more."""
    m = n + before - 1
    q, both = draw(seed, form, b, n, each * g, d), draw(seed + 1, form, 2, b, m + 3, g, d)
    k, v = (put(both)[i, :, :m] for i in range(2))
    same(kernels.cached_attention(put(q), k, v), ops.cached_attention(*wide(q, *both[:, :, :m])), form, 4)


@FEWER
@given(st.data(), *[st.integers(1, n) for n in (3, 9, 9, 3, 3, 5)], FORMS, SEEDS)
def test_block_attention(data, b, n, m, g, each, d, form, seed):
    """With samples of which no key is real. Results are numbers, but products of halves have rounded factors."""
    def drawn(name, *shape):
        x = draw(seed + sum(name.encode()), form if name in ("q", "k", "v", "dy") else stays(form), *shape)
        return abs(x) + 3 if name in ("highest", "total") else x

    block, dy = block_of(data, drawn, b, n, m, g, each, d)
    arguments = block_backward_arguments(block, dy, drawn)
    for name, its_arguments in (("block_attention", block), ("block_attention_backward", arguments)):
        on_device = [put(x) if isinstance(x, np.ndarray) else x for x in its_arguments]
        for actual, expected in zip(getattr(kernels, name)(*on_device),
                                    getattr(online_softmax, name)(*wide(*its_arguments)), strict=True):
            assert actual.dtype == stays(form)
            seen = np.isfinite(expected)
            assert (actual.get() == expected)[~seen].all()
            close(np.where(seen, actual.get(), 0).astype(np.float64), np.where(seen, expected, 0), bound_of(form, 16))


@pytest.mark.skipif(device.REAL, reason="counts the emulation's calls")
def test_a_block_is_a_few_calls_of_cublas():
    """Whatever the numbers of samples and heads: on a GPU, to launch a product for each takes longer than to compute
    them.
    """
    q, k = put(draw(1, "bfloat16", 4, 5, 6, 8)), put(draw(2, "bfloat16", 4, 5, 3, 8))
    along = put(draw(3, "float32", 4, 6, 5, 1))
    before = emulated.FakeCublas.calls
    kernels.block_attention(q, k, k, True)
    assert emulated.FakeCublas.calls == before + 2
    kernels.block_attention_backward(q, along, along, along, q, k, k, True)
    assert emulated.FakeCublas.calls == before + 7


def test_of_halves_no_probabilities_are_kept(monkeypatch):
    monkeypatch.setattr(flash, "is_available", lambda: False)
    q = put(draw(1, "bfloat16", 2, 3, 4, 8))
    _, cache = kernels.attention_core(q, q, q, True, None)
    assert isinstance(cache, ops.CoreInputs)


# ---- the loss -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), WIDTHS, FORMS, st.booleans(), SEEDS)
def test_cross_entropy(n, V, form, widen, seed):
    """Of halves the logits are kept, and statistics are in float32 or, on request, halves, too."""
    stats = stays(form) if widen else form
    logits, dloss = 3 * draw(seed, form, 2, n, V), draw(seed, stats, 2, n)
    random = np.random.default_rng(seed)
    ids, held = random.integers(V, size=(2, n)), random.random((2, n)) < 0.7
    same(kernels.largest(put(logits)), logits.max(-1), form)
    highest = logits.max(-1).astype(dtype_of(stats))
    found, exp = put(logits), np.exp(np.subtract(*wide(logits, highest[..., None])))
    kept, total = kernels.exp_and_sum(found, put(highest))
    assert kept is found
    same(kept, logits if is_half(logits) else exp, form)
    same(total, exp.sum(-1), stats, 2)
    probs = exp / wide(total.get())[0][..., None]
    expected = probs * wide(dloss)[0][..., None]
    np.add.at(expected, (*np.indices(ids.shape), ids), -wide(dloss)[0] * held)
    actual = kernels.cross_entropy_backward(kept, put(highest), total, *map(put, (dloss, ids, held)))
    assert actual is found
    same(actual, expected, form, 2)


# ---- the optimizer --------------------------------------------------------------------------------------------------


@FEWER
@given(st.integers(1, 500), st.lists(st.integers(1, 200), max_size=5), st.sampled_from([1.0, 0.3]),
       st.sampled_from(["float64", "float32", "float16", "bfloat16"]), st.integers(1, 5), SEEDS)
def test_adam(start, lengths, factor, form, step, seed):
    """On a part of a longer buffer, in runs with weight decay and without; halves get master weights in float32."""
    ends = np.cumsum([0, 7, *lengths]).tolist()
    runs = [(slice(one, other), i % 2 == 0) for i, (one, other) in enumerate(zip(ends, ends[1:]))]
    main, size, config = stays(form), start + ends[-1] + 3, OptimizerConfig(1e-2, 10, weight_decay=0.1)
    param, m, v, grad = (draw(seed + i, main, size) for i in range(4))
    v, rate, place = abs(v), 0.01, slice(start, start + ends[-1])
    expected = [x.astype(np.float64) for x in (param, m, v, factor * grad)]
    for part, decays in runs:
        at = slice(start + part.start, start + part.stop)
        optimizer.adam_update(expected[0][at], expected[3][at], expected[1][at], expected[2][at], step, rate, decays,
                              config)
    buffers, model = [put(x) for x in (param, m, v, grad)], None
    if form != main:
        model = put(np.zeros(size, dtype_of(form)))
    views = [x[place] for x in buffers]
    kernels.adam_update(views[:3], views[3], model if model is None else model[place], runs, factor, step, rate, config)
    expected[3] = np.where(np.isin(np.arange(size), np.arange(size)[place]), expected[3], grad)
    for actual, wanted in zip(buffers, expected, strict=True):
        same(actual, wanted, main)
    if model is not None:
        assert (model.get()[place] == buffers[0].get()[place].astype(model.dtype)).all()
        outside = np.delete(model.get(), np.arange(size)[place])
        assert (outside == 0).all()


@given(st.integers(1, 2000), FORMS, SEEDS)
def test_sum_of_squares(n, form, seed):
    """In float64, whatever the format."""
    x = draw(seed, form, n)
    found = kernels.sum_of_squares(put(x)).get()
    close(found, (x.astype(np.float64)**2).sum(), 1e-13)


# ---- the emulation --------------------------------------------------------------------------------------------------


def test_every_kernel_is_known_to_its_callers():
    """No source that nobody starts, no call of what is in no source."""
    called = set(kernel_names(fused.__file__)) | set(kernel_names(compiled.__file__))
    defined = {f"{path.stem}.{name}" for path in core.sources() for name, _ in core.KERNEL.findall(path.read_text())}
    assert called == defined


def kernel_names(path):
    return re.findall(r'(?:launch|call)\("([\w.]+)"', Path(path).read_text())


def test_bits_over_a_limit_of_32():
    """Rows whose indices pass a multiple of 2^32 have the textbook's bits, one by one."""
    for before, m in product(range(4), (8, 5)):
        site = Site((123, 456), 0.5, (0, 1, m), (0, 0, 0))
        first = 2**32 - before
        site = Site((123, 456), 0.5, (0, first, 1), (1, 0, 0))
        mask = kernels.dropout(put(np.ones((1, 1, m))), site)[1]
        bits = ops.counter_rng.bits(site.key, np.arange(first, first + m, dtype=np.uint64))
        assert (mask.keep.get() == (bits >= site.threshold)).all()
