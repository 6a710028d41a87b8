"""How the documentation is built; ``docs/development.rst`` gives the commands."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

# Read when the libraries are first imported: a second thread gains nothing on examples this small.
for pool in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(pool, "1")

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "_ext")]

project = "sklearn-mhal"
author = "The sklearn-mhal developers"
copyright = author
try:
    release = importlib.metadata.version(project)
except importlib.metadata.PackageNotFoundError:
    release = ""

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "matplotlib.sphinxext.plot_directive",
    "numpydoc",
    "sphinx_gallery.gen_gallery",
    "layout",
    "measured",
    "parameters",
    "underscores",
]
# Brings MathJax along, so that the built site shows its formulas without a network.
if importlib.util.find_spec("sphinx-mathjax-offline"):
    extensions.append("sphinx-mathjax-offline")

templates_path = ["_templates"]
exclude_patterns = ["_build", "_tables", "plots", "**/GALLERY_HEADER.rst"]
default_role = "literal"
suppress_warnings = ["config.cache"]
# Our own references must all lead somewhere; those into other projects would need a network.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(sklearn|joblib|numpy|scipy|torch|matplotlib|logging)(\..*)?"),
    # Modules that have no page of their own.
    ("py:mod", r"(sklearn_mhal\.)?_\w+"),
]

autosummary_generate = True
autodoc_typehints = "none"
autodoc_default_options = {"member-order": "bysource"}
numpydoc_show_class_members = False

plot_formats = [("png", 110)]
plot_html_show_formats = False
plot_html_show_source_link = False
plot_include_source = False
plot_rcparams = {"figure.figsize": (6.4, 4.0), "savefig.bbox": "tight"}
plot_apply_rcparams = True

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "auto_examples",
    # Only these are run; the others are shown as they are.
    "filename_pattern": r"/plot_",
    "ignore_pattern": r"benchmarks|chunks_",
    "within_subsection_order": "order.GalleryOrder",
    "backreferences_dir": "generated/backreferences",
    "doc_module": ("sklearn_mhal",),
    "inspect_global_variables": False,
    "show_memory": False,
    "remove_config_comments": True,
    "download_all_examples": False,
    # ``-D plot_gallery=0`` on the command line shows the examples without running them.
    "plot_gallery": True,
    "min_reported_time": 0,
}

html_theme = "pydata_sphinx_theme"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_theme_options = {
    "navbar_end": ["theme-switcher"],
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
    "show_prev_next": False,
    "navigation_with_keys": False,
}
html_sidebars = {name: [] for name in ("index", "quick_start", "performance", "theory", "development")}


def setup(app: Any) -> None:
    """Turn ``-D plot_gallery=0`` into the boolean that Sphinx expects there."""

    def as_boolean(app: Any, config: Any) -> None:
        config.plot_gallery = str(config.plot_gallery) not in ("0", "False")

    app.connect("config-inited", as_boolean, priority=1)
