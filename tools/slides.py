"""Build the slides: `python tools/slides.py [FOLDER]`, which is `./run.sh slides`.

Each deck is a page of Markdown in course/slides: a heading begins a slide. Four directives, which this module adds to
Sphinx, fetch what is shown from where it is true: `picture`, `output` and `cell` from a stored walkthrough, `excerpt`
from a function. `say` has what a speaker says, and how many minutes it takes. FOLDER (default: runs/slides) gets a
page of HTML for each deck, which needs no network; and, where there is a Chromium, a PDF.
"""
import argparse
import ast
import inspect
import re
import sys
import textwrap
from functools import cache
from html import escape
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.cmd.build import build_main
from sphinx.util.docutils import SphinxDirective
from sphinx_revealjs.nodes import revealjs_section

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.chromium import find_chromium  # noqa: E402
from tools.notebooks import read_stored  # noqa: E402

SOURCE = ROOT / "course" / "slides"
NOTE = re.compile(r"^:::\{say\} (\d+)\n.+?^:::$", re.MULTILINE | re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(prog="./run.sh slides", description="Build the slides, as HTML and PDF.")
    parser.add_argument("folder", nargs="?", metavar="FOLDER", type=Path, default=ROOT / "runs" / "slides",
                        help="where to write them (default: runs/slides)")
    parser.add_argument("--no-pdf", action="store_true", help="open no browser: write HTML alone")
    args = parser.parse_args()
    folder = args.folder.resolve()
    if not build(SOURCE, folder):
        sys.exit("error: the slides have faults, which are listed above.")
    print(f"There are {len(decks())} decks. Open {folder / 'index.html'}")
    if args.no_pdf:
        return
    if not (program := find_chromium()):
        print("There are no PDFs, and nobody has checked that all slides fit: this machine has no Chromium or Chrome.")
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as control:
        browser = control.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        faults = [fault for deck in decks() for fault in faults_of(page, folder / f"{deck.stem}.html")]
        print_pdfs(folder, browser)
        browser.close()
    for fault in faults:
        print(f"warning: {fault}")


def build(source: Path, folder: Path) -> bool:
    """Make pages of all decks in `source`, and report whether there was nothing to complain of."""
    failed = build_main(["-q", "-W", "--keep-going", "-E", "-b", "revealjs", "-c", str(SOURCE),
                         "-d", str(folder / ".doctrees"), str(source), str(folder)])
    for page in folder.glob("*.html"):      # reveal.js's own page forbids readers to zoom
        page.write_text(page.read_text().replace(", maximum-scale=1.0, user-scalable=no", ""))
    return not failed


def decks() -> list[Path]:
    """Return the Markdown of all decks."""
    return sorted(SOURCE.glob("[0-9]*.md"))


class Slide(NamedTuple):
    """A slide: its title, its Markdown, and the minutes that its notes say."""

    title: str
    text: str
    minutes: list[int]


def slides_of(deck: Path) -> list[Slide]:
    found = []
    for part in re.split(r"^##? ", deck.read_text(), flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        found.append(Slide(title, text, [int(minutes) for minutes in NOTE.findall(text)]))
    return found


def walkthroughs_of(deck: Path) -> list[str]:
    """Return the names of the walkthroughs that a deck is made of, without their numbers."""
    return re.search(r"^% walkthroughs: (.+)$", deck.read_text(), re.MULTILINE)[1].split()


# ---- in a browser ----

# What of the current slide is not within it, or is cut off by its own box. Notes are not shown.
CUT_OFF = """() => [...Reveal.getCurrentSlide().querySelectorAll('*')].filter(one => {
    const box = one.getBoundingClientRect();
    return !one.closest('aside') && box.width && (box.left < 0 || box.top < 0 || box.right > innerWidth
        || box.bottom > innerHeight - 20 || (one.matches('pre code') && one.scrollWidth > one.clientWidth + 1));
}).map(one => one.tagName.toLowerCase())"""


def open_deck(page, address: str) -> None:
    """Go to a deck, and wait until its formulas are set."""
    page.goto(address, wait_until="networkidle")
    page.wait_for_function("!document.querySelector('script[src*=tex-svg]') || window.MathJax?.startup?.promise")
    page.evaluate("window.MathJax?.startup?.promise.then(() => true)")


def faults_of(page, html: Path) -> list[str]:
    """Show each slide of a deck on a page of 1280 x 720, and return a sentence for each that does not fit."""
    open_deck(page, html.as_uri())
    faults = []
    for i in range(page.evaluate("Reveal.getTotalSlides()")):
        page.evaluate(f"Reveal.slide({i})")
        if found := page.evaluate(CUT_OFF):
            faults.append(f"{html.stem}, slide {i + 1}: {', '.join(dict.fromkeys(found))} does not fit.")
    return faults


def print_pdfs(folder: Path, browser) -> None:
    """Write a PDF beside each deck's page."""
    for deck in decks():
        page = browser.new_page()
        open_deck(page, f"{(folder / deck.stem).as_uri()}.html?print-pdf")
        page.wait_for_selector(".pdf-page")
        page.pdf(path=folder / f"{deck.stem}.pdf", prefer_css_page_size=True, print_background=True)
        page.close()


# ---- where things are ----

@cache
def walkthrough(name: str):
    """Return the stored notebook of this name."""
    return read_stored(path_of(name).stem)


def path_of(name: str) -> Path:
    """Return the file of a walkthrough; its number may change and is not part of its name."""
    found = list(ROOT.glob(f"notebooks/[0-9][0-9]_{name}.ipynb"))
    if len(found) != 1:
        raise ValueError(f"there is no walkthrough '{name}': name one as in 'splitting_matrices', without its number.")
    return found[0]


def find_cell(name: str, piece: str):
    """Return the only code cell of a walkthrough that contains this piece of code."""
    found = [cell for cell in walkthrough(name).cells if cell.cell_type == "code" and piece in cell.source]
    if len(found) != 1:
        raise ValueError(f"{len(found)} cells of walkthrough '{name}' contain {piece!r}: give a piece of just one.")
    return found[0]


def picture_of(cell) -> tuple[str, str]:
    """Return the picture that a cell shows, a PNG in base64, and what it shows in words."""
    found = [output for output in cell.outputs if "image/png" in output.get("data", {})]
    if not found:
        raise ValueError(f"this cell shows no picture: {cell.source.splitlines()[-1]!r}")
    return found[0].data["image/png"].replace("\n", ""), found[0].metadata["image/png"]["alt"]


def printed_by(cell) -> str:
    """Return what a cell prints, the value that it shows, or how it fails."""
    return "".join(output.get("text") or output.get("data", {}).get("text/plain")
                   or "\n".join(output.get("traceback", []))
                   for output in cell.outputs if "image/png" not in output.get("data", {}))


def source_of(place: str) -> str:
    """Return the code of a function without its docstring, as of `reference.layers.mlp:sharded_mlp_forward`."""
    module, _, path = place.partition(":")
    found = import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    text = textwrap.dedent(inspect.getsource(found))
    first = ast.parse(text).body[0].body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        lines = text.splitlines()
        text = "\n".join(lines[:first.lineno - 1] + lines[first.end_lineno:])
    return text


def between(text: str, first: str | None, last: str | None) -> str:
    """Return the lines from the first that contains `first` to the next that contains `last`, without indentation."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if (first or "") in line), None)
    end = None if begin is None else next((i for i in range(begin, len(lines)) if last and last in lines[i]), None)
    if begin is None or (last and end is None):
        raise ValueError(f"no line contains {first if begin is None else last!r} in:\n{text}")
    return textwrap.dedent("\n".join(lines[begin:None if end is None else end + 1]))


# ---- directives ----

def html(text: str) -> nodes.raw:
    return nodes.raw("", text, format="html")


class Fetched(SphinxDirective):
    """A directive that shows what `fetch` returns; what cannot be found is an error of the page."""

    required_arguments, has_content = 1, True
    option_spec = {"from": directives.unchanged, "to": directives.unchanged}

    def run(self):
        try:
            return self.fetch(self.arguments[0], "\n".join(self.content))
        except ValueError as error:
            raise self.error(str(error)) from error

    def code(self, text: str, language: str):
        text = re.sub(r" {3,}#", "  #", between(text, self.options.get("from"), self.options.get("to")).strip("\n"))
        columns = max(map(len, text.splitlines()))      # by which theme.css chooses the size of letters
        block = nodes.literal_block(text, text, language=language, linenos=False)
        return [html(f'<div class="code" style="--columns: {columns}">'), block, html("</div>")]


class Picture(Fetched):
    """The picture that a walkthrough's cell shows, of at most this height in pixels."""

    option_spec = {"height": directives.nonnegative_int}

    def fetch(self, name, piece):
        data, words = picture_of(find_cell(name, piece))
        height = f' style="max-height: {self.options["height"]}px"' if "height" in self.options else ""
        return [html(f'<img class="picture" alt="{escape(words)}" src="data:image/png;base64,{data}"{height}>')]


class Output(Fetched):
    """The output of a walkthrough's cell."""

    def fetch(self, name, piece):
        return self.code(printed_by(find_cell(name, piece)), "text")


class Cell(Fetched):
    """The code of a walkthrough's cell."""

    def fetch(self, name, piece):
        return self.code(find_cell(name, piece).source, "python")


class Excerpt(Fetched):
    """The code of a function."""

    def fetch(self, place, _):
        return self.code(source_of(place), "python")


class Say(SphinxDirective):
    """The speaker's notes to a slide, and how many minutes they take."""

    required_arguments, has_content = 1, True

    def run(self):
        minutes = int(self.arguments[0])
        pace = revealjs_section()
        pace["data-timing"] = 60 * minutes      # for the clock of the speaker's view
        return [pace, html(f'<aside class="notes"><p><b>{minutes} min</b></p>'), *self.parse_content_to_nodes(),
                html("</aside>")]


def setup(app):
    for one in Picture, Output, Cell, Excerpt, Say:
        app.add_directive(one.__name__.lower(), one)


if __name__ == "__main__":
    main()
