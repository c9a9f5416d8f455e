"""Reports of progress: a bar on a terminal, a line now and then in a log."""
import io

from mpi_impl.data.prepare import progress
from mpi_impl.data.prepare.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_a_bar_that_leaves_no_trace(monkeypatch):
    """Drawn over itself; at the end the line is free for what is said next."""
    monkeypatch.setattr(progress, "REDRAWN", 0)
    out = Terminal()
    with Progress("encoding", 2_000_000, out) as bar:
        bar.advance(500_000)
        bar.advance(1_500_000)
    shown = out.getvalue().split("\r\x1b[K")
    assert shown[0] == "" and shown[-1] == "" and "\n" not in out.getvalue()
    assert shown[2].startswith(f"encoding [{'#' * 8}{' ' * 22}]  25% of 2.0 MB, ") and shown[2].endswith(" s left")
    assert shown[3].startswith(f"encoding [{'#' * 30}] 100% of 2.0 MB, ")


def test_a_log_has_a_line_now_and_then(monkeypatch):
    """Nothing for work that is soon done."""
    out = io.StringIO()
    with Progress("encoding", 2_000_000, out) as bar:
        bar.advance(500_000)
    assert out.getvalue() == ""
    monkeypatch.setattr(progress, "REPEATED", 0)
    with Progress("encoding", 2_000_000, out) as bar:
        bar.advance(500_000)
        bar.advance(500_000)
    assert [line[:24] for line in out.getvalue().splitlines()] == [f"encoding:  {n}% of 2.0 MB" for n in (25, 50)]


def test_of_nothing_all_is_done(monkeypatch):
    """As when a run goes on of which every chunk had been encoded."""
    monkeypatch.setattr(progress, "REDRAWN", 0)
    out = Terminal()
    with Progress("encoding", 0, out) as bar:
        bar.advance(0)
    _, *shown, free = out.getvalue().split("\r\x1b[K")
    assert shown == [f"encoding [{'#' * 30}] 100% of 0.0 MB, 0.0 MB/s"] * 2 and free == ""
