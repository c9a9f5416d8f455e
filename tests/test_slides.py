"""The slides of the course: their minutes, their numbers, and in a browser that nothing is cut off."""
import re

import pytest

pytest.importorskip("sphinx_revealjs", reason="the tools of slides are not installed: pip install '.[docs]'")

from tests.browser import complaints_of, open_browser  # noqa: E402
from tests.notebooks.test_numbers_said import NO_CLAIMS, numbers, output_text  # noqa: E402
from tools.notebooks import SOURCES, from_source  # noqa: E402
from tools.slides import (SOURCE, between, build, decks, faults_of, find_cell, path_of, print_pdfs,  # noqa: E402
                          slides_of, source_of, walkthroughs_of)

OF_PAPERS = {"01_splitting_matrices": {"8.3"}}          # Shoeybi et al. 2019, table 2
SHOWN = re.compile(r"^```\{(picture|output|cell|excerpt)\} (\S+)\n(?::.*\n)*((?:(?!```).*\n)*)```$", re.MULTILINE)
each_deck = pytest.mark.parametrize("deck", decks(), ids=lambda path: path.stem)


@each_deck
def test_a_deck_fills_an_hour_and_every_slide_has_notes_with_minutes(deck):
    slides = slides_of(deck)
    assert 20 <= len(slides) <= 30 and all(len(slide.minutes) == 1 for slide in slides)
    minutes = sum(slide.minutes[0] for slide in slides)
    assert 60 <= minutes <= 75
    assert f"({deck.name}) | {len(slides)} | {minutes} |" in (SOURCE / "README.md").read_text()
    assert f"({deck.name})" in (SOURCE / "index.md").read_text()


@each_deck
def test_a_question_for_a_number_is_answered_on_the_next_slide_and_the_last_says_what_students_can_do(deck):
    slides = slides_of(deck)
    asked = [i for i, slide in enumerate(slides) if "{container} predict" in slide.text]
    assert asked and all(slides[i].title.startswith("Write down") for i in asked)
    assert [i + 1 for i in asked] == [i for i, slide in enumerate(slides) if "{container} answer" in slide.text]
    assert slides[-1].title == "What you can do now" and "**Next:**" in slides[-1].text


@each_deck
def test_a_number_on_a_slide_stands_in_a_walkthrough_or_is_computed(deck):
    """All that are larger than 10, in text and notes. A deck computes others in lines `% assert ...`, run here."""
    text = deck.read_text()
    known, namespace = set(OF_PAPERS.get(deck.stem, set())), {}
    for line in re.findall(r"^% ((?:assert|from) .*)$", text, re.MULTILINE):
        exec(line, namespace)
        known |= numbers(line.replace("_", ""))
    for name in walkthroughs_of(deck):
        path = path_of(name)
        cells = from_source(SOURCES / f"{path.stem}.py").cells
        code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
        known |= numbers(code.replace("_", "")) | numbers(output_text(path.stem))
    for pattern in [r"^%.*?$", *NO_CLAIMS, r"\bunits? \d+", r"^# \d+"]:
        text = re.sub(pattern, " ", text, flags=re.DOTALL | re.MULTILINE | re.IGNORECASE)
    assert {number for number in numbers(text) if "." in number or int(number) > 10} <= known


@each_deck
def test_what_a_deck_shows_of_walkthroughs_and_functions_is_there(deck):
    """Without a build, so that a change of a walkthrough finds the slides that quote it in a second."""
    for kind, name, piece in SHOWN.findall(deck.read_text()):
        if kind == "excerpt":
            source_of(name)
        else:
            find_cell(name, piece.strip("\n"))


@pytest.mark.parametrize("fault, sentence", [
    (lambda: find_cell("splitting_matrix", "x"), "there is no walkthrough 'splitting_matrix'"),
    (lambda: find_cell("splitting_matrices", "draw_matrices("), "4 cells of walkthrough"),
    (lambda: find_cell("splitting_matrices", "no such code"), "0 cells of walkthrough"),
    (lambda: between("one\ntwo", "two", "one"), "no line contains 'one'"),
    (lambda: between("one\ntwo", "three", None), "no line contains 'three'")])
def test_what_is_not_there_is_named_in_a_sentence(fault, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        fault()


def test_an_excerpt_is_the_function_without_its_docstring():
    text = source_of("reference.layers.mlp:sharded_mlp_forward")
    assert '"""' not in text and text.startswith("def sharded_mlp_forward(") and "region.leave(partial)" in text
    assert between("a\n  b\n  c\nd", "b", "c") == "b\nc"


# ---- all decks, in a browser ----

@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slides")
    assert build(SOURCE, folder)
    return folder


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.mark.deep
@each_deck
def test_from_disk_every_slide_fits_and_nothing_is_fetched(built, browser, deck):
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    complaints = complaints_of(page)
    assert faults_of(page, built / f"{deck.stem}.html") == [] and complaints == []
    assert page.evaluate("Reveal.getTotalSlides()") == len(slides_of(deck))
    assert page.locator("mjx-container").count() > 0 and page.locator("mjx-merror").count() == 0
    page.close()


TOO_MUCH = {"lines": "\n\n".join(["a line"] * 30), "code": f"```python\n{'x' * 200}\n```", "formula": f"${'x' * 120}$"}


@pytest.mark.deep
@pytest.mark.parametrize("kind", TOO_MUCH)
def test_what_is_cut_off_is_found(tmp_path, browser, kind):
    (tmp_path / "index.md").write_text(f"# A deck\n\n## It fits\n\nx\n\n## It does not\n\n{TOO_MUCH[kind]}\n")
    assert build(tmp_path, tmp_path / "html")
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    fault, = faults_of(page, tmp_path / "html" / "index.html")
    assert fault.startswith("index, slide 3:")
    page.close()


@pytest.mark.deep
def test_a_pdf_has_a_page_for_each_slide(built, browser):
    print_pdfs(built, browser)
    for deck in decks():
        pages = re.findall(rb"/Type /Page\b", (built / f"{deck.stem}.pdf").read_bytes())
        assert len(pages) == len(slides_of(deck))
