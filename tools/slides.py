"""Build the slides: `python tools/slides.py [FOLDER]`, which is `./run.sh slides`.

Each deck is a page of Markdown in course/slides: a heading begins a slide. Four directives, which this module adds to
Sphinx, fetch what is shown from where it is true: `picture`, `output` and `cell` from a stored walkthrough, `excerpt` from
a function. `say` has what a speaker says, and how many minutes it takes. FOLDER (default: runs/slides) gets a page
of HTML for each deck, which needs no network; and, where there is a Chromium, a PDF.
"""
import ast
import inspect
import shutil
import sys
import textwrap
from functools import cache
from importlib import import_module
from pathlib import Path

import nbformat
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.cmd.build import build_main
from sphinx.util.docutils import SphinxDirective
from sphinx_revealjs.nodes import revealjs_section

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "course" / "slides"
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable",
             "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "runs" / "slides").resolve()
    if build_main(["-q", "-W", "--keep-going", "-E", "-b", "revealjs", "-d", str(folder / ".doctrees"), str(SOURCE),
                   str(folder)]):
        sys.exit("error: the slides have faults, which are listed above.")
    printed = print_pdfs(folder)
    print(f"There are {len(decks())} decks. Open {folder / 'index.html'}"
          + ("" if printed else "\nThere are no PDFs, since this machine has neither Chromium nor Chrome."))


def decks() -> list[Path]:
    """Return the Markdown of all decks."""
    return sorted(SOURCE.glob("[0-9]*.md"))


def print_pdfs(folder: Path) -> bool:
    """Write a PDF beside each deck's page, or return False where no browser is installed."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if program is None:
        return False
    with sync_playwright() as control:
        browser = control.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        for deck in decks():
            page = browser.new_page()
            page.goto(f"{(folder / deck.stem).as_uri()}.html?print-pdf", wait_until="networkidle")
            page.evaluate("MathJax.startup.promise")
            page.wait_for_selector(".pdf-page")
            page.pdf(path=folder / f"{deck.stem}.pdf", prefer_css_page_size=True, print_background=True)
            page.close()
        browser.close()
    return True


# ---- where things are ----

@cache
def walkthrough(name: str):
    """Return the stored notebook of this name; its number may change and is not part of it."""
    found = list(ROOT.glob(f"notebooks/[0-9][0-9]_{name}.ipynb"))
    if len(found) != 1:
        raise ValueError(f"there is no walkthrough '{name}': name one as in 'splitting_matrices', without its number.")
    return nbformat.read(found[0], as_version=4)


def find_cell(name: str, piece: str):
    """Return the only code cell of a walkthrough that contains this piece of code."""
    found = [cell for cell in walkthrough(name).cells if cell.cell_type == "code" and piece in cell.source]
    if len(found) != 1:
        raise ValueError(f"{len(found)} cells of walkthrough '{name}' contain {piece!r}: give a piece of just one.")
    return found[0]


def picture_of(cell) -> str:
    """Return the picture that a cell shows, a PNG in base64."""
    found = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
    if not found:
        raise ValueError(f"this cell shows no picture: {cell.source.splitlines()[-1]!r}")
    return found[0].replace("\n", "")


def printed_by(cell) -> str:
    """Return what a cell prints, the value that it shows, or how it fails."""
    return "".join(output.get("text") or output.get("data", {}).get("text/plain") or "\n".join(output.get("traceback", []))
                   for output in cell.outputs)


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

class Fetched(SphinxDirective):
    """A directive that shows what `fetch` returns; what cannot be found is an error of the page."""

    required_arguments, has_content = 1, True
    option_spec = {"from": directives.unchanged, "to": directives.unchanged}

    def run(self):
        try:
            return [self.fetch(self.arguments[0], "\n".join(self.content))]
        except ValueError as error:
            raise self.error(str(error)) from error

    def code(self, text: str, language: str):
        text = between(text, self.options.get("from"), self.options.get("to"))
        return nodes.literal_block(text, text, language=language, linenos=False)


class Picture(Fetched):
    """The picture that a walkthrough's cell shows."""

    def fetch(self, name, piece):
        url = f"data:image/png;base64,{picture_of(find_cell(name, piece))}"
        return nodes.raw("", f'<img class="picture" alt="a picture of the walkthrough" src="{url}">', format="html")


class Output(Fetched):
    """What a walkthrough's cell prints."""

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
    """What the speaker says about a slide, in the given number of minutes."""

    required_arguments, has_content = 1, True

    def run(self):
        minutes = int(self.arguments[0])
        pace = revealjs_section()
        pace["data-timing"] = 60 * minutes      # for the clock of the speaker's view
        return [pace, nodes.raw("", f'<aside class="notes"><p><b>{minutes} min</b></p>', format="html"),
                *self.parse_content_to_nodes(), nodes.raw("", "</aside>", format="html")]


def setup(app):
    for one in Picture, Output, Cell, Excerpt, Say:
        app.add_directive(one.__name__.lower(), one)


if __name__ == "__main__":
    main()
