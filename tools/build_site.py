"""Build the site: `python tools/build_site.py`, which is `./run.sh docs`.

Pages are gathered in docs/_build/source, each at its place in the repository, so that relative links hold. Sphinx
makes docs/_build/html of them, offline, with the slides; walkthroughs are shown with their answers. Only the demo is
run, for a few iterations, since its page is on the front page, and so are five pairs of runs (docs/two_runs.md). The
pages of the playground (tools/playground.py) are added to Sphinx's. A warning of Sphinx is an error, and so is an
internal link or a picture of a finished page that leads nowhere. In a clone from GitHub, pages have links to edit
them, and notebooks to open them elsewhere.
"""
import ast
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
from sphinx.cmd.build import build_main

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from course.grading.lab_source import labs, notebook_of  # noqa: E402
from course.grading.release import without_secrets  # noqa: E402
from shardlab.command import RESULTS  # noqa: E402
from tools import playground, slides  # noqa: E402
from tools.api_pages import PACKAGES, api_page_of, api_pages, module_of, source_page_of  # noqa: E402
from tools.notebooks import read_stored  # noqa: E402

BUILD = ROOT / "docs" / "_build"
PAGES = ("CONTRIBUTING.md", "MAINTAINERS.md", "copyright.md", "docs/*.md", "benchmarks/README.md",
         "notebooks/README.md", "notebooks/[0-9]*.ipynb", "course/README.md", "course/instructors/**/*.md",
         "course/slides/README.md")
SHEET = "course/cheat_sheet.html"       # which is a page already, as those of the playground
READY = {SHEET} | {f"docs/playground/{name}.html" for name in playground.PAGES}
PICTURES = ("docs/*.svg", "docs/*.png", "benchmarks/*.svg")
LISTS = "docs/index.md"     # of the site's pages, by section: appended to README.md, the front page
REPORT = "report.html"      # of a run of the demo, beside the front page
PAIRS = "benchmarks/bug_matrix/pairs.py"      # writes pages of two runs: a link to a line of it leads to a page
PAIRS_FOLDER = "docs/pairs"
ITERATIONS = 100            # of that run: half a minute
LIVE = f"""
## The page of a run, live

This is the page that the demo writes, here of a run of {ITERATIONS} iterations. Press Play: a step runs, action by
action, and each message appears when it is sent. [It fills a window, too](built:{REPORT}).

```{{raw}} html
<iframe class="report" src="{REPORT}" title="The page of a training run" loading="lazy"></iframe>
```
"""
FEW_LINES = 3               # of a cell, that are shown whatever they do
AT_THE_STEP = """
<script>if (parent !== window) scrollTo(0, document.getElementById("step").offsetTop);</script>
"""                         # where the page is part of another, which an anchor would scroll, too
DECK = """# Deck {title}

{n} slides in {minutes} minutes, on {walkthroughs}. [Open the slides](built:../../slides/{name}.html): S shows what to
say, with a clock, F fills the screen, Esc shows all. `./run.sh slides` writes a PDF, too; [how to make them
yours](README.md).

| | slide | minutes |
|---|---|---|
{rows}
"""
ARTICLE = re.compile(r'<article role="main"[^>]*>(.*)</article>', re.DOTALL)
NO_TEXT = re.compile(r'<(script|style|summary)\b.*?</\1>|<a class="headerlink".*?</a>|<(?!/?section)[^>]*>', re.DOTALL)
QUESTION = re.compile(r"^- \*\*(.+?)\*\* (.+?)\n(?=- |\n|\Z)", re.MULTILINE | re.DOTALL)
LONGEST = 50_000            # characters of a page that a search from disk shows pieces of
DRAWS = re.compile(r"\b(draw_\w+|timelines_figure|Picture|figure|axes)\b")     # in a statement that draws
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])+)\]\(([^()\s]+)\)")
CODE = re.compile(rf"(?<![\[`])`((?:{'|'.join(PACKAGES)})[\w./]*)`(?![\]`])")
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".toml": "toml", ".yml": "yaml"}
COLAB, BINDER = "https://colab.research.google.com/github", "https://mybinder.org/v2/gh"
CODESPACES = "https://codespaces.new"
RELEASED = "runs/course/release"    # where Binder and a codespace have the labs: each makes a course when it is built


def main() -> None:
    source, html = BUILD / "source", BUILD / "html"
    for folder in source, html, BUILD / "doctrees":
        shutil.rmtree(folder, ignore_errors=True)
    place = repository()
    Site(source, place).gather()
    write_scorer(BUILD / "scorer.js")
    (html / SHEET).parent.mkdir(parents=True)
    shutil.copy2(ROOT / SHEET, html / SHEET)
    (html / REPORT).write_text(report_of_demo(BUILD / "demo").read_text() + AT_THE_STEP)
    write_pairs(html / PAIRS_FOLDER)
    failed = build_main(["-q", "-W", "--keep-going", "-j", "auto", "-c", str(ROOT / "docs"),
                         "-D", f"html_context.repository={place or ''}",
                         "-d", str(BUILD / "doctrees"), str(source), str(html)])
    playground.build(html / playground.PLACE)
    # In a process of its own, since Sphinx keeps in its module which parser reads Markdown.
    run = subprocess.run([sys.executable, slides.__file__, html / "slides", "--no-pdf"], stdout=subprocess.DEVNULL)
    shutil.rmtree(html / "slides" / ".doctrees", ignore_errors=True)
    write_texts(html)
    faults = broken_links(html)
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    if failed or run.returncode or faults:
        sys.exit("error: the site has faults, which are listed above.")
    print(f"The site has {len(list(html.rglob('*.html')))} pages. Open {html / 'index.html'}")


def repository() -> str | None:
    """Return OWNER/NAME of this repository on GitHub, which git knows where it was cloned from there; else None."""
    told = subprocess.run(["git", "-C", str(ROOT), "remote", "get-url", "origin"], capture_output=True, text=True)
    found = re.search(r"github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?/?$", told.stdout.strip())
    return found[1] if found else None


def report_of_demo(folder: Path) -> Path:
    """Run the demo, and return the page that it writes."""
    folder.mkdir(exist_ok=True)
    run = subprocess.run([sys.executable, "-m", "shardlab", "demo", "--train-iters", str(ITERATIONS)],
                         cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"error: the demo failed, so that the front page has no page of a run. It said:\n{run.stderr}")
    return folder / RESULTS / REPORT


def write_pairs(folder: Path) -> None:
    """Record the pairs of runs that docs/two_runs.md shows, and write their pages."""
    run = subprocess.run([sys.executable, "-m", PAIRS.replace("/", ".").removesuffix(".py"), folder], cwd=ROOT,
                         capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"error: the pairs of runs have no pages. Recording them said:\n{run.stderr}")


def write_scorer(path: Path) -> None:
    """Write what orders the results of a search: docs/scorer.js, and each question with the page that answers it."""
    asked = []
    for question, answer in QUESTION.findall((ROOT / "docs/questions.md").read_text()):
        page = re.search(r"\]\(([\w./]+)\.(?:md|ipynb)", answer)
        if page:
            asked.append([" ".join(question.split()), posixpath.normpath(posixpath.join("docs", page[1]))])
    path.write_text(f"const QUESTIONS = {json.dumps(asked)};\n{(ROOT / 'docs/scorer.js').read_text()}")


def write_texts(html: Path) -> None:
    """Write the pages' texts as a script, for excerpts of a search from disk, where a browser fetches no page."""
    names = json.loads(re.search(r'"docnames":(\[.*?\])', (html / "searchindex.js").read_text())[1])
    texts = {name: " ".join(NO_TEXT.sub("", ARTICLE.search((html / f"{name}.html").read_text())[1]).split())[:LONGEST]
             for name in names}
    (html / "_static" / "texts.js").write_text(f"const TEXTS = {json.dumps(texts, ensure_ascii=False)};\n")


# ---- the pages ----

class Site:
    """The folder of pages that Sphinx reads. `repository` is OWNER/NAME on GitHub, or None."""

    def __init__(self, folder: Path, repository: str | None):
        self.folder, self.repository = folder, repository
        self.pages = {str(path.relative_to(ROOT)) for pattern in PAGES for path in ROOT.glob(pattern)} - {LISTS}
        self.pages |= {f"course/labs/{source.stem}.ipynb" for source in labs()}
        self.pages |= {f"course/slides/{deck.name}" for deck in slides.decks()}

    def gather(self) -> None:
        """Write all pages and pictures."""
        head, commands, others = self.linked((ROOT / "README.md").read_text(), "README.md").split("\n## ", 2)
        self.write("index.md", f"{head}\n## {commands}{LIVE}\n## {others}\n{(ROOT / LISTS).read_text()}")
        for page in sorted(self.pages):
            if page.endswith(".md"):
                text = outline(ROOT / page) if ROOT / page in slides.decks() else (ROOT / page).read_text()
                self.write(page, self.linked(text, page))
            elif (ROOT / page).exists():
                self.write_notebook(page, self.with_badges(read_stored(Path(page).stem), page))
        for source in labs():
            lab = f"{source.stem}.ipynb"
            notebook = self.with_badges(without_secrets(notebook_of(source)), f"{RELEASED}/{source.stem}/{lab}")
            self.write_notebook(f"course/labs/{lab}", notebook)
        for page, text in api_pages().items():
            self.write(page, text)
        for pattern in PICTURES:
            for picture in ROOT.glob(pattern):
                copy = self.folder / picture.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(picture, copy)

    def write(self, page: str, text: str) -> None:
        path = self.folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def write_notebook(self, page: str, notebook) -> None:
        notebook.metadata.language_info.pygments_lexer = "walkthrough"      # in docs/conf.py
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = self.linked(cell.source, page)
                continue
            if draws(cell.source):
                cell.metadata["tags"] = [*cell.metadata.get("tags", []), "hide-input"]      # a line unfolds it
            for output in cell.outputs:
                if picture := output.get("metadata", {}).get("image/png"):
                    cell.metadata["mystnb"] = {"image": {"alt": picture["alt"]}}
        self.write(page, nbformat.writes(notebook))

    def with_badges(self, notebook, place: str):
        """Put links that open a notebook elsewhere below its title, if the repository's address is known.

        `place` is its path where it opens. Colab reads it from the repository, which holds walkthroughs but no labs.
        """
        if self.repository:
            title, _, rest = notebook.cells[0].source.partition("\n")
            badges = (f"[Open in Binder]({BINDER}/{self.repository}/HEAD?urlpath=lab/tree/{place}){{.badge}}\n"
                      f"[Open a codespace]({CODESPACES}/{self.repository}?quickstart=1){{.badge}}\n")
            said = f"In the codespace, open `{place}`."
            if place in self.pages:
                badges = f"[Open in Colab]({COLAB}/{self.repository}/blob/HEAD/{place}){{.badge}}\n{badges}"
                said += (" On Colab, first run this in a cell of its own:\n\n```\n%pip install --quiet "
                         f'"shardlab[mpich] @ git+https://github.com/{self.repository}"\n```')
            notebook.cells[0].source = f"{title}\n\n{badges}\n{said}\n\n{rest}"
        return notebook

    # ---- links, from the repository's files to the site's pages ----

    def linked(self, text: str, page: str) -> str:
        """Return a page's Markdown with links to the site's pages in place of those to the repository's files."""
        def link(found: re.Match) -> str:
            url = self.url(found[2], page)
            return f"[{found[1]}]({url})" if url else found[1]

        def code(found: re.Match) -> str:
            if "/" not in found[1]:     # a name with dots: Sphinx looks up shardlab.compare, but not shardlab.zip
                inside = ROOT.joinpath(*found[1].split(".")[:2])
                is_module = "." in found[1] and (inside.is_dir() or inside.with_suffix(".py").exists())
                return f"{{py:obj}}`{found[1]}`" if is_module else found[0]
            place = found[1].rstrip("/")
            url = (ROOT / place).exists() and self.url(posixpath.relpath(place, posixpath.dirname(page) or "."), page)
            return f"[{found[0]}]({url})" if url else found[0]

        return "".join(part if i % 2 else CODE.sub(code, LINK.sub(link, part))
                       for i, part in enumerate(FENCE.split(text)))

    def url(self, target: str, page: str) -> str | None:
        """Return the link on a page of the site for a link in the repository; None for a folder without a page."""
        path, _, anchor = target.partition("#")
        if not path or re.match(r"\w+:", path):
            return target
        place = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
        if not (ROOT / place).exists() and place not in self.pages:
            sys.exit(f"error: {page} links to {target}, which does not exist.")
        here = posixpath.dirname(page) or "."

        def relative(to: str) -> str:
            return posixpath.relpath(to, here) + ("#" + anchor if anchor else "")

        if place == "README.md":
            return relative("index.md")
        notebook = f"{place.removesuffix('.py').replace('/sources/', '/')}.ipynb"
        for one in place, f"{place}/README.md", notebook:
            if one in self.pages:
                return relative(one)
        if place == PAIRS and anchor:
            name = (ROOT / place).read_text().splitlines()[int(anchor.removeprefix("L")) - 1].split('"')[1]
            return "built:" + relative(f"{PAIRS_FOLDER}/{name}.html").partition("#")[0]
        if place in READY:
            return "built:" + relative(place)
        if place.split("/")[0] in PACKAGES:
            if module_of(place):
                return "built:" + relative(source_page_of(place))
            if api_page_of(place):
                return relative(api_page_of(place))
        if (ROOT / place).is_file():
            anchor = re.sub(r"L\d+", "", anchor)        # GitHub's, of a line
            return relative(self.file_page(place))
        return f"https://github.com/{self.repository}/tree/HEAD/{place}" if self.repository else None

    def file_page(self, place: str) -> str:
        """Write a page that shows a file, and return its path."""
        page = f"files/{place}.md"
        if not (self.folder / page).exists():
            self.write(f"files/{place}.txt", (ROOT / place).read_text())
            language = LANGUAGES.get(Path(place).suffix, "none")
            self.write(page, f"---\norphan: true\n---\n# `{place}`\n\n"
                             f"```{{literalinclude}} {Path(place).name}.txt\n:language: {language}\n```\n")
        return page


def outline(deck: Path) -> str:
    """Return the page of a deck: its slides, how long each takes, and where they are."""
    found = slides.slides_of(deck)
    of = [slides.path_of(name) for name in slides.walkthroughs_of(deck)]
    return DECK.format(
        title=found[0].title, n=len(found), minutes=sum(sum(one.minutes) for one in found), name=deck.stem,
        walkthroughs=", ".join(f"[walkthrough {int(path.stem[:2])}](../../notebooks/{path.name})" for path in of),
        rows="\n".join(f"| {i} | {one.title} | {sum(one.minutes)} |" for i, one in enumerate(found, 1)))


def draws(source: str) -> bool:
    """Report whether a cell mainly draws, and has more than a call: more than half of its lines, without imports."""
    try:
        statements = [one for one in ast.parse(source).body if not isinstance(one, ast.Import | ast.ImportFrom)]
    except SyntaxError:     # a cell for ranks begins with a word for IPython
        return False
    lines = [(one.end_lineno or 0) - one.lineno + 1 for one in statements]
    drawing = [n for n, one in zip(lines, statements, strict=True) if DRAWS.search(ast.unparse(one))]
    return sum(lines) > FEW_LINES and 2 * sum(drawing) > sum(lines)


# ---- links of the finished pages ----

class Page(HTMLParser):
    """The targets (`links`) and anchors (`ids`) of a page."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        about = dict(attrs)
        self.ids |= {about[key] for key in ("id", "name") if about.get(key)}
        self.links += [about[key] for key in ("href", "src") if about.get(key)]


def broken_links(html: Path) -> list[str]:
    """Return a sentence for each internal link, image or script of the pages in a folder that leads nowhere."""
    pages = {path: Page(path) for path in sorted(html.rglob("*.html")) if "_static" not in path.parts}
    faults = []
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            place = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if place.is_dir():
                place /= "index.html"
            missing = not place.exists() or (place in pages and parts.fragment
                                             and unquote(parts.fragment) not in pages[place].ids)
            if missing:
                faults.append(f"{path.relative_to(html)} links to {link}, which does not exist.")
    return faults


if __name__ == "__main__":
    main()
