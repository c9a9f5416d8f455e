"""Half precision is true to its format: read halves, compute in float32, round once; and nothing in between is wider.

Bounds are in units of the format's epsilon, by half of which a number that is rounded may be off.
"""
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl import kernels
from mpi_impl.kernels import blockwise, cpu
from mpi_impl.layers.block import block_backward, block_forward
from mpi_impl.layers.core_attention import core_again
from mpi_impl.layers.cross_entropy import cross_entropy_forward
from mpi_impl.layers.embedding import embedding_backward, embedding_forward, logits_backward, logits_forward
from mpi_impl.runtime.arrays import dtype_of, is_half, narrowed, widened
from reference import ops, rope
from reference.config import ModelConfig
from reference.dropout import Site
from reference.layer_context import LayerContext
from reference.layers.block import block_tensors
from reference.layers.embedding import embedding_tensors
from reference.layers.grouped_attention import GroupedAttentionCache
from reference.params import leaves, tree_map
from reference.precision import FORMATS
from tests import rank_theorems as theorems
from tests.allocated import most_bytes
from tests.mpi_impl.test_kernels import (SEEDS, arrays, block_backward_arguments, block_of, sites,  # noqa: F401
                                         small_tiles)
from tests.reference.test_ops import lengths
from tests.strategies import Case, cases, close

NAMES = st.sampled_from(["float16", "bfloat16"])
FEWER = settings(max_examples=25)


def halves(seed, name, *shape):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype_of(name))


def in_float64(value):
    """Return an array, or each of a tuple's, in float64."""
    if type(value) is tuple:
        return tuple(map(in_float64, value))
    return value.astype(np.float64) if is_half(value) else value


def assert_rounds_once(name, result, float32):
    """Assert that a result is the float32 kernels' result, rounded once; return it."""
    assert result.dtype == dtype_of(name) and float32.dtype == np.float32
    np.testing.assert_array_equal(result, float32.astype(result.dtype))
    return result


def near(name, actual, float64, roundings=1.0):
    """Assert that the error is at most this many roundings of the largest element, epsilon/2 each, plus the error of
    float32.
    """
    close(in_float64(actual), float64, roundings * FORMATS[name].epsilon / 2 + 1e-4)


# ---- the way to a format and back -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_every_half_survives_the_way_there_and_back():
    """All bit patterns: not-a-numbers, infinities, zeros of both signs."""
    for name in ("float16", "bfloat16"):
        every = np.arange(2**16, dtype=np.uint16).view(dtype_of(name))
        wide = widened(every)
        assert wide.dtype == np.float32
        back = narrowed(wide, every.dtype)
        number = ~np.isnan(wide)
        assert (back.view(np.uint16) == every.view(np.uint16))[number].all() and np.isnan(back[~number]).all()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_what_lies_between_becomes_the_nearest_half(name):
    """Between neighbours, and at and beside the middle of them, where ties go to even; down to 0 and up to infinity."""
    every = np.arange(2**15, dtype=np.uint16).view(dtype_of(name)).astype(np.float32)
    every = every[np.isfinite(every)]
    middle = every[:-1] + (every[1:] - every[:-1]) / 2
    largest = np.float32(FORMATS[name].largest)
    beyond = np.array([largest, largest * np.float32(1 + FORMATS[name].epsilon / 4), np.inf], np.float32)
    for x in (middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf)), beyond):
        for signed in (x, -x):
            actual, expected = narrowed(signed, dtype_of(name)), signed.astype(dtype_of(name))
            assert (actual.view(np.uint16) == expected.view(np.uint16)).all()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_half_stays_what_it_is(name):
    """It has no more digits than its format, so nothing is rounded: not the gradient of logits that are halves."""
    every = np.arange(2**16, dtype=np.uint16).view(dtype_of(name))
    same, number = narrowed(every, every.dtype), ~np.isnan(widened(every))
    assert (same.view(np.uint16) == every.view(np.uint16))[number].all()


# ---- kernels --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.booleans(), NAMES, SEEDS)
def test_linear(n, k, m, biased, name, seed):
    x, w, b = halves(seed, name, 2, n, k), halves(seed, name, k, m), halves(seed, name, m) if biased else None
    y = assert_rounds_once(name, kernels.linear(x, w, b), ops.linear(*map(widened, (x, w, b))))
    near(name, y, ops.linear(*map(in_float64, (x, w, b))))


@pytest.mark.parametrize("activation", sorted(ops.ACTIVATIONS))
@given(st.integers(1, 100), st.integers(1, 90), NAMES, SEEDS)
def test_activations(activation, n, h, name, seed):
    x, dy = halves(seed, name, 1, n, h), halves(seed + 1, name, 1, n, h)
    (forward, backward), (plain, plain_backward) = kernels.ACTIVATIONS[activation], ops.ACTIVATIONS[activation]
    wide, wide_backward = (row.numpy for row in kernels.ACTIVATIONS[activation])
    (y, cache), (wide_y, wide_cache), (expected, expected_cache) = forward(x), wide(widened(x)), plain(in_float64(x))
    near(name, assert_rounds_once(name, y, wide_y), expected)
    assert cache is x or cache.dtype == bool, "more is kept than the input, or its sign"
    dx = assert_rounds_once(name, backward(dy, cache), wide_backward(widened(dy), wide_cache))
    near(name, dx, plain_backward(in_float64(dy), expected_cache))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_how_an_array_lies_in_memory_changes_nothing(name):
    """What is computed in parts fills all of the result, also where the argument is a view with its axes swapped."""
    x, w = halves(1, name, 4, 6, 2).transpose(2, 0, 1), halves(2, name, 6, 3)
    copy = np.ascontiguousarray(x)
    for kernel, others in [(kernels.linear, (w,)), *[(forward, ()) for forward, _ in kernels.ACTIVATIONS.values()],
                           *[(backward, (copy,)) for name, (_, backward) in kernels.ACTIVATIONS.items()
                             if name != "relu"]]:
        y, expected = (kernel(one, *others) for one in (x, copy))
        y, expected = (one[0] if type(one) is tuple else one for one in (y, expected))
        np.testing.assert_array_equal(widened(y), widened(expected))


@given(st.integers(1, 100), st.integers(2, 90), NAMES, SEEDS)
def test_layer_norm(n, h, name, seed):
    """What is added to gradients is never rounded. The backward reads x normalised, which was: no element is beyond
    sqrt(h), so that dx, and the two roundings in its last term, are at most as many times what is added up.
    """
    x, dy = halves(seed, name, 1, n, h), halves(seed + 1, name, 1, n, h)
    weight, bias = halves(seed, name, h), halves(seed + 1, name, h)
    y, (normed, inverse_std) = kernels.layer_norm(x, weight, bias, 1e-3)
    wide_y, (wide_normed, wide_std) = cpu.layer_norm(*map(widened, (x, weight, bias)), 1e-3)
    expected, cache = ops.layer_norm(*map(in_float64, (x, weight, bias)), 1e-3)
    near(name, assert_rounds_once(name, y, wide_y), expected)
    assert_rounds_once(name, normed, wide_normed)
    np.testing.assert_array_equal(inverse_std, wide_std)
    assert inverse_std.dtype == np.float32
    found = kernels.layer_norm_backward(dy, weight, (normed, inverse_std))
    wide = cpu.layer_norm_backward(widened(dy), widened(weight), (widened(normed), inverse_std))
    assert_rounds_once(name, found[0], wide[0])
    for actual, one in zip(found[1:], wide[1:], strict=True):
        assert actual.dtype == np.float32
        np.testing.assert_array_equal(actual, one)
    terms = (in_float64(dy) * in_float64(weight) * inverse_std, in_float64(dy) * cache[0], in_float64(dy))
    for actual, exact, each in zip(found, ops.layer_norm_backward(in_float64(dy), in_float64(weight), cache), terms):
        scale = max(1.0, abs(each).max() * (1 if actual is found[0] else n))         # of what is added up
        near(name, in_float64(actual) / scale, exact / scale, 2 + 3 * h**0.5 if actual is found[0] else 1)


@given(arrays(3, 9, 150), NAMES, SEEDS)
def test_dropout(array, name, seed):
    """The very masks of float32."""
    shape, site = array
    x, dy = halves(seed, name, *shape), halves(seed + 1, name, *shape)
    (y, mask), (wide_y, wide_mask) = kernels.dropout(x, site), cpu.dropout(widened(x), site)
    assert (mask.keep == wide_mask.keep).all() and mask.scale == wide_mask.scale
    near(name, assert_rounds_once(name, y, wide_y), ops.dropout(in_float64(x), site)[0])
    assert_rounds_once(name, kernels.dropout_backward(dy, mask), cpu.dropout_backward(widened(dy), mask))
    assert kernels.dropout(x, None)[0] is x and kernels.dropout_backward(dy, None) is dy


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), NAMES, SEEDS)
def test_rotate(b, s, a, pairs, name, seed):
    x = halves(seed, name, b, s, a, 2 * pairs + 1)
    angles = rope.rotary_cos_sin(s, 2 * pairs, x)
    assert all(is_half(one) for one in angles)
    for kernel, plain in ((kernels.rotate, rope.rotate), (kernels.rotate_backward, rope.rotate_backward)):
        y = assert_rounds_once(name, kernel(x, angles), plain(widened(x), widened(angles)))
        near(name, y, plain(in_float64(x), in_float64(angles)))


@given(st.data(), st.integers(1, 3), st.integers(1, 23), st.integers(1, 3), st.integers(1, 3), st.integers(1, 6),
       st.booleans(), st.booleans(), NAMES, SEEDS)
def test_attention_core(data, b, s, g, each, d, causal, drops, name, seed):
    """Computed one sample at a time, and twice; yet float32's results, masks included, rounded once. (With padding to a
    rounding of float32's: how many keys a sample's products have depends on those beside it.)
    """
    a = each * g
    site = data.draw(sites(b, a, s, s)) if drops else None
    q, k, v = (halves(seed, name, b, s, 3, a, d)[:, :, i, :heads] for i, heads in enumerate((a, g, g)))
    dcontext, real = halves(seed + 1, name, b, s, a, d), data.draw(lengths(b, s))
    others = causal, site, real
    y, cache = kernels.attention_core(q, k, v, *others)
    wide_y, wide_cache = blockwise.attention_core(*map(widened, (q, k, v)), *others)
    expected, expected_cache = ops.attention_core(*map(in_float64, (q, k, v)), *others)
    near(name, y if real is not None else assert_rounds_once(name, y, wide_y), expected)
    assert all(one is its for one, its in zip(cache[:3], (q, k, v)))
    assert core_again(cache) is cache, "selective recompute computes what is not needed"
    for actual, wide, exact in zip(kernels.attention_core_backward(dcontext, cache),
                                   blockwise.attention_core_backward(widened(dcontext), wide_cache),
                                   ops.attention_core_backward(in_float64(dcontext), expected_cache), strict=True):
        near(name, actual if real is not None else assert_rounds_once(name, actual, wide), exact)


@given(st.data(), st.integers(1, 3), st.integers(1, 12), st.integers(1, 12), st.integers(1, 3), st.integers(1, 6),
       NAMES, SEEDS)
def test_block_attention(data, b, n, m, g, d, name, seed):
    """Halves are read, and all results are float32, to the last bit those for the same numbers in float32."""
    def drawn(what, *shape):
        if what in ("along", "highest", "total"):
            return np.full(shape, 2, np.float32)
        return halves(seed + ord(what[0]), name, *shape)

    block, dy = block_of(data, drawn, b, n, m, g, 2, d)
    arguments = block_backward_arguments(block, dy, drawn)
    for kernel, given_ in ((kernels.block_attention, block), (kernels.block_attention_backward, arguments)):
        for one, other in zip(kernel(*given_), kernel(*map(widened, given_)), strict=True):
            assert one.dtype == other.dtype == np.float32
            np.testing.assert_array_equal(one, other)


@given(st.integers(1, 3), st.integers(1, 12), st.integers(1, 12), st.integers(1, 3), st.integers(1, 3),
       st.integers(1, 6), NAMES, SEEDS)
def test_cached_attention(b, n, before, a, each, d, name, seed):
    q, (k, v) = halves(seed, name, b, n, each * a, d), halves(seed + 1, name, 2, b, n + before - 1, a, d)
    wide = blockwise.cached_attention(*map(widened, (q, k, v)))
    y = assert_rounds_once(name, kernels.cached_attention(q, k, v), wide)
    near(name, y, ops.cached_attention(*map(in_float64, (q, k, v))))


def test_attention_has_the_probabilities_of_one_sample_at_a_time(monkeypatch):
    monkeypatch.undo()
    b, s, a, d = 4, 512, 4, 4
    q = k = v = halves(1, "bfloat16", b, s, a, d)

    def forward_and_backward():
        y, cache = kernels.attention_core(q, k, v, True, Site((1, 2), 0.1, (0, a, s, s), (0, 0, 0, 0)))
        kernels.attention_core_backward(y, cache)

    assert most_bytes(forward_and_backward) < 1.8 * a * s * s * (4 + 1)    # with its mask; of all, or of two: more


@given(st.integers(1, 300), st.integers(1, 9), NAMES, SEEDS)
def test_what_is_added_to_gradients_is_float32(n, h, name, seed):
    """Sums over positions lose nothing to the format of what is added: biases, weights, rows of a table."""
    x, dy = halves(seed, name, n, h), halves(seed + 1, name, n, h)
    total = kernels.total(dy)
    assert total.dtype == np.float32
    np.testing.assert_array_equal(total, widened(dy).sum(0))
    grad = np.full((h, h), 1e3, np.float32)
    kernels.accumulate(grad, x, dy)
    np.testing.assert_array_equal(grad, np.float32(1e3) + widened(x).T @ widened(dy))
    ids, table = np.arange(n) % 3, np.full((3, h), 1e3, np.float32)
    assert kernels.lookup_backward(dy, ids, table) is table
    close(table, ops.lookup_backward(in_float64(dy), ids, np.full((3, h), 1e3)), 1e-5)


# ---- layers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HalfCase(Case):
    """Its numbers are halves, so that the machine, in halves, and the textbook, in float64, begin with the same."""

    name: str = "float16"
    main = np.float32

    def array(self, what, *shape):
        return super().array(what, *shape).astype(dtype_of(self.name)).astype(np.float64)

    def params(self, tensors):
        return tree_map(lambda x: x.astype(dtype_of(self.name)).astype(np.float64), super().params(tensors))

    def on_a_rank(self, x, wrap=theorems.as_is):
        """Return the textbook's float64 numbers in 16 bits; return ids and the gradients' buffer as they are."""
        return wrap(x.astype(dtype_of(self.name)) if x.dtype == np.float64 else x)

    def bound(self, roundings):
        return roundings * FORMATS[self.name].epsilon / 2 + 1e-4


@st.composite
def half_cases(draw, **model_choices):
    case = draw(cases(sizes=st.sampled_from([1, 2, 4]), **model_choices))
    return HalfCase(**vars(case), name=draw(NAMES))


def smooth_cases():
    """Return cases in which rounding errors are not magnified. A layer norm magnifies them if a position's two or four
    elements are nearly equal; ReLU does if rounding changes a sign.
    """
    return st.sampled_from(["gelu", "gelu_exact"]).flatmap(
        lambda activation: half_cases(hidden_size=16, rotary_percent=1.0, activation=activation))


def in_halves(group, theorem, case, roundings, wrap=theorems.as_is):
    theorem(group, case, wrap=partial(case.on_a_rank, wrap=wrap), tolerance=case.bound(roundings))


# With the number of roundings, one after the other, that a result may be off by: about twice what was seen.
LAYERS = [(theorems.row_parallel_equals_whole, 4), (theorems.mlp_equals_whole, 5), (theorems.attention_equals_whole, 6),
          (theorems.embedding_equals_whole, 5), (theorems.logits_equal_whole, 3)]


@pytest.mark.parametrize("theorem, roundings", LAYERS, ids=lambda x: getattr(x, "__name__", None))
@FEWER
@given(case=half_cases(qk_layernorm=False))     # the norm of two nearly equal numbers magnifies rounding errors
def test_sharded_is_the_textbook_within_the_format(ranks, theorem, roundings, case):
    """Both regions; output, input gradient and all weight gradients."""
    ranks.run(case.t, in_halves, theorem, case, roundings)


@FEWER
@given(smooth_cases())
def test_a_sharded_block_is_the_textbook_within_the_format(ranks, case):
    ranks.run(case.t, in_halves, theorems.block_equals_whole, case, 12)


@FEWER
@given(half_cases())
def test_every_array_of_a_layer_is_of_halves(ranks, case):
    ranks.run(case.t, only_halves, case)


def only_halves(group, case):
    """Check that everything is in 16 bits but small statistics (1 / std), masks, ids and gradients."""
    c, dtype = case.model, dtype_of(case.name)
    share = theorems.Share(group, block_tensors(c), case.params(block_tensors(c)), case, case.on_a_rank)
    y, cache = block_forward(share.outside(case.x()), share.p, c, share.region,
                             theorems.context_of(case, wrap=case.on_a_rank))
    dx = block_backward(share.outside(case.x("dy")), share.p, cache, c, share.grads, kernels.accumulate, share.region)
    assert y.dtype == dx.dtype == dtype and y.shape == dx.shape
    for norm in (cache.input_layernorm, cache.post_attention_layernorm):
        assert norm[1].dtype == np.float32
    if isinstance(cache.attention, GroupedAttentionCache):
        q_norm, k_norm = (norm and norm[0] for norm in (cache.attention.q_norm, cache.attention.k_norm))
        cache = cache._replace(attention=cache.attention._replace(q_norm=q_norm, k_norm=k_norm))
    kept = arrays_of(cache._replace(input_layernorm=cache.input_layernorm[0],
                                    post_attention_layernorm=cache.post_attention_layernorm[0]))
    assert kept and all(array.dtype in (dtype, bool) for array in kept), [array.dtype for array in kept]

    tensors = embedding_tensors(c)
    share = theorems.Share(group, tensors, case.params(tensors), case, case.on_a_rank)
    x, cache = embedding_forward(case.ids("tokens", case.b, case.s), share.p, share.region,
                                 LayerContext(case.dropout))
    logits, kept = logits_forward(x, share.p.word, c.vocab_size, share.region)
    dx = logits_backward(np.ones_like(logits), share.p.word, kept, share.grads.word, kernels.accumulate, share.region)
    embedding_backward(dx, cache, share.grads, share.region)
    assert {array.dtype for array in (x, logits, kept, dx)} == {dtype}
    assert all(array.dtype != np.float64 and array.dtype != np.float32 for array in arrays_of(cache))
    assert all(grad.dtype == np.float32 for _, grad in leaves(share.grads) if grad is not None)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("t, cut", [(1, False), (2, False), (2, True)])
def test_no_gradient_of_a_parameter_is_rounded(ranks, t, cut, name):
    """Sums over positions have more digits than the halves that are added up."""
    model = ModelConfig(1, 16, 2, 6, 8, hidden_dropout=0.0, make_vocab_size_divisible_by=1)
    ranks.run(t, gradients_have_more_digits, HalfCase(t, model, 5, 8, 1, sequence_parallel=cut, name=name))


def gradients_have_more_digits(group, case):
    c, dtype = case.model, dtype_of(case.name)

    def check(share):
        for name, grad in leaves(share.grads):
            digits = (grad - 1).astype(dtype) != grad - 1          # a Share's gradients begin at 1
            assert digits.mean() > 0.1, f"{name}: float32 sums would not all be numbers of {dtype}"

    tensors = block_tensors(c)
    share = theorems.Share(group, tensors, case.params(tensors), case, case.on_a_rank)
    y, cache = block_forward(share.outside(case.x()), share.p, c, share.region, LayerContext(case.dropout))
    block_backward(share.outside(case.x("dy")), share.p, cache, c, share.grads, kernels.accumulate, share.region)
    check(share)
    tensors = embedding_tensors(c)
    share = theorems.Share(group, tensors, case.params(tensors), case, case.on_a_rank)
    _, cache = embedding_forward(case.ids("tokens", case.b, case.s), share.p, share.region)
    embedding_backward(share.outside(case.x("dx")), cache, share.grads, share.region)
    check(share)


def arrays_of(tree):
    if isinstance(tree, tuple):
        return [array for one in tree for array in arrays_of(one)]
    return [tree] if isinstance(tree, np.ndarray) else []


@FEWER
@given(cases(sizes=st.sampled_from([1, 2, 4])), st.sampled_from([1.0, 8.0]))
def test_cross_entropy_in_float16(ranks, case, scale):
    """--fp16-lm-cross-entropy: in the format of the logits, and near the textbook's."""
    ranks.run(case.t, loss_in_float16, HalfCase(**vars(case)), scale)


def loss_in_float16(group, case, scale):
    theorems.loss_equals_whole(group, case, scale, wrap=case.on_a_rank, tolerance=case.bound(6))


@FEWER
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 10_000), SEEDS)
def test_the_loss_over_many_words_in_float16(ranks, t, b, s, n, seed):
    """In float16 itself a sum stands still: 2048 + 1 is 2048. NumPy's sum over the last axis is taken in float32."""
    logits = np.random.default_rng(seed).normal(size=(t, b, s, n)).astype(np.float16)
    ranks.run(t, loss_over_many_words, logits)


def loss_over_many_words(group, logits):
    targets = np.zeros(logits.shape[1:3], int)
    whole = np.concatenate(in_float64(logits), -1)
    loss, _ = cross_entropy_forward(logits[group.rank].copy(), targets, group)
    assert loss.dtype == np.float16
    near("float16", loss, ops.cross_entropy(whole, targets)[0], 4)
