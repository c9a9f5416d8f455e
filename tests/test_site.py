"""The site: every page of it is in a list, its links lead somewhere, and a browser shows it as it should."""
import base64
import re
import subprocess
import sys
import time
from fnmatch import fnmatch

import nbformat
import pytest

pytest.importorskip("sphinx", reason="the site's tools are not installed: pip install '.[docs]'")

from tests.browser import CONTRASTS, DESK, PHONE, built_site, complaints_of, open_browser, serve  # noqa: E402
from tests.launching import ROOT  # noqa: E402
from tools.build_site import LISTS, RELEASED, Site, outline, write_texts  # noqa: E402
from tools.slides import decks, slides_of  # noqa: E402


def test_every_page_of_docs_is_in_a_list_of_the_site():
    listed = (ROOT / LISTS).read_text()
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages == {page for page in pages if re.search(rf"^docs/{page}$", listed, re.MULTILINE)}


OPENS = {"Colab": "https://colab.research.google.com/github/somebody/shardlab/blob/HEAD/",
         "Binder": "https://mybinder.org/v2/gh/somebody/shardlab/HEAD?urlpath=lab/tree/"}
CODESPACE = "(https://codespaces.new/somebody/shardlab?quickstart=1)"


def test_every_notebook_has_badges_that_open_it_and_no_lab_has_a_solution(tmp_path):
    site = Site(tmp_path, "somebody/shardlab")
    site.gather()
    walkthroughs = sorted(site.folder.glob("notebooks/[0-9]*.ipynb"))
    assert [path.name for path in walkthroughs] == sorted(path.name for path in ROOT.glob("notebooks/[0-9]*.ipynb"))
    for path in walkthroughs:
        assert all(f"({url}notebooks/{path.name})" in path.read_text() for url in OPENS.values())
        assert CODESPACE in path.read_text()
    labs = sorted(site.folder.glob("course/labs/*.ipynb"))
    assert [lab.stem for lab in labs] == sorted(path.stem for path in ROOT.glob("course/labs/lab*.py"))
    for lab in labs:
        text, place = lab.read_text(), f"{RELEASED}/{lab.stem}/{lab.name}"
        assert f"({OPENS['Binder']}{place})" in text and CODESPACE in text and f"`{place}`" in text
        assert OPENS["Colab"] not in text, "the repository has no notebook of a lab"
        assert "BEGIN SOLUTION" not in text and "BEGIN HIDDEN" not in text


def test_binder_and_codespaces_make_the_labs_where_the_badges_open_them():
    course = RELEASED.removesuffix("/release")
    for path in ".binder/postBuild", ".devcontainer/devcontainer.json":
        assert re.search(rf"(run\.sh labs|course\.grading\.release) {course}\b", (ROOT / path).read_text())


def test_a_repository_without_an_address_has_no_badges(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Title")])
    assert Site(tmp_path, None).with_badges(notebook, "notebooks/x.ipynb").cells[0].source == "# Title"


def test_every_lab_and_deck_has_a_page_in_a_list_with_its_slides_and_minutes(tmp_path):
    site = Site(tmp_path, None)
    assert {f"course/labs/{lab.stem}.ipynb" for lab in ROOT.glob("course/labs/lab*.py")} <= site.pages
    listed = re.findall(r"^course/\S+", (ROOT / LISTS).read_text(), re.MULTILINE)
    for deck in decks():
        page = str(deck.relative_to(ROOT))
        text = outline(deck)
        assert page in site.pages and any(fnmatch(page.removesuffix(".md"), one) for one in listed)
        titles, minutes = zip(*[(slide.title, sum(slide.minutes)) for slide in slides_of(deck)], strict=True)
        rows = re.findall(r"^\| \d+ \| (.+) \| (\d+) \|$", text, re.MULTILINE)
        assert rows == [(title, str(n)) for title, n in zip(titles, minutes, strict=True)]
        assert f"{len(titles)} slides in {sum(minutes)} minutes" in text
        assert f"(built:../../slides/{deck.stem}.html)" in text
        links = [deck.parent / link for link in re.findall(r"\]\((\.\./[^)]+ipynb)\)", text)]
        assert links and all(link.exists() for link in links)


SOURCES = {"index.md": "# README\n\n```{toctree}\nnotebooks/10_zero\ndocs/memory\napi/index\n```",
           "notebooks/10_zero.md": "# ZeRO", "docs/memory.md": "# Memory", "api/index.md": "# Made from code"}
EDITED = {"index": "README.md", "notebooks/10_zero": "notebooks/sources/10_zero.py", "docs/memory": "docs/memory.md",
          "api/index": None}


@pytest.mark.parametrize("repository", ["somebody/shardlab", ""])
def test_a_page_links_to_its_source_where_the_repository_is_known(tmp_path, repository):
    for page, text in SOURCES.items():
        (tmp_path / "source" / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / page).write_text(text)
    run = subprocess.run([sys.executable, "-m", "sphinx", "-q", "-W", "-c", "docs", "-D",
                          f"html_context.repository={repository}", tmp_path / "source", tmp_path / "html"],
                         cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for page, source in EDITED.items():
        links = re.findall(r'href="([^"]+)" rel="edit"', (tmp_path / "html" / f"{page}.html").read_text())
        assert links == ([f"https://github.com/{repository}/edit/HEAD/{source}"] if repository and source else [])


def test_the_texts_of_a_search_from_disk_are_those_of_the_articles_in_their_sections(tmp_path):
    (tmp_path / "_static").mkdir()
    (tmp_path / "searchindex.js").write_text('Search.setIndex({"docnames":["docs/a"],"x":1})')
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.html").write_text(
        '<nav>elsewhere</nav><article role="main" id="m"><section id="one"><h1>One<a class="headerlink" href="#one">¶'
        '</a></h1><p>1 &lt; 2</p><script>let x;</script></section></article>')
    write_texts(tmp_path)
    assert (tmp_path / "_static" / "texts.js").read_text() == (
        'const TEXTS = {"docs/a": "<section id=\\"one\\">One1 &lt; 2</section>"};\n')


# ---- the whole site, which takes minutes, in a browser ----

PAGES = ("index", "docs/reading", "notebooks/01_splitting_matrices", "notebooks/09_pipelines",
         "course/labs/lab1_collectives", "course/slides/08_pipelines", "docs/playground", "course/README",
         "docs/questions", "api/reference.layers", "api/mpi_impl.comm", "_modules/mpi_impl/layers/mlp", "CONTRIBUTING",
         "benchmarks/README")


@pytest.fixture(scope="module")
def built(testrun_uid):
    return built_site(testrun_uid)


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def address(built):
    with serve(built) as address:
        yield address


# Of a screenshot of a picture, below its rounded corner: the mean of red, green and blue.
BRIGHTNESS_AT_THE_CORNER = """async png => {
    const image = new Image();
    image.src = `data:image/png;base64,${png}`;
    await image.decode();
    const canvas = Object.assign(document.createElement("canvas"), {width: image.width, height: image.height});
    const pen = canvas.getContext("2d");
    pen.drawImage(image, 0, 0);
    const [red, green, blue] = pen.getImageData(1, Math.min(8, image.height - 1), 1, 1).data;
    return (red + green + blue) / 3;
}"""


@pytest.mark.deep
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_without_errors_is_readable_and_fits_a_phone(browser, address, name, scheme):
    for size in PHONE, DESK:
        page = browser.new_page(viewport=size, color_scheme=scheme)
        complaints = complaints_of(page)
        page.goto(f"{address}/{name}.html", wait_until="networkidle")
        assert page.locator("article h1, article .highlight").first.is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        assert all(page.locator("article img").evaluate_all("all => all.map(one => one.naturalWidth > 0)"))
        faint = [text for contrast, text in page.evaluate(CONTRASTS) if contrast < 3]
        for image in page.locator("article img").filter(visible=True).all():
            brightness = page.evaluate(BRIGHTNESS_AT_THE_CORNER, base64.b64encode(image.screenshot()).decode())
            assert brightness > 200 if scheme == "light" else brightness < 40
        page.close()
        assert not complaints and not faint


FILTERS = (("tied", "", "seen", ".*"), ("", "V", "silent", "-"), ("NVIDIA", "L", "seen", r"\d+"))


@pytest.mark.deep
def test_the_zoo_is_folded_and_its_filters_find_bugs(browser, address):
    page = browser.new_page(viewport=DESK)
    page.goto(f"{address}/docs/bug_zoo.html", wait_until="networkidle")
    rows = page.locator("article details tbody tr")
    assert rows.count() > 200 and rows.filter(visible=True).count() == 0
    headings = page.locator("article details").first.locator("th").all_text_contents()
    cells = rows.evaluate_all("all => all.map(row => [...row.children].map(cell => cell.textContent.trim()))")
    for words, detector, says, mark in FILTERS:
        page.fill("form.zoo input", words)
        page.select_option("form.zoo select[name=detector]", detector)
        page.select_option("form.zoo select[name=says]", says)
        column = headings.index(detector or "bug")
        found = sum(words.lower() in " ".join(row).lower() and bool(re.fullmatch(mark, row[column])) for row in cells)
        assert rows.filter(visible=True).count() == found > 0
        assert page.locator("form.zoo output").text_content() == f"{found} bugs"
    page.close()


@pytest.mark.parametrize("words, expected", [
    ("my loss differs", "docs/finding_out_why"), ("hang NCCL", "docs/their_runs"),
    ("loss is NaN", "docs/finding_out_why"), ("rank died", "notebooks/22_failure"),
    ("schedule deadlocks", "notebooks/09_pipelines")])
@pytest.mark.deep
def test_a_question_leads_to_the_page_that_answers_it(browser, built, words, expected):
    page = browser.new_page()
    page.goto(f"{built.as_uri()}/search.html?q={words}")
    page.wait_for_selector("#search-results li a")
    page.wait_for_load_state("networkidle")
    assert expected in page.locator("#search-results li a").first.get_attribute("href")
    assert "Show code cell" not in page.locator("#search-results").inner_text()
    page.close()


@pytest.mark.deep
@pytest.mark.parametrize("served", [True, False], ids=["served", "from_disk"])
def test_search_finds_prose_cells_and_functions(browser, address, built, served):
    page = browser.new_page()
    complaints = complaints_of(page)
    for words, expected in (("bubble", "09_pipelines"), ("sharded_mlp_forward", "reference.layers"),
                            ("ring chunk", "lab1"), ("several hosts", "several_hosts")):
        page.goto(f"{address if served else built.as_uri()}/search.html?q={words}")
        page.wait_for_selector("#search-results li a")
        end = time.monotonic() + 20
        results = page.locator("#search-results li a")
        while not any(expected in link for link in results.evaluate_all("all => all.map(one => one.href)")):
            assert time.monotonic() < end, f"{words} does not find {expected}"
            page.wait_for_timeout(200)
        page.wait_for_load_state("networkidle")     # what is shown below each result is fetched
        page.wait_for_function("""words => [...document.querySelectorAll('#search-results p.context')]
            .some(one => words.split(' ').some(word => one.textContent.includes(word)))""", arg=words)
        assert not page.locator("p.context", has_text="undefined").count()
    page.close()
    assert not complaints
