"""The picture has a rectangle for everything that happened, where and when it happened."""
import struct
from collections import Counter

import pytest
from hypothesis import given, strategies as st
from matplotlib.figure import Figure

from mpi_impl.comm.trace import Slice
from mpi_impl.reports.timelines.gantt import (COLORS, DPI, HIGHEST, LEFT, NARROWEST, RIGHT, WIDEST, Panel, cells_of,
                                              draw_timelines, shade, timelines_figure)
from mpi_impl.reports.timelines.timelines import slices_of, timeline_of
from reference.schedules.generators import SCHEDULES, make
from reference.schedules.simulate import Times, simulate

SMALL = [(name, 4, 8, 2 if name == "interleaved" else None) for name in SCHEDULES]
MEASURED = [[Slice("compute", "0F0", "F", 5.0, 5.01), Slice("compute", "0B0", "B", 5.04, 5.06),
             Slice("communication", "wait for 1B0", "communication", 5.01, 5.04),
             Slice("compute", "optimizer", "other", 5.07, 5.1)],
            [Slice("compute", "1F0", "F", 5.01, 5.02), Slice("compute", "1B0", "B", 5.02, 5.04)]]


def simulate_named(name, p, m, v=None, **times):
    return simulate(make(name, p, m, v), Times(**times))


@pytest.fixture
def draw_panels(monkeypatch, tmp_path):
    """Return a function that draws panels, and returns the figure and the size of the file in pixels."""
    def draw(*panels, seconds=True):
        kept = []
        save = Figure.savefig
        monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (kept.append(figure), save(figure, *a, **k)))
        draw_timelines(str(tmp_path / "picture.png"), panels, seconds)
        monkeypatch.undo()
        data = (tmp_path / "picture.png").read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB`\x82")
        return kept[0], struct.unpack(">II", data[16:24])
    return draw


@pytest.mark.parametrize("name, p, m, v", SMALL)
def test_a_simulated_timeline_survives_the_way_through_slices(name, p, m, v):
    timeline = simulate_named(name, p, m, v)
    assert timeline_of(slices_of(timeline)) == timeline


@given(st.sampled_from(SMALL), st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0, 3))
def test_every_action_has_its_rectangle(sizes, forward, weight_gradient, communication):
    """One each, in its rank's row, over its own time, in the colour of its kind, with its microbatch; none overlap."""
    name, p, m, v = sizes
    timeline = simulate_named(name, p, m, v, forward=forward, weight_gradient=weight_gradient,
                              communication=communication)
    cells = cells_of(slices_of(timeline), scale=2.0)
    expected = Counter((r, 2 * span.start, 2 * span.end, str(span.action.microbatch))
                       for r, spans in enumerate(timeline.ranks) for span in spans)
    assert Counter((int(cell.top), cell.start, cell.end, cell.label) for cell in cells) == expected
    placement = make(name, p, m, v).placement()
    for cell, span in zip(cells, (span for spans in timeline.ranks for span in spans)):
        stages = placement[int(cell.top)]
        assert cell.color == shade(COLORS[span.action.kind], stages.index(span.action.stage), len(stages))
        assert int(cell.top) < cell.top < cell.bottom < int(cell.top) + 1
    for one, next_one in zip(cells, cells[1:]):
        assert one.top != next_one.top or one.end <= next_one.start


def test_streams_have_their_own_lanes_and_time_starts_at_0():
    """Communication does not hide the computation of its time; a slice that is no action shows its name."""
    cells = cells_of(MEASURED, scale=1e3)
    assert min(cell.start for cell in cells) == 0 and max(cell.end for cell in cells) == pytest.approx(100)
    assert sum(map(len, MEASURED)) == len(cells)
    waiting = next(cell for cell in cells if cell.color == COLORS["communication"])
    computing = [cell for cell in cells if cell is not waiting]
    assert all(cell.bottom - int(cell.top) < waiting.top - 0.01 for cell in computing) and waiting.bottom < 1
    assert [cell.label for cell in cells] == ["0", "0", "", "optimizer", "0", "0"]


def test_all_colours_differ():
    """This holds for all kinds, and for the stages of a rank."""
    shades = [shade(COLORS[kind], i, 4) for kind in "FBIW" for i in range(4)]
    shades += [COLORS["communication"].lower(), COLORS["other"].lower()]
    assert len(set(shades)) == len(shades) == 18
    assert shade("#0072B2", 0, 1) == shade("#0072B2", 0, 3) == "#0072b2"


def test_the_picture(draw_panels):
    """A panel for each timeline, on one time axis: title, rows, numbers, and the colours that there are."""
    predicted = slices_of(simulate_named("zb-h1", 4, 8, forward=0.01, input_gradient=0.01, weight_gradient=0.01))
    figure, size = draw_panels(Panel("measured", MEASURED), Panel("predicted", predicted))
    assert size == tuple((figure.get_size_inches() * DPI).astype(int))
    above, below = figure.axes
    assert above.get_xlim() == below.get_xlim() == pytest.approx((0, 270))
    assert above.get_ylim() == (2, 0) and below.get_ylim() == (4, 0)
    assert above.get_title(loc="left") == "measured:  makespan 60 ms,  bubble fraction 1"
    assert below.get_title(loc="left") == "predicted:  makespan 270 ms,  bubble fraction 0.125"
    assert below.get_xlabel() == "time (ms)"
    assert [label.get_text() for label in below.get_yticklabels()] == [f"rank {r}" for r in range(4)]
    assert len(below.collections[0].get_paths()) == 4 * 8 * 3
    assert Counter(text.get_text() for text in below.texts) == {str(i): 4 * 3 for i in range(8)}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "forward", "backward", "input gradient", "weight gradient", "communication", "other", "idle"]


def test_idle_time_is_marked_over_the_whole_makespan(draw_panels):
    """A hatched band behind each rank's cells, as long as the panel's timeline, not as the picture's."""
    timelines = [simulate_named("1f1b", 4, 8), simulate_named("zb-h1", 4, 8)]
    figure, _ = draw_panels(*(Panel("", slices_of(timeline)) for timeline in timelines), seconds=False)
    assert figure.axes[1].get_xlabel() == "time"
    for axes, timeline in zip(figure.axes, timelines):
        assert [(band.get_x(), band.get_width()) for band in axes.patches] == [(0, timeline.makespan)] * 4
        assert all(band.get_hatch() and band.get_zorder() <= axes.collections[0].get_zorder() for band in axes.patches)


@pytest.mark.parametrize("p, m", [(4, 8), pytest.param(8, 16, marks=pytest.mark.deep)])
def test_numbers_fit_into_their_cells(draw_panels, p, m):
    """The renderer measures them: none is wider or higher than its cell."""
    ranks = slices_of(simulate_named("interleaved", p, m, 2))
    figure, _ = draw_panels(Panel("", ranks), seconds=False)
    axes, cells = figure.axes[0], cells_of(ranks)
    assert len(axes.texts) == len(cells)
    for text, cell in zip(axes.texts, cells):
        box = axes.transData.inverted().transform_bbox(text.get_window_extent())
        assert cell.start <= box.x0 < box.x1 <= cell.end
        assert cell.top <= min(box.y0, box.y1) < max(box.y0, box.y1) <= cell.bottom


@pytest.mark.parametrize("name, m, unit", [("1f1b", 16, 0.1), ("zb-h1", 16, 0.01), ("zb-h1", 24, 0.3)])
def test_cells_that_are_equally_long_all_have_their_numbers(name, m, unit):
    """Their ends are sums in another order each, and so differ in the last bits."""
    ranks = slices_of(simulate_named(name, 4, m, forward=unit, input_gradient=unit, weight_gradient=unit))
    for shift in 0.0, 1e3:      # a clock that began long ago has coarser numbers
        later = [[s._replace(start=s.start + shift, end=s.end + shift) for s in slices] for slices in ranks]
        for seconds in True, False:
            figure = timelines_figure([Panel("", later)], seconds)
            assert len(figure.axes[0].texts) == sum(map(len, ranks))


def test_where_numbers_are_too_small_to_read_there_are_none(draw_panels):
    narrow, _ = draw_panels(Panel("", slices_of(simulate_named("1f1b", 1, 500))), seconds=False)
    flat, _ = draw_panels(Panel("", [[Slice("compute", "0F0", "F", 0, 1)]] * 300))
    assert not narrow.axes[0].texts and not flat.axes[0].texts


@pytest.mark.parametrize("p, m", [
    (1, 1), (300, 2), *(pytest.param(*size, marks=pytest.mark.deep) for size in ((24, 12), (48, 24)))])
def test_the_picture_keeps_its_bounds(draw_panels, p, m):
    """However many ranks and microbatches: a picture, with names of ranks that do not run into one another."""
    figure, _ = draw_panels(Panel("", slices_of(simulate_named("1f1b", p, m))), seconds=False)
    width, height = figure.get_size_inches()
    assert NARROWEST <= width - LEFT - RIGHT <= WIDEST and height < HIGHEST + 2
    assert len(figure.axes[0].collections) == 1 and len(figure.axes[0].collections[0].get_paths()) == 2 * p * m
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert all(above.y0 > below.y1 for above, below in zip(boxes, boxes[1:]))
    assert all(text.get_fontsize() >= 4 for text in figure.axes[0].texts)


def test_what_is_no_pipeline_has_no_bubble(draw_panels):
    figure, _ = draw_panels(Panel("loading", [[Slice("compute", "data", "other", 0, 1)], []]))
    assert figure.axes[0].get_title(loc="left") == "loading" and figure.axes[0].get_ylim() == (2, 0)
