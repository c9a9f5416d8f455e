"""Formats round as NumPy's do, and the loss scale follows Megatron's rule."""
from dataclasses import replace
from math import inf

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from reference.batches import GPTBatch
from reference.config import ModelConfig
from reference.optimizers.adam import OptimizerConfig
from reference.params import leaves
from reference.precision import FORMATS, UNSCALED, LossScaler, LossScaling, Precision, ScaleState, rounded
from reference.training.trainer import Trainer

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
BITS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300)
NEAR_TIES = st.lists(st.tuples(st.integers(-2**12, 2**12), st.integers(-40, 10)), min_size=1, max_size=300)


@pytest.mark.parametrize("name", DTYPES)
def test_the_bits_of_a_format_give_its_limits(name):
    form, info = FORMATS[name], ml_dtypes.finfo(DTYPES[name])
    assert (form.epsilon, form.smallest_normal, form.largest) == (info.eps, info.smallest_normal, info.max)
    assert form.bytes == DTYPES[name].itemsize


@given(BITS, NEAR_TIES, st.sampled_from(["float16", "bfloat16"]))
def test_rounding_equals_a_cast(bits, numbers, name):
    """The float32 bits are any: subnormal numbers, overflow, infinities, NaN, and both zeros; or the numbers lie
    half-way between two of the format, where random bits hardly ever are, and go to the even one.
    """
    with np.errstate(all="ignore"):
        rounding_is_the_cast(np.array(bits, np.uint32).view(np.float32), name)
    rounding_is_the_cast(np.array([n * 2.0**e for n, e in numbers], np.float32), name)


def rounding_is_the_cast(x, name):
    with np.errstate(all="ignore"):
        expected = x.astype(DTYPES[name]).astype(np.float32)
        found = rounded(x, FORMATS[name])
    assert found.dtype == x.dtype
    assert np.array_equal(found, expected, equal_nan=True)
    numbers = ~np.isnan(expected)
    assert (np.signbit(found) == np.signbit(expected))[numbers].all()


@given(st.lists(st.floats(width=64), min_size=1), st.sampled_from(sorted(DTYPES)))
def test_rounding_float64_is_nearest(numbers, name):
    """The result is a number of the format, no other is nearer, and it stays when rounded again."""
    x, form = np.array(numbers), FORMATS[name]
    with np.errstate(all="ignore"):
        found = rounded(x, form)
        again = found.astype(DTYPES[name]).astype(np.float64)
    assert np.array_equal(found, again, equal_nan=True) and np.array_equal(rounded(found, form), found, equal_nan=True)
    inside = abs(x) <= form.largest
    spacing = np.maximum(abs(x[inside]), form.smallest_normal) * form.epsilon
    assert (abs(found[inside] - x[inside]) <= spacing / 2).all()
    assert np.isnan(found[np.isnan(x)]).all() and (abs(found[abs(x) >= 2 * form.largest]) == inf).all()


@pytest.mark.parametrize("name", DTYPES)
def test_a_number_just_past_a_tie_is_rounded_once(name):
    """float64 goes directly to the format: by way of float32, 1 + 2^-11 + 2^-40 would become a tie, and go to even.
    What rounds beyond the largest number is infinite.
    """
    form, half = FORMATS[name], FORMATS[name].epsilon / 2
    x = np.array([1 + half - 2.0**-50, 1 + half, 1 + half + 2.0**-50, 1 + 3 * half - 2.0**-50, 1 + 3 * half])
    assert rounded(x, form).tolist() == [1, 1, 1 + 2 * half, 1 + 2 * half, 1 + 4 * half]
    last = form.largest * form.epsilon / (2 - form.epsilon) / 2         # half of the distance to the number below
    x = np.array([form.largest, form.largest + 0.9 * last, form.largest + last])
    assert rounded(x, form).tolist() == [form.largest, form.largest, inf]


# ---- a run's choices ------------------------------------------------------------------------------------------------


def test_bytes_of_a_parameter():
    """A parameter, its gradient and its Adam states take 16 bytes in 16 bits, and 18 with main gradients."""
    assert Precision("bfloat16").bytes_each == Precision("float16").bytes_each == (2, 4, 12)
    assert Precision("float32").bytes_each == (4, 4, 8) and Precision("float64").bytes_each == (8, 8, 16)


# ---- the loss scale -------------------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5), st.integers(1, 3), st.integers(-3, 6),
       st.sampled_from([2.0, 4.0, 1.5]))
@example([True] * 8, 5, 2, -2, 2.0)                                          # down to the smallest, where it stays
@example([False] * 2 + [True] * 2 + [False] * 3 + [True] * 3, 2, 2, 0, 2.0)  # a scale that grew is patient again
@example([False, True, False, False, True, True], 3, 3, 0, 2.0)              # good steps do not restore the patience
@example([True, False, True, False, False], 2, 1, 3, 4.0)                    # nor are they counted across an overflow
def test_the_scale_follows_the_rule(overflows, window, hysteresis, initial, factor):
    """The scale is multiplied by F when a window of good steps is full, counted from the last overflow or growth; it
    is divided by F at each overflow from the n-th on since it last grew.
    """
    scaler = LossScaler(LossScaling(None, 2.0**initial, 2.0**-4, window, hysteresis, factor))
    scale, good, bad = 2.0**initial, 0, 0
    for overflow in overflows:
        if overflow:
            good, bad = 0, bad + 1
            if bad >= hysteresis:
                scale = max(scale / factor, 2.0**-4)
        else:
            good += 1
            if good == window:
                scale, good, bad = scale * factor, 0, 0
        scaler.update(overflow)
        assert scaler.scale == scale and scaler.scaling.lowest(scale) == (scale == 2.0**-4)


@pytest.mark.parametrize("scaling, state, overflow, expected", [
    (LossScaling(None, 64.0, 1.0, 5, 1), (64.0, 600, 1), False, (128.0, 0, 1)),
    (LossScaling(None, 64.0, 4.0, 9, 1), (2.0, 0, 1), True, (2.0, 0, 0)),
    (LossScaling(8.0, loss_scale_window=1, hysteresis=1), (8.0, 0, 1), True, (8.0, 0, 1))])
def test_a_run_that_is_resumed_with_other_options(scaling, state, overflow, expected):
    """With a smaller window it has more good steps behind it than it needs. With a larger --min-loss-scale an overflow
    is no reason to make the scale larger. A constant scale stays.
    """
    scaler = LossScaler(scaling)
    scaler.state = ScaleState(*state)
    scaler.update(overflow)
    assert scaler.state == expected and scaling.lowest(scaler.scale) == overflow


# ---- the textbook's run ---------------------------------------------------------------------------------------------


def test_the_textbook_computes_with_rounded_weights_and_moves_exact_ones():
    """Its first loss is that of the rounded weights; a skipped step moves nothing, and does not count as an update."""
    compute, model = "bfloat16", ModelConfig(1, 8, 2, 11, 4)
    precision = Precision(compute, UNSCALED)
    trainer = Trainer(model, OptimizerConfig(2.0**-14, 5, weight_decay=0.0), 1, precision)
    tokens = np.arange(12).reshape(3, 4) % 11
    start = {name: x.copy() for name, x in leaves(trainer.params)}
    assert all(np.array_equal(x, rounded(x, FORMATS[compute])) for x in start.values())
    loss, *_ = trainer.step(GPTBatch(tokens, tokens), skipped=True)
    assert all(np.array_equal(x, start[name]) for name, x in leaves(trainer.params))
    assert (trainer.iteration, trainer.updates) == (1, 0)
    trainer.step(GPTBatch(tokens, tokens))
    assert (trainer.iteration, trainer.updates) == (2, 1)
    gains = trainer.params.final_layernorm.weight
    assert (gains != 1).all() and (rounded(gains, FORMATS[compute]) == 1).all(), "the step was not below rounding"
    assert all(x.dtype == np.float32 for _, x in leaves(trainer.params)) and np.isfinite(loss)
    model = replace(model, hidden_dropout=0.0, attention_dropout=0.0)
    trainer = Trainer(model, OptimizerConfig(0.0, 5, weight_decay=0.0), 1, precision)
    loss, norm, _ = trainer.step(GPTBatch(tokens, tokens))
    for _, x in leaves(trainer.params):
        x *= 1 + 2.0**-14
    assert trainer.step(GPTBatch(tokens, tokens))[:2] == (loss, norm), "weights are rounded in the first step alone"
