"""The API of the packages as pages of the site: a page for each folder, and docstrings as Sphinx reads them."""
import inspect
import re
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("reference", "mpi_impl", "shardlab", "course")
TITLES = {"reference": "the textbook", "mpi_impl": "the machine", "shardlab": "the bench",
          "course": "labs and their grading"}
TWINS = {"reference": ("mpi_impl", "On ranks"), "mpi_impl": ("reference", "In the textbook")}
PATH = re.compile(rf"\b(?:{'|'.join(PACKAGES)})/[\w/]+\.py\b")
FIELD = re.compile(r"^    (\w+): [^#\n]*#\s*(.*)$", re.MULTILINE)


# ---- which page has which module ----

def module_of(place: str) -> str | None:
    """Return the module's name of a file such as reference/layers/mlp.py, or None."""
    path = ROOT / place
    if path.suffix != ".py" or path.name == "__main__.py" or not path.is_file():
        return None
    if not api_page_of(str(Path(place).parent)):
        return None
    return place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def source_page_of(place: str) -> str:
    """Return the page that shows a module's source, which Sphinx's viewcode makes."""
    return f"_modules/{place.removesuffix('.py').removesuffix('/__init__')}.html"


def api_page_of(folder: str) -> str | None:
    """Return the page of a package's folder, or None."""
    documented = (ROOT / folder / "__init__.py").is_file() and not folder.endswith("tests")
    return f"api/{folder.replace('/', '.')}.rst" if documented else None


def folders() -> list[str]:
    """Return the folders of all packages, in order."""
    found = [path.parent for package in PACKAGES for path in sorted((ROOT / package).rglob("__init__.py"))]
    return [folder for path in found if api_page_of(folder := str(path.relative_to(ROOT)))]


def api_pages() -> dict[str, str]:
    """Return the text of each page of the API, by its path."""
    entries = "\n".join(f"   {TITLES[package].capitalize()}: {package} <{package}>" for package in PACKAGES)
    pages = {"api/index.rst": f"API\n===\n\n.. toctree::\n   :maxdepth: 2\n\n{entries}\n"}
    for folder in folders():
        pages[f"api/{folder.replace('/', '.')}.rst"] = folder_page(folder)
    return pages


def folder_page(folder: str) -> str:
    """Return the page of a folder: its own docstring, its folders, its modules."""
    name = folder.replace("/", ".")
    text = [heading(name, "="), f".. automodule:: {name}\n"]
    if inner := [one for one in folders() if Path(one).parent == Path(folder)]:
        entries = "\n".join(f"   {one.replace('/', '.')}" for one in inner)
        text.append(f".. toctree::\n   :maxdepth: 1\n\n{entries}\n")
    for path in sorted((ROOT / folder).glob("*.py")):
        place = str(path.relative_to(ROOT))
        if path.name not in ("__init__.py", "__main__.py"):
            text += [heading(path.stem, "-"), twin(place), f".. automodule:: {module_of(place)}\n"]
    return "\n".join(text)


def heading(title: str, line: str) -> str:
    return f"``{title}``\n{line * (len(title) + 4)}\n"


def twin(place: str) -> str:
    """Return a line that links to the module of the same name in the other package, or nothing."""
    package, _, rest = place.partition("/")
    other, where = TWINS.get(package, ("", ""))
    module = other and module_of(f"{other}/{rest}")
    return f"{where}: :py:mod:`{module}`\n" if module else ""


# ---- docstrings ----

def read_docstring(app, what, name, thing, options, lines) -> None:
    """Turn a docstring's lines into reStructuredText, in place; a class's also lists its fields with their comments."""
    text = restructured("\n".join(lines))
    if what == "class" and (comments := field_comments(thing)):
        text += "\n\n" + "\n".join(f"- ``{field}``: {restructured(comment)}" for field, comment in comments.items())
    lines[:] = [*text.split("\n"), ""]


def skip_field(app, what, name, thing, skip, options) -> bool:
    """Leave fields out of a class's members: its docstring lists them."""
    return skip or (what == "class" and not callable(thing)
                    and not isinstance(thing, (property, cached_property, classmethod, staticmethod)))


def field_comments(cls) -> dict[str, str]:
    """Return the comments at the ends of the lines that declare a class's fields, such as their shapes."""
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):
        return {}
    return {field: comment for field, comment in FIELD.findall(source) if comment and field in cls.__annotations__}


def restructured(text: str) -> str:
    """Return a docstring as reStructuredText: code and what is indented are literal, names of files are links."""
    paragraphs: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.split("\n")
        listed = re.match(r"- ", paragraph)
        if any(line.startswith("  ") for line in lines) and not listed:      # a table, or a command
            if not (paragraphs and paragraphs[-1].startswith("   ")):
                paragraphs.append("::")
            paragraphs.append("\n".join(f"   {line}" for line in lines))
        else:
            paragraphs.append(re.sub(r"(\w?)`([^`]+)`(\w?)|([^`]+)", code_or_prose, paragraph))
    return "\n\n".join(paragraphs)


def code_or_prose(found: re.Match) -> str:
    """Return code, or prose without what reStructuredText would take for markup; code needs a gap beside letters."""
    before, code, after, prose = found.groups(default="")
    if code:
        return (before and before + r"\ ") + f"``{code}``" + (after and r"\ " + after)
    prose = re.sub(r"([\\*|])|(?<=\w)(_)(?!\w)", r"\\\1\2", prose)
    return PATH.sub(lambda path: f":py:mod:`{path[0]} <{module_of(path[0]) or path[0]}>`", prose)
