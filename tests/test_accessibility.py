"""Accessibility: what WCAG 2.1 AA asks for that a program can check, in the sources and in a browser."""
import ast
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import jupytext
import pytest
from IPython.core.formatters import DisplayFormatter
from matplotlib.figure import Figure

from shardlab.notebook.pictures.charts import draw_bars
from shardlab.notebook.sliders import explore
from tests.browser import DESK, built_site, open_browser, serve
from tests.launching import ROOT
from tools.notebooks import read_stored, sources

PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("course/**/*.md"), ROOT / "notebooks/README.md",
                ROOT / "benchmarks/README.md"} - {ROOT / "CHANGELOG.md", ROOT / "docs/index.md"})
NOTEBOOKS = sorted({*sources([]), *ROOT.glob("course/labs/lab*.py")})
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
EMPTY_WORDS = {"here", "this", "link", "click here", "more", "read more", "it", "there", "see"}
WORDS = 4       # of a picture's text, at least


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def prose_of(path: Path) -> str:
    """Return the Markdown of a page or a notebook, without code."""
    cells = jupytext.read(path).cells if path.suffix == ".py" else []
    return FENCE.sub("", "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown") or path.read_text())


# ---- the sources ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*PAGES, *NOTEBOOKS], ids=name_of)
def test_a_page_has_its_headings_in_order_and_words_for_its_links_and_pictures(path):
    text = prose_of(path)
    levels = [len(marks) for marks in re.findall(r"^(#{1,6}) \S", text, re.MULTILINE)]
    assert levels[0] == 1 and levels.count(1) == 1 and all(below <= above + 1 for above, below in pairwise(levels))
    assert not {words.lower() for words in re.findall(r"(?<!!)\[([^\]]+)\]\(", text)} & EMPTY_WORDS
    assert all(len(words.split()) >= WORDS for words in re.findall(r"!\[([^\]]*)\]\(", text))


@pytest.mark.parametrize("name", [source.stem for source in sources([])])
def test_every_picture_of_a_stored_walkthrough_says_what_it_shows(name):
    """In the place where nbconvert, and tools/build_site.py, look for it."""
    told = [output.metadata.get("image/png", {}).get("alt", "")
            for cell in read_stored(name).cells for output in cell.get("outputs", ())
            if "image/png" in output.get("data", {})]
    assert all(len(words.split()) >= WORDS for words in told)
    assert len(set(told)) == len(told), "two pictures with one text"


def test_a_picture_brings_its_text_along():
    figure = draw_bars({"one rank": {"weights": 3.0, "gradients": 1.5}, "four\nranks": {"weights": 0.75}}, "GB")
    show = DisplayFormatter()
    show.formatters["image/png"].for_type(Figure, lambda _: b"PNG")     # as Jupyter's own
    data, metadata = show.format(figure)
    assert data["image/png"] == b"PNG"
    assert metadata["image/png"]["alt"] == ("Bars, GB: one rank 4.5 (weights 3, gradients 1.5); four ranks 0.75.")


@pytest.mark.parametrize("path", sorted(ROOT.glob("shardlab/notebook/**/*.py")), ids=name_of)
def test_a_function_that_returns_a_picture_puts_it_into_words(path):
    for one in ast.walk(ast.parse(path.read_text())):
        if isinstance(one, ast.FunctionDef) and one.returns and ast.unparse(one.returns) == "Picture":
            body = ast.unparse(one)
            assert "return described(" in body or "return timelines_figure(" in body, f"{one.name} says nothing"


# ---- pages in a browser ---------------------------------------------------------------------------------------------

SITE = ("*.html", "docs/*.html", "docs/playground/*.html", "docs/pairs/*.html", "notebooks/*.html", "course/*.html",
        "course/[ls]*/*.html", "course/instructors/**/*.html", "benchmarks/*.html", "api/reference.layers.html",
        "_modules/mpi_impl/layers/mlp.html", "files/tests/training_theorems.py.html")
LISTS = "genindex.html", "py-modindex.html"     # of thousands of names
NARROW = {"width": 320, "height": 900}          # a desk's 1280 pixels at 400%
RULES = {"light": """{rules: {"heading-order": {enabled: true}},
                      runOnly: {type: "tag", values: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}}""",
         "dark": """{runOnly: ["color-contrast"]}"""}       # in which alone the two schemes differ


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def site(testrun_uid):
    return built_site(testrun_uid)


def faults_of(page, scheme: str = "light") -> list[str]:
    """Return what axe finds on a page against WCAG 2.1 A and AA, and in the order of headings."""
    package = pytest.importorskip("axe_playwright_python", reason="axe is not installed: pip install '.[docs]'")
    page.evaluate(Path(package.__file__).with_name("axe.min.js").read_text())
    return [f"{fault['id']}: {node['target']} {node['html'][:120]}"
            for fault in page.evaluate(f"axe.run({{exclude: ['iframe']}}, {RULES[scheme]})")["violations"]
            for node in fault["nodes"]]


@pytest.mark.deep
@pytest.mark.parametrize("scheme", RULES)
@pytest.mark.parametrize("pattern", SITE)
def test_axe_finds_nothing_on_the_site_and_no_page_is_wider_than_320_pixels(browser, site, pattern, scheme):
    paths, faults = sorted(set(site.glob(pattern)) - {site / name for name in LISTS}), {}
    with serve(site) as address:
        for name in [str(path.relative_to(site)) for path in paths]:
            page = browser.new_page(viewport=DESK, color_scheme=scheme)
            page.goto(f"{address}/{name}", wait_until="load")
            page.wait_for_selector("#progress", state="hidden", timeout=200_000)        # of Python, on the playground
            found = faults_of(page, scheme)
            page.set_viewport_size(NARROW)
            if (wide := page.evaluate("document.documentElement.scrollWidth")) > NARROW["width"]:
                found.append(f"it is {wide} pixels wide")
            page.close()
            faults |= {name: found} if found else {}
    assert paths and not faults


@pytest.mark.deep
def test_axe_finds_nothing_on_the_slides(browser, tmp_path):
    """On all slides of a deck, below one another as they are printed."""
    slides = pytest.importorskip("tools.slides", reason="the tools of slides are not installed: pip install '.[docs]'")
    assert slides.build(slides.SOURCE, tmp_path)
    for deck in slides.decks():
        page = browser.new_page(viewport=DESK)
        slides.open_deck(page, f"{(tmp_path / deck.stem).as_uri()}.html?print-pdf")
        page.wait_for_selector(".pdf-page")
        page.locator("section[aria-hidden]").evaluate_all("all => all.map(one => one.removeAttribute('aria-hidden'))")
        assert not faults_of(page), deck.stem
        page.close()


@pytest.mark.deep
def test_sliders_work_by_keyboard_and_say_their_values(browser):
    page = browser.new_page(viewport=DESK)
    page.set_content(f"<html lang=en><title>Sliders</title><main>{explore(t=4)._repr_html_()}</main>")
    seen = []
    while page.evaluate("document.activeElement.name") != "t":
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.name"))
    assert seen == ["model", "t"]
    said = page.locator("p[role=status]").text_content()
    page.keyboard.press("ArrowRight")
    assert page.locator("p[role=status]").text_content() != said
    assert page.evaluate("document.activeElement.getAttribute('aria-valuetext')") == "8"
    assert not faults_of(page)
    page.close()


@pytest.mark.deep
def test_the_skip_link_comes_first_and_what_has_the_focus_is_marked(browser, site):
    page = browser.new_page(viewport=DESK)
    page.goto((site / "docs" / "bug_zoo.html").as_uri())
    for i in range(40):
        page.keyboard.press("Tab")
        focus = page.locator(":focus")
        assert i or "Skip" in focus.text_content()
        assert focus.evaluate("one => getComputedStyle(one).outlineStyle") != "none", focus.get_attribute("class")
    page.close()


@pytest.mark.deep
def test_the_moving_picture_stands_still_where_motion_is_unwelcome_or_stopped(browser):
    picture = (ROOT / "docs" / "played_step.svg").as_uri()
    for address, motion, moves in ((picture, "no-preference", True), (picture, "reduce", False),
                                   (f"{picture}#still", "no-preference", False)):
        page = browser.new_page(reduced_motion=motion)
        page.goto(address)
        shown = page.locator(".moving").first.evaluate("one => getComputedStyle(one).display !== 'none'")
        ahead = page.locator(".ahead").evaluate("one => getComputedStyle(one).opacity")
        assert shown == moves and (ahead == "1") == (not moves)
        page.close()
