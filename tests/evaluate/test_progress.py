"""An evaluation's reports while it works."""
from mpi_impl.evaluate import progress


def test_progress_is_reported_after_each_pause(monkeypatch):
    said = []
    for pause in 0.0, 60.0:
        monkeypatch.setattr(progress, "PAUSE", pause)
        progress.report_progress(2000, "windows", said.append)(1000)
    assert said == ["  1,000 of 2,000 windows | 0m 00s left"]
