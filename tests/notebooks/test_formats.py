"""The pictures of formats: their bits and numbers are the format's, and shares are those of what rounding does."""
import numpy as np
import pytest
from hypothesis import given, strategies as st
from matplotlib.colors import to_hex

from mpi_impl.notebook.pictures.formats import (BITS, FATES, draw_bits, draw_fates, draw_number_lines, draw_rounding,
                                                draw_scale, fates_of, may_err, numbers_between)
from mpi_impl.runtime.arrays import dtype_of
from reference.precision import FORMATS, rounded

HALVES = [FORMATS["float16"], FORMATS["bfloat16"]]
THREE = [*HALVES, FORMATS["float32"]]


def colors(patches):
    return [to_hex(patch.get_facecolor()).upper() for patch in patches]


def test_a_box_for_each_bit():
    axes, = draw_bits(THREE).axes
    drawn = colors(axes.patches)
    assert len(drawn) == sum(8 * form.bytes for form in THREE)
    for kind, many in ("sign", 3), ("exponent", 5 + 8 + 8), ("fraction", 10 + 7 + 23):
        assert drawn.count(BITS[kind]) == many
    assert [label.get_text() for label in axes.get_yticklabels()] == ["float16", "bfloat16", "float32"]


@pytest.mark.parametrize("form", HALVES, ids=lambda form: form.name)
@pytest.mark.parametrize("start, stop", [(1.0, 1.04), (0.0, 1e-6), (63_000.0, 68_000.0), (-0.01, 0.0)])
def test_the_numbers_between_are_those_of_the_dtype(form, start, stop):
    """All 65,536 of them, but for those that lie too close to be told apart."""
    with np.errstate(invalid="ignore"):
        everything = np.arange(1 << 16, dtype=np.uint16).view(dtype_of(form.name)).astype(np.float64)
    everything = np.unique(everything[(everything >= start) & (everything <= stop)])
    found, apart = numbers_between(form, start, stop), (stop - start) / 2000
    assert set(found) <= set(everything)
    gaps = np.diff(everything, prepend=-np.inf, append=np.inf)
    lonely = everything[(gaps[:-1] > apart) & (gaps[1:] > apart)]
    assert set(lonely) <= set(found)


def test_a_line_for_each_format_in_each_range():
    ranges = [(1, 1.04), (0, 1e-6)]
    panels = draw_number_lines(HALVES, ranges).axes
    assert [panel.get_xlim() for panel in panels] == ranges
    for panel, (start, stop) in zip(panels, ranges):
        for form, lines in zip(HALVES, panel.collections, strict=True):
            found = [segment[0, 0] for segment in lines.get_segments()]
            np.testing.assert_array_equal(found, numbers_between(form, start, stop))


@given(form=st.sampled_from(HALVES), power=st.integers(-30, 15), between=st.floats(1, 2, exclude_max=True))
def test_rounding_errs_by_no_more_than_is_drawn(form, power, between):
    x = np.array(between * 2.0**power)
    error = abs(rounded(x, form) - x) / x
    assert error <= may_err(form, x) * (1 + 1e-12)


def test_a_curve_ends_where_the_format_does():
    axes, = draw_rounding(THREE, (-30, 20)).axes
    float16, bfloat16, _ = (line.get_ydata() for line in axes.lines)
    x = axes.lines[0].get_xdata()
    assert np.isnan(float16[x > 65504]).all() and not np.isnan(float16[x <= 65504]).any()
    assert (float16[x < 2.0**-25] == 1).all(), "all is lost"
    assert bfloat16.max() <= 2**-8 and [line.get_label() for line in axes.lines] == [form.name for form in THREE]


@given(st.lists(st.floats(1e-12, 1e6), min_size=1, max_size=20))
def test_fates_are_what_rounding_does(values):
    x, form = np.array(values), FORMATS["float16"]
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    fates = fates_of(x, form)
    assert set(fates) <= set(FATES)
    np.testing.assert_array_equal(fates == "lost", half == 0)
    np.testing.assert_array_equal(fates == "infinite", np.isinf(half))
    np.testing.assert_array_equal(fates == "short of digits", (half != 0) & (x < 2.0**-14))


def test_bars_are_shares_of_the_values_that_are_not_0():
    values = np.array([0.0, 2.0**-30, -2.0**-20, 1.0, 1.5])
    panels = draw_fates(values, [1.0, 2.0**20], FORMATS["float16"]).axes
    assert [panel.get_title("left") for panel in panels] == [
        "times $2^{0}$: 25% lost, 25% short of digits", "times $2^{20}$: 50% infinite"]
    for panel, many in zip(panels, ({"lost": 1, "short of digits": 1, "kept": 2}, {"kept": 2, "infinite": 2})):
        heights = {fate: sum(patch.get_height() for patch, color in zip(panel.patches, colors(panel.patches))
                             if color == FATES[fate].upper()) for fate in FATES}
        assert heights == {fate: many.get(fate, 0) / 4 for fate in FATES}
        assert len(panel.lines) == 3, "the format's bounds"


def test_a_panel_in_which_all_is_well_says_so():
    panel, = draw_fates(np.ones(3), [1.0], FORMATS["float16"]).axes
    assert panel.get_title("left") == "times $2^{0}$: all kept"


def test_the_scale_and_the_steps_that_were_skipped():
    axes, = draw_scale([8.0, 8.0, 4.0], [True, True, False], [4.0, 4.0, 4.0], "a title").axes
    limit, scale, crosses = axes.lines
    assert list(scale.get_ydata()) == [8, 8, 4] and list(limit.get_ydata()) == [4, 4, 4]
    assert list(zip(*crosses.get_data())) == [(1, 8), (2, 8)]
    assert axes.get_title("left") == "a title" and len(draw_scale([1.0], [False]).axes[0].lines) == 2
