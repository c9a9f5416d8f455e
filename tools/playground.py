"""Build the playground: static pages that run the textbook's own Python. `python -m tools.playground FOLDER`.

A page NAME is docs/playground/NAME.html with its NAME.js, which draws, and NAME.py, which computes, in the browser, by
the textbook's functions. This module adds NAME.data.js: the sources that NAME.py imports, and what its `first_answers`
returns, so that the page has something to show before Python is loaded. Python itself is Pyodide, which `npm` fetches
once, into docs/_build/pyodide. Each of its files is written as a script, since from disk a browser loads nothing else.
"""
import base64
import gzip
import hashlib
import importlib
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from reference.errors import UserError
from reference.options import OptionParser
from shardlab.report.charts import COLORS, WORDS

ROOT = Path(__file__).parents[1]
PLACE = Path("docs", "playground")      # in the repository, and on the site
SOURCE, BUILD = ROOT / PLACE, ROOT / "docs" / "_build"
REPORT = ROOT / "shardlab" / "report" / "page"
SHARED = "page.css", "elements.js"      # of the report's page, which these pages use, too
PAGES = ("pipelines", "ranks", "mlp")
COMPUTED = ("mlp",)         # of these, those that need no Python in the browser: first answers are all that they show
PACKAGE, VERSION = "pyodide", "314.0.7"
SHA512 = ("d18bd7c4485f11da4b7dbfd790cd8114078c44eab488c517d9bcf31fda4eb6dc"
          "8c716930abe1db139bb2b860fcd8b37bcb6abe48dbe2ffa579244b0e943d91d4")
ARCHIVE = BUILD / PACKAGE / f"{PACKAGE}-{VERSION}.tgz"
RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "pyodide-lock.json", "python_stdlib.zip")
WORKER = "worker.mjs"


def main() -> None:
    parser = OptionParser(prog="tools.playground", description="Write the pages of the playground.")
    parser.add_argument("folder", type=Path, help="where; files of earlier pages are written over")
    folder = parser.parse_args().folder
    try:
        build(folder)
    except OSError as error:
        parser.error(f"{folder} cannot be written: {error.strerror}.")
    print(f"Open {folder / PAGES[0]}.html")


def build(folder: Path) -> None:
    """Write all pages into a folder. Without Pyodide, they show their first answers, and say why nothing else."""
    shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("*.py", WORKER, "__pycache__"), dirs_exist_ok=True)
    for name in SHARED:
        shutil.copy2(REPORT / name, folder)
    try:
        runtime: dict[str, int] | str = write_runtime(fetch(), folder / "runtime")
    except UserError as error:
        runtime = (f"This copy of the page has no Python, so it only shows what it begins with. {error} Then build the "
                   "site again: ./run.sh docs")
        print(f"warning: the playground has no Python. {error}", file=sys.stderr)
    for name in PAGES:
        page = {"first": page_module(name).first_answers(), "colors": COLORS, "words": WORDS}
        if name not in COMPUTED:
            page |= {"runtime": runtime, "files": sources(name)}
        (folder / f"{name}.data.js").write_text(f"const PAGE = {json.dumps(page, allow_nan=False)};\n")


def page_module(name: str):
    return importlib.import_module(f"docs.playground.{name}")


def sources(name: str) -> dict[str, str]:
    """Return the text of a page's module and of every module of the textbook that it imports, by path."""
    listing = f"import sys; sys.path[:0] = {[str(ROOT), str(SOURCE)]}; import {name}; print(*sorted(" \
              "module.__file__ for key, module in sys.modules.items() if key.split('.')[0] == 'reference'), sep='\\n')"
    run = subprocess.run([sys.executable, "-P", "-c", listing], capture_output=True, text=True, check=True)
    paths = [Path(line) for line in run.stdout.split("\n") if line]
    return {f"{name}.py": (SOURCE / f"{name}.py").read_text()} | {
        str(path.relative_to(ROOT)): path.read_text() for path in paths}


# ---- Pyodide ----

def fetch() -> Path:
    """Return Pyodide's archive, which npm fetches the first time. Raises UserError where that fails."""
    if not ARCHIVE.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise UserError("It is fetched with npm, which this machine lacks. Install Node.js, which brings npm.")
        ARCHIVE.parent.mkdir(parents=True, exist_ok=True)
        run = subprocess.run([npm, "pack", f"{PACKAGE}@{VERSION}", "--fetch-retries=1"], cwd=ARCHIVE.parent,
                             capture_output=True, text=True)
        if run.returncode:
            raise UserError(f"npm could not fetch {PACKAGE}@{VERSION}. Connect this machine to npm's registry.")
    if hashlib.sha512(ARCHIVE.read_bytes()).hexdigest() != SHA512:
        ARCHIVE.unlink()
        raise UserError(f"What npm fetched as {PACKAGE}@{VERSION} is not what it was when this program was written. "
                        "Find out who changes what your registry delivers.")
    return ARCHIVE


def write_runtime(archive: Path, folder: Path) -> dict[str, int]:
    """Write each file that a browser needs to run Python as a script; return the scripts' sizes in bytes, by file."""
    with tarfile.open(archive) as packed:
        files = {name: packed.extractfile(f"package/{name}").read() for name in RUNTIME}
    files[WORKER] = (SOURCE / WORKER).read_bytes()
    folder.mkdir(exist_ok=True)
    return {name: (folder / f"{name}.js").write_text(
        f'scriptOf("{name}", "{base64.b64encode(gzip.compress(content, mtime=0)).decode()}");\n')
        for name, content in files.items()}


if __name__ == "__main__":
    main()
