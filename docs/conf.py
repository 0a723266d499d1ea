"""Sphinx: `make docs`. Markdown by MyST, the API from the docstrings of the installed package."""

import warpsmith
import warpsmith.testing

project = "Warpsmith"
author = "the Warpsmith authors"
copyright = "the Warpsmith authors, Apache-2.0"
version = release = warpsmith.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature's place is for names and defaults; docstrings say dtypes and shapes
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False

html_theme = "alabaster"
html_theme_options = {
    "description": "Fused operators for PyTorch training",
    "fixed_sidebar": True,
    "page_width": "1100px",
}
html_show_sourcelink = False

# Its names are imported at first use; autodoc lists what is there.
for name in warpsmith.testing.__all__:
    getattr(warpsmith.testing, name)
