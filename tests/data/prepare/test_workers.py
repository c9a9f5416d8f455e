"""Work on many cores, and the reports of its progress: a bar on a terminal, a line now and then in a log."""
import io
import os

import pytest

from mpi_impl.data.prepare import progress
from mpi_impl.data.prepare.progress import Progress
from mpi_impl.data.prepare.workers import map_in_order
from reference.errors import UserError


def failing(x, y):
    """Fail for 3, and end the process for 4."""
    if x == 4:
        os._exit(y)
    if x == 3:
        raise UserError(f"{x} is too much.")
    return x + y


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order_and_so_does_an_error(workers):
    """It is the first, in the order of the work."""
    results = map_in_order(failing, workers, [1, 2, 3, 3], [10, 20, 30, 40])
    assert [next(results), next(results)] == [11, 22]
    with pytest.raises(UserError, match="3 is too much"):
        next(results)


def test_a_worker_that_is_ended_from_outside_is_reported():
    with pytest.raises(UserError, match="--workers than 2"):
        list(map_in_order(failing, 2, [4], [9]))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("total, shares", [(2_000_000, ["  0%", " 25%", "100%"]), (0, ["100%"] * 3)])
def test_a_terminal_shows_a_bar_that_leaves_no_trace(monkeypatch, total, shares):
    """Drawn over itself; at the end the line is free. There may be nothing to do, where every chunk was done before."""
    monkeypatch.setattr(progress, "REDRAWN", 0)
    out = Terminal()
    with Progress("encoding", total, out) as bar:
        bar.advance(total // 4)
        bar.advance(total * 3 // 4)
    nothing, *shown, free = out.getvalue().split("\r\x1b[K")
    assert (nothing, free) == ("", "") and "\n" not in out.getvalue()
    for line, share in zip(shown, shares, strict=True):
        full = round(30 * int(share[:-1]) / 100)
        assert line.startswith(f"encoding [{'#' * full}{' ' * (30 - full)}] {share} of {total / 1e6:.1f} MB, ")


def test_a_log_has_a_line_now_and_then(monkeypatch):
    """And none for work that is soon done."""
    out = io.StringIO()
    for pause in (30, 0):
        assert out.getvalue() == ""
        monkeypatch.setattr(progress, "REPEATED", pause)
        with Progress("encoding", 2_000_000, out) as bar:
            bar.advance(500_000)
            bar.advance(500_000)
    assert [line[:24] for line in out.getvalue().splitlines()] == [f"encoding:  {n}% of 2.0 MB" for n in (25, 50)]
