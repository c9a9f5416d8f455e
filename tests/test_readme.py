"""The README, the pages of docs/ and the other guides: what they name is there, and what they quote is true."""
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "notebooks/README.md", "notebooks/labs/README.md", "benchmarks/README.md",
         *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/*.md")))]
TEXTS = {name: (ROOT / name).read_text() for name in PAGES}
README = TEXTS["README.md"]
PLANNED = {"reference/layers/gated_mlp.py", "mpi_impl/layers/gated_mlp.py",     # CONTRIBUTING's example,
           "notebooks/labs/lab9_name.py", "docs/_build/html"}                   # the guide's, and what is built


@pytest.mark.parametrize("name", TEXTS)
def test_files_that_are_named_exist(name):
    linked = [(ROOT / name).parent / path for path in re.findall(r"\]\(([\w./]+)(?:#[\w-]+)?\)", TEXTS[name])]
    quoted = re.findall(r"`((?:reference|mpi_impl|grading|notebooks|tests|docs|tools)/[\w./]*)`", TEXTS[name])
    missing = [path for path in linked + [ROOT / path for path in quoted if path not in PLANNED] if not path.exists()]
    assert not missing


@pytest.mark.parametrize("name", TEXTS)
def test_headings_that_are_linked_exist(name):
    for path, anchor in re.findall(r"\]\(([\w./]*)#([\w-]+)\)", TEXTS[name]):
        target = ((ROOT / name).parent / path) if path else ROOT / name
        if target.suffix == ".py":      # GitHub's anchor of a line
            assert int(anchor.removeprefix("L")) <= len(target.read_text().splitlines())
            continue
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_of_docs_is_one_link_away_from_the_readme():
    linked = set(re.findall(r"\]\((docs/\w+\.md)", README))
    assert {name for name in PAGES if name.startswith("docs/")} - {"docs/index.md"} == linked


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 160


def test_code_in_the_readme_is_the_code_of_its_files():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 1 and blocks[0] in (ROOT / "mpi_impl/layers/mlp.py").read_text()


PROSE = [ROOT / name for name in PAGES] + sorted(ROOT.glob("notebooks/**/*.py"))


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_does_not_count_tests(path):
    """Their number changes from day to day, and the number of skipped ones with the machine."""
    assert not re.search(r"\d (passed|failed|(unit )?tests?|theorems)\b", path.read_text())


def test_the_picture_is_the_one_its_script_draws(tmp_path):
    """docs/mlp_split.svg is not older than docs/mlp_split.py: the script's labels are in it."""
    svg = (ROOT / "docs/mlp_split.svg").read_text()
    for label in ("split by columns", "split by rows", "forward: all-reduce", "backward: all-reduce", "rank 1"):
        assert f"<!-- {label} -->" in svg
