"""Settings of Sphinx for the slides, which tools/slides.py builds."""
import sys
from importlib.util import find_spec
from pathlib import Path

import mpi4py

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
mpi4py.rc.initialize = False    # excerpts import packages, and no rank starts

project = "Shardlab"
extensions = ["myst_parser", "sphinx_revealjs", "sphinx.ext.mathjax", "tools.slides"]
root_doc = "index"
exclude_patterns = ["README.md"]
suppress_warnings = ["toc.not_included"]

myst_enable_extensions = ["dollarmath", "colon_fence", "attrs_inline"]
mathjax = Path(*find_spec("sphinx-mathjax-offline").submodule_search_locations, "static", "mathjax", "tex-svg.js")
mathjax_path = mathjax.name     # one file, with its fonts: no network is needed

revealjs_static_path = [str(Path(__file__).with_name("theme.css")), str(mathjax)]
revealjs_style_theme = "theme.css"
revealjs_script_conf = {"width": 1280, "height": 720, "margin": 0, "center": False, "hash": True, "slideNumber": "c/t",
                        "transition": "none", "controls": False, "pdfMaxPagesPerSlide": 1}
revealjs_script_plugins = [{"src": "revealjs/plugin/notes/notes.js", "name": "RevealNotes"},
                           {"src": "revealjs/plugin/highlight/highlight.js", "name": "RevealHighlight"}]
