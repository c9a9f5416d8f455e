"""The README and the pages: what they name and link is there, and what they quote is the code."""
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tools.notebooks import SOURCES
from tools.reading import GUIDE, ROW, definitions, with_true_lengths

ROOT = Path(__file__).parent.parent
GUIDES = "docs/*.md", "course/instructors/**/*.md"
PAGES = ["README.md", "CONTRIBUTING.md", "MAINTAINERS.md", "copyright.md", "notebooks/README.md", "course/README.md",
         "benchmarks/README.md",
         *(str(path.relative_to(ROOT)) for pattern in GUIDES for path in sorted(ROOT.glob(pattern)))]
TEXTS = {name: (ROOT / name).read_text() for name in PAGES}
README = TEXTS["README.md"]
FOLDERS = "reference|mpi_impl|shardlab|benchmarks|course|notebooks|tests|docs|tools"
PLANNED = {"course/labs/lab9_name.py", "docs/_build/html"}     # the guide's, and what is built


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_page_names_and_links_exists(name):
    linked = [(ROOT / name).parent / path for path in re.findall(r"\]\(([\w./]+)(?:#[\w-]+)?\)", TEXTS[name])]
    quoted = re.findall(rf"`((?:{FOLDERS})/[\w./]*)`", TEXTS[name])
    assert not [path for path in linked + [ROOT / path for path in quoted if path not in PLANNED] if not path.exists()]
    for path, anchor in re.findall(r"\]\(([\w./]*)#([\w-]+)\)", TEXTS[name]):
        target = ((ROOT / name).parent / path) if path else ROOT / name
        if target.suffix == ".py":      # GitHub's anchor of a line
            assert int(anchor.removeprefix("L")) <= len(target.read_text().splitlines())
            continue
        prefix, text = ("# ", SOURCES / f"{target.stem}.py") if target.suffix == ".ipynb" else ("", target)
        headings = re.findall(rf"^{prefix}#+ (.*)$", text.read_text(), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_list_of_pages_has_every_page():
    linked = {f"docs/{page}" for page in re.findall(r"\]\((\w+\.md)", TEXTS["docs/pages.md"])}
    assert {name for name in PAGES if name.startswith("docs/")} - {"docs/index.md", "docs/pages.md"} == linked


def test_the_readme_is_short_has_few_links_and_its_code_fits_on_githubs_page():
    assert len(README.splitlines()) <= 140 and README.count("](") <= 35
    code = re.findall(r"^```\w*\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert max(map(len, "".join(code).splitlines())) <= 98      # in a column of 838 pixels


TITLES = re.findall(r"^\| \d+ \| \[(.+?)\]", TEXTS["notebooks/README.md"], re.MULTILINE)
WRITTEN = TEXTS | {str(path.relative_to(ROOT)): path.read_text()
                   for pattern in ("notebooks/sources/*.py", "course/labs/*.py", "course/slides/*.md")
                   for path in sorted(ROOT.glob(pattern))}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_walkthrough_is_referred_to_by_its_name(name):
    """Not by its number: so it can move."""
    text = re.sub(r"\n(?:# )? *", " ", WRITTEN[name])
    assert not re.search(r"\bwalkthroughs? \d|\[\d+\]\([\w./]*\d\d_\w+\.ipynb", text, re.IGNORECASE)
    assert not re.search(r"\bwalkthroughs [^.]*?(?:, | and )\d+ \(", text, re.IGNORECASE), "some by name, others not"
    for names in re.findall(r"\bwalkthroughs? ((?:\*[^*]+\*(?:, | and | to )?)+)", text, re.IGNORECASE):
        assert {*re.findall(r"\*([^*]+)\*", names)} <= {*TITLES}


ASKED = re.compile(r"^- \*\*(.+?[?.])\*\* (.+?)\n(?=- |\n|\Z)", re.MULTILINE | re.DOTALL)


def test_every_question_is_asked_once_and_answered_by_a_sentence_with_a_link():
    page = TEXTS["docs/questions.md"]
    asked = dict(ASKED.findall(page))
    assert len(asked) == len(re.findall(r"^- ", page, re.MULTILINE)) >= 40
    assert all(re.search(r"\]\([^)]+\)", answer) and answer.endswith(".") and not re.search(r"[.?] [A-Z]", answer)
               for answer in asked.values())
    topics = "loss differs", "hangs", "Which t, p", "ZeRO-2", "memory", "f come from", "NaN", "bubble", "Slurm", "teach"
    assert not [topic for topic in topics if not any(topic in question for question in asked)]


def test_code_in_the_readme_is_the_code_of_its_file():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 1 and blocks[0] in (ROOT / "mpi_impl/layers/mlp.py").read_text()


def test_the_reading_guide_has_the_lengths_of_the_files_and_a_day_for_2000_lines():
    text = GUIDE.read_text()
    assert text == with_true_lengths(text), "Run `python tools/reading.py`."
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:3]:
        rows = [line for line in section.splitlines() if line.startswith("| [")]
        lengths = [int(row["length"].replace(",", "")) for row in ROW.finditer(section)]
        assert len(rows) == len(lengths) > 20 and (not section.startswith("Day one") or sum(lengths) <= 2000)


STOP = re.compile(r"^\| \[`([^`]+)`\]\([^)]+\) \| (.+?) \|", re.MULTILINE)
PLACE = re.compile(r"^\| .+ \| \[`(.+)`\]\(.+\) \| `(\w+)` \|$", re.MULTILINE)


@pytest.mark.parametrize("path, name", PLACE.findall(TEXTS["docs/what_is_where.md"]))
def test_what_is_asked_for_is_where_the_map_says(path, name):
    assert re.search(rf"^ *(?:def |class |extern .* void )?{name}\b", (ROOT / path).read_text(), re.MULTILINE)

def test_a_pair_of_runs_is_linked_by_its_own_line():
    """The site's build replaces the link with one to the page that this line names."""
    lines = (ROOT / "benchmarks/bug_matrix/pairs.py").read_text().splitlines()
    linked = re.findall(r"\[(.+)\]\(\.\./benchmarks/bug_matrix/pairs\.py#L(\d+)\)", TEXTS["docs/two_runs.md"])
    assert len(linked) == 5 and all(f'": ("{name}", ' in lines[int(number) - 1] for name, number in linked)


@pytest.mark.parametrize("path, names", STOP.findall(TEXTS["docs/tour_of_the_trainer.md"]))
def test_the_tour_of_the_trainer_names_functions_that_are_there(path, names):
    assert set(re.findall(r"`(.+?)`", names)) <= set(definitions((ROOT / path).read_text()))


def test_the_citation_agrees_with_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert all(citation[key] == project[key] for key in ("version", "license", "authors"))
