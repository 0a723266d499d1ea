"""Sphinx: `make docs`. Markdown by MyST, the API from the docstrings of the installed package."""

import importlib
import sys
from pathlib import Path

import warpsmith
import warpsmith.testing

sys.path.insert(0, str(Path(__file__).parent))

import op_tables
import plan_published
import speed_table

project = "Warpsmith"
author = "the Warpsmith authors"
copyright = "the Warpsmith authors, Apache-2.0"
version = release = warpsmith.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88  # longer signatures have a line for each argument
napoleon_numpy_docstring = False
autosummary_generate = False

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_title = f"Warpsmith {release}"
html_show_sourcelink = False

# Its names are imported at first use; autodoc lists what is there.
for name in warpsmith.testing.__all__:
    getattr(warpsmith.testing, name)


def with_summary(app, what, name, obj, options, lines):
    """Puts a table of a module's names on top of its members."""
    if what == "module" and len(getattr(obj, "__all__", [])) > 1:
        names = [n for n in obj.__all__ if callable(getattr(importlib.import_module(name), n))]
        lines += ["", ".. autosummary::", "   :nosignatures:", "", *(f"   {n}" for n in names), ""]


MADE = {
    "<!-- functions -->": op_tables.functions_reference,
    "<!-- modules -->": op_tables.modules_reference,
    "<!-- published runs -->": plan_published.report,
}


def with_made_parts(app, docname, source):
    """Puts into the pages what no hand writes: reference, recordings, predictions of published runs."""
    for mark, text in MADE.items():
        if mark in source[0]:
            source[0] = source[0].replace(mark, text())
    app.env.note_dependency(op_tables.ROOT / "docs/op_facts.toml")
    source[0] = op_tables.built(docname, source[0])
    if docname == "benchmarks":
        for name in ("results", "recordings"):
            app.env.note_dependency(speed_table.ROOT / f"benchmarks/{name}.csv")
        source[0] = speed_table.page(source[0])


def setup(app):
    app.connect("source-read", with_made_parts)
    app.connect("autodoc-process-docstring", with_summary)
