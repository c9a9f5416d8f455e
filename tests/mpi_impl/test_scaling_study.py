"""Our formulas beside the papers' measurements: within their tolerances, except for the figures reported as missed."""
from dataclasses import replace

import pytest
from matplotlib.colors import to_rgba

from mpi_impl.experiments import scaling_study
from mpi_impl.experiments.h100_runs import h100_tables, plan_of_fsdp, rate
from mpi_impl.experiments.published_figures import MISSED, OURS, draw_tables
from mpi_impl.experiments.published_rows import Row, Share, Table, describe
from mpi_impl.experiments.scaling_study import sharded_rows, study, weak_scaling
from mpi_impl.planning.profiles import load
from reference.costs.hardware import Sharded
from reference.costs.published import (FSDP, H100_PEAK, KORTHIKANTI, LLAMA_3, MEGATRON, MEGATRON_CORE, PTD_P,
                                       STRONG_SCALING, TABLE_2, ZERO)

KNOWN = {("Shoeybi et al. 2019, figure 5: the same with 64 replicas", "2.5B, t = 2")}      # of two that are missed


@pytest.fixture(scope="module")
def tables() -> list[Table]:
    return study()


def test_all_figures_are_within_what_is_allowed_but_those_that_are_known_not_to_be(tables):
    assert {(table.title, row.name) for table in tables for row in table.rows if not row.meets} == KNOWN
    assert all(table.why for table in tables if any((table.title, row.name) in KNOWN for row in table.rows))


def test_what_is_allowed(tables):
    """Of the first paper 3 points for the figures in its text, 5 for those that were read off; 10 % of the second's. Of
    its table 2 it is 6 % for PTD-P, and 12 % for the ZeRO-3 runs that were not used; 10 % of Llama 3's rows.
    """
    by_title = {table.title.split(": ", 1)[-1]: table.rows for table in tables}
    for rows in (by_title["weak scaling, model parallel"], by_title["the same with 64 replicas"]):
        assert [row.allowed for row in rows] == [0.05, 0.05, 0.05, 0.03] and not any(isinstance(r, Share) for r in rows)
    for title, allowed in (("TFLOP/s of a GPU", 0.1), ("TFLOP/s of a GPU, PTD-P (not used for the profile)", 0.06),
                           ("ZeRO-3 alone, 529.6B (not used for the profile)", 0.12),
                           ("share of the peak, GPT-3 175B", 0.1)):
        assert all(isinstance(row, Share) and row.allowed == allowed for row in by_title[title])


def test_every_figure_of_the_tables_is_there(tables):
    published = [row.published for table in tables for row in table.rows]
    wanted = [*(run.efficiency for run in MEGATRON), *(run.replicated for run in MEGATRON), *STRONG_SCALING.values(),
              *(run.teraflops for run in (*PTD_P, *TABLE_2, *LLAMA_3)),
              *(x for run in KORTHIKANTI for x in (run.full, run.selective)),
              *(x for stage in ZERO.values() for x in stage.values()), 0.39, 0.07, 0.04,
              *(share / 100 for share in MEGATRON_CORE.values())]
    assert not [x for x in wanted if x not in published]


def test_a_profile_is_all_that_a_cluster_has():
    """Every row is computed from one of two: where their links are slower, all rows with messages change."""
    fast, slow = load("dgx-2h"), replace(load("dgx-2h"), inside=replace(load("dgx-2h").inside, bandwidth=10e9))
    pairs = list(zip(weak_scaling(fast).rows, weak_scaling(slow).rows))
    assert pairs[0][0].found == pairs[0][1].found
    assert all(a.found > b.found + 0.1 and not b.meets for a, b in pairs[1:])


@pytest.mark.parametrize("sharded, off", [
    (Sharded(), (0.21, 0.73, 1.56)), (Sharded(hidden=0.7), (0.30, 1.02, 2.55)),
    (Sharded(20e9), (-0.31, -0.25, -0.14)), (Sharded(25e9, 0.7), (0.09, 0.18, 0.22))])
def test_what_zero_3_reached_takes_both_numbers(sharded, off):
    """The whole server's bandwidth, with or without overlap, is 21 to 255 % too kind to the three rows; the limit
    without overlap is too strict; and all of an adapter is too much.
    """
    rows = sharded_rows("174.6", replace(load("dgx-a100"), sharded=sharded), 0.03)
    assert [row.off for row in rows] == pytest.approx(off, abs=0.02) and not all(row.meets for row in rows)


def test_mosaicmls_program_is_slower_than_the_profile():
    """Ours is 4 to 31 % above it in all rows, also where no message leaves a server."""
    offs = [rate(plan_of_fsdp(run), load("dgx-h100")) / H100_PEAK * 100 / run.of_peak - 1 for run in FSDP]
    assert (min(offs), max(offs)) == pytest.approx((0.04, 0.31), abs=0.01)


def test_the_rows_of_the_h100_see_their_links():
    """Where the links between servers are ten times slower, all are off."""
    fast = load("dgx-h100")
    slow = replace(fast, between=replace(fast.between, bandwidth=40e9))
    for before, after in zip(h100_tables(fast), h100_tables(slow)):
        assert all(row.meets for row in before.rows)
        assert sum(row.meets for row in after.rows) <= len(before.rows) / 2, after


def test_a_row_is_told_with_its_distance_and_a_miss_with_its_reason():
    missed = describe(Table("a table", "%", [Row("one", 0.5, 0.52, 0.05), Row("two", 0.5, 0.6, 0.05)], "Why: so."))
    assert "+2.0 points          5 points\n" in missed and "+10.0 points  5 points: MISSED" in missed
    assert missed.endswith("Why: so.")
    shares = describe(Table("a table", "", [Share("one", 50, 52, 0.05)], "Why: so."))
    assert "+4.0%" in shares and "MISSED" not in shares and "Why" not in shares


def test_the_picture_has_every_figure_where_it_belongs(tables):
    figure = draw_tables(tables)
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert len(shown) == len(tables)
    for axes, table in zip(shown, tables):
        circles = next(line for line in axes.lines if line.get_marker() == "o")
        dots = axes.collections[0]
        assert list(circles.get_ydata()) == [row.published for row in table.rows]
        assert dots.get_offsets()[:, 1].tolist() == pytest.approx([row.found for row in table.rows])
        colors = {tuple(color) for color in dots.get_facecolors()}
        assert colors == {to_rgba(OURS if row.meets else MISSED) for row in table.rows}


def test_the_program_says_how_many_are_within(tables, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(scaling_study, "study", lambda: tables)     # which takes seconds
    scaling_study.main(["--plot", str(tmp_path / "study.svg")])
    rows = sum(len(table.rows) for table in tables)
    said = capsys.readouterr().out
    assert f"{rows - 1} of {rows} figures are within what is allowed" in said and said.count("MISSED") == 1
    assert (tmp_path / "study.svg").stat().st_size > 10_000
