"""Settings of Sphinx for the site, which tools/build_site.py builds."""
import builtins
import sys
from importlib.util import find_spec
from pathlib import Path

import mpi4py
from docutils import nodes
from IPython.lib.lexers import IPython3Lexer
from pygments.lexer import bygroups, inherit
from pygments.token import Keyword, Operator, Text
from sphinx.addnodes import pending_xref

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
mpi4py.rc.initialize = False    # packages are imported, and no rank starts

from tools.api_pages import PACKAGES, read_docstring, skip_field  # noqa: E402

project, author = "Shardlab", "The Shardlab authors"
copyright = f"2026, {author}"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx.ext.mathjax"]
root_doc = "index"
exclude_patterns = ["**.txt"]
highlight_language = "text"     # what programs print, unless a fence names a language

html_theme, html_title = "furo", "Shardlab"
mathjax = Path(*find_spec("sphinx-mathjax-offline").submodule_search_locations, "static", "mathjax", "tex-svg.js")
html_static_path, html_css_files = [str(ROOT / "docs" / "_static"), str(mathjax)], ["site.css"]
html_js_files = ["bug_zoo.js", "search.js", "accessible.js"]
html_theme_options = {"top_of_page_buttons": ["edit"]}      # where the repository's address is known
scorer = ROOT / "docs" / "_build" / "scorer.js"      # tools/build_site.py writes it
html_search_scorer = str(scorer) if scorer.exists() else ""
mathjax_path = mathjax.name     # one file, with its fonts: no network is needed
html_favicon = str(ROOT / "docs" / "_static" / "shardlab.svg")
html_copy_source = False

nb_execution_mode = "off"       # walkthroughs are shown as they are stored
myst_enable_extensions = ["dollarmath", "attrs_inline"]
myst_heading_anchors = 3
myst_url_schemes = {"http": None, "https": None, "built": "{{path}}"}     # built: pages that viewcode makes

nitpicky = True
nitpick_ignore_regex = [("py:.*", rf"(?!(?:{'|'.join(PACKAGES)})\.).*"),     # other projects' names,
                        ("py:class", r".*\.(Config|Content|Item|Key)"),               # variables of types,
                        ("py:class", r".*\.Annotated\[.*")]                          # and fields with a place
autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "bysource",
                           "ignore-module-all": True}    # a name is described where it is defined
autodoc_preserve_defaults = True     # as they are written: `PTD_P`, and not a page of numbers
autodoc_mock_imports = ["cupy", "cupy_backends", "cudnn", "cuda", "torch", "safetensors.torch"]
autodoc_class_signature = "mixed"
add_module_names, python_use_unqualified_type_names = False, True
viewcode_follow_imported_members = False
toc_object_entries = False      # with each function in every page's tree, building takes several times as long


class WalkthroughLexer(IPython3Lexer):
    """Cells of a notebook; below %%ranks and %%answer, they are Python."""

    name, aliases = "walkthrough", ["walkthrough"]
    tokens = {"root": [(r"(%%)(ranks|answer)(.*\n)", bygroups(Operator, Keyword, Text)), inherit]}


def leave_builtins(app, document) -> None:
    """Take `bytes` and `slice` in signatures for Python's own, not for fields of ours that have these names."""
    for reference in list(document.findall(pending_xref)):
        if reference.get("refdomain") == "py" and hasattr(builtins, reference["reftarget"]):
            reference["reftarget"] = f"builtins.{reference['reftarget']}"


def link_to_edit(app, page, template, context, doctree) -> None:
    """Let a page link to its source on GitHub, in html_context's repository; those that are made from code do not."""
    name = {"index": "README"}.get(page, page)
    walkthrough = f"{name}.py".replace("notebooks/", "notebooks/sources/")
    source = next((file for file in (f"{name}.md", f"{name}.py", walkthrough) if (ROOT / file).exists()), None)
    if source and context.get("repository"):
        context["theme_source_edit_link"] = f"https://github.com/{context['repository']}/edit/HEAD/{source}"


def name_rows(app, document) -> None:
    """Make the first cells of rows headings in a table whose corner is empty."""
    for table in document.findall(nodes.table):
        if any(not head[0][0].astext() for head in table.findall(nodes.thead)):
            next(iter(table.findall(nodes.colspec)))["stub"] = 1


def give_captions_a_level(app, name, template, context, doctree) -> None:
    """Complete what the theme says of the captions in its list of pages: they are headings."""
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace('role="heading"', 'role="heading" aria-level="2"')


def setup(app):
    app.connect("html-page-context", link_to_edit)
    app.connect("doctree-read", leave_builtins)
    app.connect("doctree-read", name_rows)
    app.connect("html-page-context", give_captions_a_level, priority=900)      # after the theme's own
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("autodoc-skip-member", skip_field)
    app.add_lexer("walkthrough", WalkthroughLexer)
