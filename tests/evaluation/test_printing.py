"""What an evaluation tells while it works."""
from mpi_impl.evaluation import printing
from mpi_impl.evaluation.printing import Reporter


def test_progress_is_told_now_and_then_by_one_rank(capsys, monkeypatch):
    monkeypatch.setattr(printing, "PAUSE", 0.0)
    for speaks in (True, False):
        Reporter(None, speaks).progress(2000, "windows")(1000)
    assert capsys.readouterr().out == "  1,000 of 2,000 windows | 0m 00s left\n"
    monkeypatch.setattr(printing, "PAUSE", 60.0)
    Reporter(None, True).progress(2000, "windows")(1000)
    assert capsys.readouterr().out == ""


def test_a_file_keeps_what_is_in_it_until_there_is_something_to_write(tmp_path):
    """Bad input, which is found before, leaves the last run's figures alone."""
    path = tmp_path / "metrics"
    path.write_text("the last run's")
    one, other = Reporter(str(path), True), Reporter(str(path), False)
    other.write(accuracy=0)
    assert path.read_text() == "the last run's"
    one.write(accuracy=0.5)
    one.write(accuracy=1)
    assert path.read_text() == '{"accuracy": 0.5}\n{"accuracy": 1}\n'
