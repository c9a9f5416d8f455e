"""The table of kernels is complete, and every fast kernel of a core is its textbook twin, also off its tiles."""
import inspect
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpi_impl import kernels
from mpi_impl.kernels import blockwise, compiled, cpu, cuda, fused, half, partial_attention, plain
from mpi_impl.kernels.fused import core
from mpi_impl.runtime.arrays import dtype_of
from reference import online_softmax, ops, rope
from reference.config import ACTIVATIONS
from reference.dropout import Site
from tests.reference.test_ops import lengths
from tests.spy import SpyArray, to_device, to_host
from tests.strategies import close

SEEDS = st.integers(0, 2**32 - 1)
TABLE = {name: row for name, row in vars(kernels).items() if isinstance(row, kernels.Kernel)}


def in_column(index):
    """Return the functions of a column of the table."""
    return SimpleNamespace(**{name: row[index] for name, row in TABLE.items()})


FAST = pytest.mark.parametrize("fast", [
    in_column(kernels.NUMPY), pytest.param(in_column(kernels.COMPILED), marks=pytest.mark.skipif(
        not core.works(), reason="no C++ compiler"))], ids=["numpy", "compiled"])
ROWS = st.integers(1, 300)          # tiles are cut short by a small TILE below


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Shrink the tiles, so that small arrays have many tiles, and a last one that is not full."""
    monkeypatch.setattr(cpu, "TILE", 64)
    monkeypatch.setattr(compiled, "LARGE", 1)
    monkeypatch.setattr(partial_attention, "ROOM", 128)
    monkeypatch.setattr(blockwise, "ROWS", 5)
    monkeypatch.setattr(blockwise, "FUTURE", blockwise.FUTURE[:5, :5])


def draw(seed, dtype, *shape):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


def same(actual, expected, dtype):
    assert actual.dtype == expected.dtype == dtype
    close(actual, expected, 1e-11 if dtype == np.float64 else 1e-4)


# ---- the table ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLE)
def test_every_column_takes_the_arguments_of_the_textbook(name):
    """In their order; what a function takes besides has a default."""
    twin = list(inspect.signature(TABLE[name].textbook).parameters.values())
    for column, function in TABLE[name]._asdict().items():
        mine = list(inspect.signature(function).parameters.values())
        assert [(p.name, p.default) for p in mine[:len(twin)]] == [(p.name, p.default) for p in twin], column
        assert all(p.default is not p.empty for p in mine[len(twin):]), column


def test_the_table_names_functions_by_its_rows():
    """A function of another name than its row's would be in the wrong place; `in turn` are those of two other rows."""
    in_turn = {"drop_then_add", "add_then_norm", "multiply_then_activate", "repeat_core"}
    for name, row in TABLE.items():
        assert {function.__name__ for function in row} - in_turn <= {name}
        twin = getattr(ops, name, getattr(online_softmax, name, None))
        assert twin is None or row.textbook is twin or name == "cross_entropy_backward"     # ours gets other arguments
    assert tuple(kernels.ACTIVATIONS) == tuple(ops.ACTIVATIONS) == ACTIVATIONS


def test_no_kernel_is_missing_from_its_row():
    """A fast function that no column names would never run."""
    for module in (plain, cpu, partial_attention, blockwise, compiled, half, fused, cuda):
        for name in vars(module).keys() & TABLE.keys():
            assert getattr(module, name) in TABLE[name], f"{module.__name__}.{name}"


def test_the_first_array_chooses_the_column(monkeypatch):
    wide, sixteen = np.ones((1, 1)), np.ones((1, 1), np.float16)
    for works in (True, False):
        monkeypatch.setattr(core, "works", lambda works=works: works)
        for x in (wide, wide.astype(np.float32)):
            assert kernels.column(x) == (kernels.COMPILED if works else kernels.NUMPY)
        for x in (sixteen, sixteen.astype(dtype_of("bfloat16")), (sixteen, wide), [sixteen]):
            assert kernels.column(x) == kernels.HALF
        assert kernels.column(SpyArray(wide)) == kernels.TEXTBOOK
    monkeypatch.setattr(cuda, "has_kernels_for", lambda x: isinstance(x, SpyArray))
    assert kernels.column(SpyArray(sixteen)) == kernels.column((SpyArray(wide), wide)) == kernels.CUDA


# ---- a column's functions, and the textbook's -----------------------------------------------------------------------


GELUS = pytest.mark.parametrize("name", ["gelu", "gelu_exact"])


@FAST
@GELUS
@given(ROWS, st.integers(1, 90), st.sampled_from([np.float64, np.float32]), SEEDS)
def test_gelu(fast, name, n, h, dtype, seed):
    x, dy = draw(seed, dtype, 1, n, h), draw(seed + 1, dtype, 1, n, h)
    plain, plain_backward = ops.ACTIVATIONS[name]
    (y, cache), (expected, expected_cache) = getattr(fast, name)(x), plain(x)
    same(y, expected, dtype)
    same(getattr(fast, f"{name}_backward")(dy, cache), plain_backward(dy, expected_cache), dtype)


@pytest.mark.parametrize("name", sorted(ops.ACTIVATIONS))
@given(ROWS, st.integers(1, 20), st.integers(1, 90), st.sampled_from([np.float64, np.float32]), SEEDS)
def test_an_activation_behind_a_linear_layer(name, n, h, m, dtype, seed):
    """Where the two are one kernel, and where they are not."""
    x, dy = draw(seed, dtype, 1, n, h), draw(seed + 1, dtype, 1, n, m)
    w, b = draw(seed, dtype, h, m), draw(seed, dtype, m)
    plain, plain_backward = ops.ACTIVATIONS[name]
    (y, cache), (expected, expected_cache) = kernels.activated_linear(x, w, b, name), plain(ops.linear(x, w, b))
    same(y, expected, dtype)
    same(kernels.ACTIVATIONS[name][1](dy, cache), plain_backward(dy, expected_cache), dtype)


@FAST
@GELUS
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_gelu_far_out(fast, name, dtype, recwarn):
    """Far below 0, y is 0 with slope 0; far above, y is x with slope 1. exp overflows, but NumPy does not warn."""
    x = np.array([[-1e4, -100, 100, 1e4]], dtype)
    y, cache = getattr(fast, name)(x)
    dx = getattr(fast, f"{name}_backward")(np.ones_like(x), cache)
    assert (y == [[0, 0, 100, 1e4]]).all() and (dx == [[0, 0, 1, 1]]).all()
    assert not recwarn.list


@FAST
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_phi_is_the_normal_distribution(fast, dtype):
    """To the last place of 1, on both sides of where erf goes over from one formula to the next."""
    x = np.concatenate([np.linspace(-6, 6, 20_001), np.linspace(-1.5, 1.5, 20_001)]).astype(dtype)
    _, (_, phi) = fast.gelu_exact(x[None])
    exact = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x.tolist()])
    assert (abs(phi[0] - exact) <= np.finfo(dtype).eps).all()


@FAST
@given(ROWS, st.integers(1, 20), st.integers(1, 20), st.booleans(), st.sampled_from([np.float64, np.float32]), SEEDS)
def test_linear(fast, n, h, m, biased, dtype, seed):
    x, w, b = draw(seed, dtype, 2, n, h), draw(seed, dtype, h, m), draw(seed, dtype, m) if biased else None
    kept = None if b is None else b.copy()
    same(fast.linear(x, w, b), ops.linear(x, w, b), dtype)
    assert b is None or (b == kept).all()


@pytest.mark.skipif(not core.works(), reason="no C++ compiler")
@given(st.integers(1, compiled.FEW), st.integers(1, 50), st.integers(1, 50), st.booleans(),
       st.sampled_from([np.float64, np.float32]), SEEDS)
def test_a_few_rows_times_a_matrix(n, h, m, transposed, dtype, seed):
    """Whichever way the matrix lies in memory, and for sizes that no vector or block divides."""
    x, w = draw(seed, dtype, n, h), draw(seed, dtype, m, h).T if transposed else draw(seed, dtype, h, m)
    same(fused.few_rows(x, w), ops.linear(x, w), dtype)
    same(compiled.linear(x[:, None], w[:, ::2]), ops.linear(x[:, None], w[:, ::2]), dtype)      # a view with gaps


@FAST
@given(ROWS, st.integers(1, 9), st.integers(1, 20), st.sampled_from([np.float64, np.float32]), SEEDS)
def test_lookup_backward(fast, n, V, h, dtype, seed):
    """On top of what the table has; most words several times."""
    ids, dy = np.random.default_rng(seed).integers(V, size=(2, n)), draw(seed, dtype, 2, n, h)
    actual, expected = draw(seed + 1, dtype, V, h), draw(seed + 1, dtype, V, h)
    fast.lookup_backward(dy, ids, actual)
    same(actual, ops.lookup_backward(dy, ids, expected), dtype)


@pytest.mark.skipif(not core.works(), reason="no C++ compiler")
def test_exp_of_floats():
    """Ours, within two units in the last place wherever it is a normal number; beyond, 0 and infinity."""
    x = np.concatenate([np.linspace(-87, 88, 200_001), np.linspace(-1, 1, 20_001)]).astype(np.float32)
    y, zeros = x[None, None].copy(), np.zeros((1, 1), np.float32)
    fused.exp_and_sum(y, zeros)
    exact = np.exp(x.astype(np.float64))
    assert (abs(y[0, 0] - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()
    far = np.array([[[-np.inf, -1e30, -89, 89, 1e30, np.inf, np.nan]]], np.float32)
    fused.exp_and_sum(far, zeros)
    np.testing.assert_array_equal(far[0, 0], [0, 0, 0, np.inf, np.inf, np.inf, np.nan])


@given(ROWS, st.integers(1, 90), st.sampled_from([np.float64, np.float32]), SEEDS)
def test_exp_and_sum(n, V, dtype, seed):
    """In tiles on NumPy, in one on a device: what softmax is made of."""
    logits = 30 * draw(seed, dtype, 2, n, V)
    highest = logits.max(-1)
    exp = np.exp(logits - highest[..., None])
    for wrap in (np.asarray, SpyArray):
        found = wrap(logits.copy())
        kept, total = kernels.exp_and_sum(found, wrap(highest))
        assert kept is found
        same(to_host(found), exp, dtype)
        same(to_host(total), exp.sum(-1), dtype)


@FAST
@given(ROWS, st.integers(2, 90), st.sampled_from([np.float64, np.float32]), SEEDS)
def test_layer_norm(fast, n, h, dtype, seed):
    norms_equal(fast.layer_norm, fast.layer_norm_backward, ops.layer_norm, ops.layer_norm_backward, n, dtype, seed,
                draw(seed, dtype, h), draw(seed + 1, dtype, h))


@FAST
@given(ROWS, st.integers(1, 90), st.sampled_from([np.float64, np.float32]), SEEDS)
def test_rms_norm(fast, n, h, dtype, seed):
    norms_equal(fast.rms_norm, fast.rms_norm_backward, ops.rms_norm, ops.rms_norm_backward, n, dtype, seed,
                draw(seed, dtype, h))


def norms_equal(norm, norm_backward, textbook, textbook_backward, n, dtype, seed, weight, *bias):
    """Check a norm and its backward on n rows, and on what the textbook keeps of them."""
    x, dy = draw(seed, dtype, 1, n, weight.size) + dtype(3), draw(seed + 1, dtype, 1, n, weight.size)
    (y, cache), (expected, expected_cache) = (function(x, weight, *bias, 1e-3) for function in (norm, textbook))
    same(y, expected, dtype)
    for actual, wanted in zip(norm_backward(dy, weight, cache), textbook_backward(dy, weight, expected_cache),
                              strict=True):
        same(actual, wanted, dtype)


@FAST
@given(st.integers(0, 30), st.lists(st.integers(1, 9), min_size=1, max_size=2), SEEDS)
def test_total(fast, n, shape, seed):
    """Also of no rows: an expert may get no token."""
    dy = draw(seed, np.float32, n, *shape)
    same(fast.total(dy), plain.total(dy), np.float32)


@FAST
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 3), st.integers(1, 20), st.integers(0, 3),
       st.sampled_from([np.float64, np.float32]), SEEDS)
def test_rotate(fast, b, s, a, pairs, rest, dtype, seed):
    """Also for heads of which rope rotates a part, and for keys that lie beside values in one array."""
    x = draw(seed, dtype, b, s, 2, a, 2 * pairs + rest)[:, :, 0]
    angles = rope.rotary_cos_sin(s, 2 * pairs, x)
    same(fast.rotate(x, angles), rope.rotate(x, angles), dtype)
    same(fast.rotate_backward(x, angles), rope.rotate_backward(x, angles), dtype)


@FAST
@given(ROWS, st.integers(1, 90), st.sampled_from([np.float64, np.float32]), SEEDS)
def test_swiglu(fast, n, f, dtype, seed):
    x, dy = 3 * draw(seed, dtype, 1, n, 2, f), draw(seed + 1, dtype, 1, n, f)
    (y, cache), (expected, expected_cache) = fast.swiglu(x), ops.swiglu(x)
    same(y, expected, dtype)
    same(fast.swiglu_backward(dy, cache), ops.swiglu_backward(dy, expected_cache), dtype)


@FAST
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_swiglu_far_out(fast, dtype, recwarn):
    """A gate far below 0 gives 0, and one far above gives gate * up: exp overflows, but NumPy does not warn."""
    x = np.stack([np.array([[-1e4, -800, 800, 1e4]], dtype), np.full((1, 4), 2, dtype)], 1)
    y, cache = fast.swiglu(x)
    assert (y == [[0, 0, 1600, 2e4]]).all()
    assert (fast.swiglu_backward(np.ones_like(y), cache) == [[[0, 0, 2, 2], [0, 0, 800, 1e4]]]).all()
    assert not recwarn.list


@FAST
@given(st.data(), st.integers(1, 3), st.integers(1, 70), st.integers(1, 3), st.integers(1, 4), st.integers(1, 40),
       st.booleans(), st.sampled_from([np.float64, np.float32]), SEEDS)
def test_attention_core(fast, data, b, s, g, each, d, causal, dtype, seed):
    """q, k and v as the layer hands them over: views of one array. What is hidden has probability 0, and no gradient.
    """
    a = each * g
    q, k, v = (draw(seed, dtype, b, s, 3, a, d)[:, :, i, :heads] for i, heads in enumerate((a, g, g)))
    dcontext, real = draw(seed + 1, dtype, b, s, a, d), data.draw(lengths(b, s))
    (y, cache), (expected, expected_cache) = (m.attention_core(q, k, v, causal, None, real) for m in (fast, ops))
    same(y, expected, dtype)
    same(cache.probs, expected_cache.probs, dtype)
    assert (cache.probs * ~attention_mask(b, s, causal, real) == 0).all()
    found = fast.attention_core_backward(dcontext, cache)
    for actual, wanted in zip(found, ops.attention_core_backward(dcontext, expected_cache), strict=True):
        same(actual, wanted, dtype)
    if real is not None:
        assert all((gradient[np.arange(s) >= real[:, None]] == 0).all() for gradient in found[1:])


def attention_mask(b, s, causal, real):
    """Return the mask of the keys that each query attends to: bool [b, 1, s, s], or one that broadcasts to it."""
    keys = np.arange(s)
    visible = keys <= keys[:, None] if causal else np.ones((s, s), bool)
    return visible & (keys < (np.full(b, s) if real is None else real)[:, None, None, None])


@given(st.integers(1, 3), st.integers(1, 12), st.integers(1, 12), st.integers(1, 3), st.integers(1, 3),
       st.integers(1, 6), st.sampled_from([np.float64, np.float32]), SEEDS)
def test_cached_attention(b, n, before, a, each, d, dtype, seed):
    """On every library it computes the last rows of causal attention. The buffer of keys and values has room for more.
    """
    m = n + before - 1
    q, (k, v) = draw(seed, dtype, b, m, each * a, d), draw(seed + 1, dtype, 2, b, m + 3, a, d)[:, :, :m]
    expected = ops.attention_core(q, k, v, True)[0][:, m - n:]
    for wrap in (np.asarray, SpyArray):
        found = kernels.cached_attention(*map(wrap, (q[:, m - n:], k, v)))
        assert isinstance(found, type(wrap(q)))
        same(to_host(found), expected, dtype)


def block_of(data, draw_array, b, n, m, g, each, d):
    """Draw a block's arguments: q, k, v, and whether it is on the diagonal, where dropout draws, how much is real."""
    diagonal = data.draw(st.booleans(), "diagonal")
    m = n if diagonal else m
    site = data.draw(st.sampled_from([None, Site((3, 4), 0.3, (0, g * each + 1, n + 5, m + 4), (2, 1, 5, 3))]), "site")
    real = data.draw(st.sampled_from([None, np.random.default_rng(n).integers(-2, m + 2, b)]), "real")
    q, k, v = draw_array("q", b, n, g * each, d), draw_array("k", b, m, g, d), draw_array("v", b, m, g, d)
    return (q, k, v, diagonal, site, real), draw_array("dy", b, n, g * each, d)


def block_backward_arguments(block, dy, draw_array):
    """Return the arguments of block_attention_backward; other blocks have raised the maximum, and have their sums."""
    q = block[0]
    b, n, a, _ = q.shape
    along, highest, total = (draw_array(name, b, a, n, 1) for name in ("along", "highest", "total"))
    return dy, along, highest, total, *block


@FAST
@given(st.data(), st.integers(1, 3), st.integers(1, 12), st.integers(1, 12), st.integers(1, 3), st.integers(1, 3),
       st.integers(1, 5), st.sampled_from([np.float64, np.float32]), SEEDS)
def test_block_attention(fast, data, b, n, m, g, each, d, dtype, seed):
    """With keys that several heads share, and samples of which no key is real; forward and backward."""
    def drawn(name, *shape):
        return abs(draw(seed, dtype, *shape)) + 1 if name == "total" else draw(seed + len(name) + ord(name[0]), dtype,
                                                                               *shape)

    block, dy = block_of(data, drawn, b, n, m, g, each, d)
    for actual, expected in zip(fast.block_attention(*block), online_softmax.block_attention(*block), strict=True):
        hidden = np.isinf(expected)
        assert (actual == expected)[hidden].all()
        same(np.where(hidden, 0, actual).astype(dtype), np.where(hidden, 0, expected).astype(dtype), dtype)
    arguments = block_backward_arguments(block, dy, drawn)
    for actual, expected in zip(fast.block_attention_backward(*arguments),
                                online_softmax.block_attention_backward(*arguments), strict=True):
        same(actual, expected, dtype)


def test_blocks_are_merged_on_a_device():
    """On arrays that refuse what CuPy's refuse."""
    q, k, v = (draw(i, np.float64, 2, 3, heads, 4) for i, heads in enumerate((4, 2, 2)))
    one, other = (online_softmax.block_attention(q, k, v, diagonal) for diagonal in (False, True))
    merged = online_softmax.merge(*map(to_device, (one, other)))
    same(to_host(online_softmax.finish(merged)), online_softmax.finish(online_softmax.merge(one, other)), np.float64)


def test_padding_on_a_device():
    """The textbook's spelling, on arrays that refuse what CuPy's refuse."""
    q, real = draw(1, np.float64, 2, 3, 2, 4), np.array([3, 2])
    y, cache = kernels.attention_core(*map(to_device, (q, q, q)), False, None, to_device(real))
    expected, expected_cache = ops.attention_core(q, q, q, False, None, real)
    same(to_host(y), expected, np.float64)
    for actual, wanted in zip(kernels.attention_core_backward(to_device(q), cache),
                              ops.attention_core_backward(q, expected_cache), strict=True):
        same(to_host(actual), wanted, np.float64)


@FAST
def test_how_an_array_lies_in_memory_changes_nothing(fast):
    """Views with their axes swapped, of which the kernels would see the wrong elements."""
    x, weight = draw(1, np.float64, 4, 6, 2).transpose(2, 0, 1), draw(2, np.float64, 6)
    site, dy = Site((1, 2), 0.5, (0, 4, 6), (0, 0, 0)), np.ascontiguousarray(draw(3, np.float64, 2, 4, 6))
    for forward, backward, others in [(fast.gelu, fast.gelu_backward, ()),
                                      (fast.dropout, fast.dropout_backward, (site,))]:
        (y, cache), (expected, same_cache) = forward(x, *others), forward(np.ascontiguousarray(x), *others)
        same(y, expected, np.float64)
        same(backward(dy.transpose(0, 2, 1).copy().transpose(0, 2, 1), cache), backward(dy, same_cache), np.float64)
    same(fast.layer_norm(x, weight, weight, 1e-3)[0], ops.layer_norm(x, weight, weight, 1e-3)[0], np.float64)


# ---- dropout ----------------------------------------------------------------------------------------------------


RATES = st.sampled_from([0.1, 0.5, 0.9])
WORDS = st.integers(0, 2**32 - 1)


@st.composite
def sites(draw, *shape):
    """Draw a Site for an array of this shape. Its first sample b may be so large that an index is near a multiple of
    2^32.
    """
    first = [draw(st.integers(0, 5)) for _ in shape]
    whole = [length + start + draw(st.integers(0, 3)) for length, start in zip(shape, first)]
    near = draw(st.sampled_from([0, 2**32, 2**33, 7 * 2**32, 2**40])) + draw(st.integers(-200, 200))
    first[0] = max(0, near) // math.prod(whole[1:])
    return Site((draw(WORDS), draw(WORDS)), draw(RATES), (0, *whole[1:]), tuple(first))


@st.composite
def arrays(draw, *sizes):
    shape = [draw(st.integers(1, size)) for size in sizes]
    return shape, draw(sites(*shape))


@FAST
@given(arrays(3, 9, 150), st.sampled_from([np.float64, np.float32]), SEEDS)
def test_dropout(fast, array, dtype, seed):
    """The very bits of the textbook's mask, wherever the part begins: rows may begin and end at any index."""
    shape, site = array
    x, dy = draw(seed, dtype, *shape), draw(seed + 1, dtype, *shape)
    (y, mask), (expected, expected_mask) = (m.dropout(x, site) for m in (fast, ops))
    assert (mask.keep == expected_mask.keep).all() and mask.scale == expected_mask.scale
    assert (cpu.draw_mask(site, shape, x).keep == mask.keep).all()
    same(y, expected, dtype)
    same(fast.dropout_backward(dy, mask), ops.dropout_backward(dy, expected_mask), dtype)
    dy[..., ::2] = np.inf                    # what is dropped is 0 whatever it was: an overflow there is none
    np.testing.assert_array_equal(fast.dropout_backward(dy, mask), ops.dropout_backward(dy, expected_mask))


@pytest.mark.parametrize("multiple", [1, 2, 3, 2**20])
@pytest.mark.parametrize("before", range(9))
def test_the_low_word_of_an_index_may_begin_again_within_a_row(multiple, before):
    """Rows of 8 and of 3 that start at 0 to 8 elements before a multiple of 2^32, and go on after it, bit by bit."""
    for m in (8, 3):
        start = multiple * 2**32 - before
        index, keep = np.arange(start, start + m, dtype=np.uint64), np.empty((1, m), bool)
        bits = ops.counter_rng.bits((123, 456), index)
        for threshold in bits.tolist():                                  # one of the bits is the threshold itself
            site = Site((123, 456), threshold / 2**32, (0, m), (start // m, start % m))
            cpu.draw_rows(site, index[None, :1], keep)
            assert (keep[0] == (bits >= threshold)).all()


def test_bits_of_a_mask_of_real_size(monkeypatch):
    """With tiles as they are, over the 2^32nd element: a row of 4099 does not end there."""
    monkeypatch.undo()
    site = Site((2**32 - 1, 2**31), 0.1, (0, 50, 4099), (2**32 // (50 * 4099), 3, 0))
    actual, expected = (m.draw_mask(site, (2, 40, 4099), np.empty(0)) for m in (cpu, ops))
    index = ops.counter_rng.indices((2, 40, 4099), site.whole, site.first, np.empty(0))
    assert index.min() < 2**32 < index.max() and (index[..., 0] >> 32 != index[..., -1] >> 32).any()
    assert (actual.keep == expected.keep).all()


def attention_with_dropout_is_the_textbooks(fast, shape, causal, dtype, site, real, seed):
    """Check attention with dropout against the textbook: padding does not change which visible probabilities are
    dropped.
    """
    b, s, a, d = shape
    q, k, v = (draw(seed, dtype, b, s, 3, a, d)[:, :, i] for i in range(3))
    dcontext = draw(seed + 1, dtype, b, s, a, d)
    (y, cache), (expected, expected_cache) = (m.attention_core(q, k, v, causal, site, real) for m in (fast, ops))
    same(y, expected, dtype)
    visible = attention_mask(b, s, causal, real)
    assert (cache.mask.keep & visible == ops.draw_mask(site, (b, a, s, s), q).keep & visible).all()
    same(cache.probs, expected_cache.probs, dtype)                       # kept before dropout
    for actual, wanted in zip(fast.attention_core_backward(dcontext, cache),
                              ops.attention_core_backward(dcontext, expected_cache), strict=True):
        same(actual, wanted, dtype)


@FAST
@given(st.data(), st.integers(1, 3), st.integers(1, 70), st.integers(1, 3), st.integers(1, 40), st.booleans(),
       st.sampled_from([np.float64, np.float32]), SEEDS)
def test_attention_core_with_dropout(fast, data, b, s, a, d, causal, dtype, seed):
    site, real = data.draw(sites(b, a, s, s)), data.draw(lengths(b, s))
    attention_with_dropout_is_the_textbooks(fast, (b, s, a, d), causal, dtype, site, real, seed)


@FAST
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("s, real", [(127, None), (129, [64, 65]), (300, [300, 1])])
def test_attention_core_with_dropout_in_blocks_of_real_size(fast, monkeypatch, causal, s, real):
    monkeypatch.undo()
    site = Site((1, 2), 0.1, (0, 5, 310, 310), (2**32 // (5 * 310 * 310), 2, 0, 0))
    attention_with_dropout_is_the_textbooks(fast, (2, s, 2, 4), causal, np.float64, site, real and np.array(real), 1)


def test_the_library_is_that_of_the_arrays():
    """A spy takes the textbook's spelling, NumPy the fast one, wherever the array stands; no site, no mask."""
    site, x = Site((1, 2), 0.5, (0, 4), (0, 0)), np.ones((3, 4))
    for wrap, kind in ((SpyArray, SpyArray), (np.asarray, np.ndarray)):
        y, mask = kernels.dropout(wrap(x), site)
        assert isinstance(y, kind) and isinstance(mask.keep, kind)
    y, mask = kernels.dropout(x, None)
    assert y is x and mask is None and kernels.dropout_backward(x, None) is x
