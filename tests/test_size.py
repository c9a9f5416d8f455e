"""Ceilings: a folder above its own is refused, with the files that grew; comments and docstrings are free."""
import subprocess

import pytest

from tools import size

CODE = "x = 1\n"    # 3 tokens
CEILINGS = '[tool.ceilings]\nroom = 9\n"(root)" = 3\n'


@pytest.fixture
def house(tmp_path, monkeypatch):
    """Make a repository with two rooms of code."""
    monkeypatch.setattr(size, "ROOT", tmp_path)
    write = {"pyproject.toml": CEILINGS, "root.py": CODE, "room/a.py": CODE, "room/b.py": CODE}
    (tmp_path / "room").mkdir()
    for path, text in write.items():
        (tmp_path / path).write_text(text)
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm first"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    return tmp_path


def test_what_costs_nothing_and_what_does(house, capsys):
    text = '"""A module."""\n\n\ndef f():  # which says why\n    """Nothing."""\n    return 1\n'
    assert size.tokens(text) == size.tokens("def f():\n  return 1\n") == 7 and size.tokens("") == 0
    assert size.main() == 0 and "6 tokens, of         9" in capsys.readouterr().out


def test_a_folder_above_its_ceiling_is_refused(house, capsys):
    (house / "room/b.py").write_text(3 * CODE)
    (house / "room/new.py").write_text(2 * CODE)
    assert size.main() == 1
    printed = capsys.readouterr().out
    assert "error: room is above" in printed and printed.index("room/b.py by 6") < printed.index("room/a.py by 0")
    assert "room/new.py by 6" in printed


def test_a_folder_without_a_ceiling_is_refused(house):
    (house / "attic").mkdir()
    (house / "attic/box.py").write_text(CODE)
    assert size.main() == 1
