"""Our formulas compared with the papers' measurements."""
from shardlab.plan import scaling_study


def test_all_figures_but_one_are_within_what_is_allowed(tmp_path, capsys, monkeypatch):
    """The program says so, names the miss and its reason, and draws. None may be off by more than 12 %."""
    tables = scaling_study.study()
    missed, = ((table, row) for table in tables for row in table.rows if not row.meets)
    assert (missed[0].title[-21:], missed[1].name) == ("same with 64 replicas", "2.5B, t = 2") and missed[0].why
    assert max(row.allowed for table in tables for row in table.rows) <= 0.12
    monkeypatch.setattr(scaling_study, "study", lambda: [missed[0]])     # all of them take seconds
    scaling_study.main(["--plot", str(tmp_path / "study.svg")])
    said, rows = capsys.readouterr().out, len(missed[0].rows)
    assert f"{rows - 1} of {rows} figures" in said and said.count("MISSED") == 1 and missed[0].why in said
    assert (tmp_path / "study.svg").stat().st_size > 10_000
