"""The files that the READMEs and CONTRIBUTING.md name."""
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXTS = {name: (ROOT / name).read_text()
         for name in ("README.md", "CONTRIBUTING.md", "docs/several_hosts.md", "notebooks/README.md",
                      "notebooks/labs/README.md")}


@pytest.mark.parametrize("name", TEXTS)
def test_files_that_are_named_exist(name):
    linked = [(ROOT / name).parent / path for path in re.findall(r"\]\(([\w./]+)\)", TEXTS[name])]
    quoted = re.findall(r"`((?:reference|mpi_impl|grading|notebooks|tests|docs|tools)/[\w./]*)`", TEXTS[name])
    assert linked or quoted
    planned = {"reference/layers/gated_mlp.py", "mpi_impl/layers/gated_mlp.py",     # CONTRIBUTING's example,
               "notebooks/labs/lab8_name.py"}                                       # and the guide's
    missing = [path for path in linked + [ROOT / path for path in quoted if path not in planned] if not path.exists()]
    assert not missing


PROSE = [ROOT / name for name in (*TEXTS, "benchmarks/README.md")] + sorted(ROOT.glob("notebooks/**/*.py"))


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_does_not_count_tests(path):
    """Their number changes from day to day, and the number of skipped ones with the machine."""
    assert not re.search(r"\d (passed|failed|(unit )?tests?|theorems)\b", path.read_text())


def test_the_picture_is_the_one_its_script_draws(tmp_path):
    """docs/mlp_split.svg is not older than docs/mlp_split.py: the script's labels are in it."""
    svg = (ROOT / "docs/mlp_split.svg").read_text()
    for label in ("split by columns", "split by rows", "forward: all-reduce", "backward: all-reduce", "rank 1"):
        assert f"<!-- {label} -->" in svg
