"""Settings of the site. `make docs` builds it; nothing in it is fetched from a network."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import matplotlib

from emfed.core.version import __version__

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
matplotlib.use("Agg")

project = "emfed"
author = "The emfed developers"
copyright = author
version = release = __version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "myst_parser",
    "sphinx_design",
    "sphinx_copybutton",
    "site_pages",
    "sphinx_gallery.gen_gallery",
]

exclude_patterns = ["templates", "generated/gallery/**/*.ipynb"]
nitpicky = True
myst_enable_extensions = ["colon_fence", "dollarmath", "tasklist"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

# Single backticks in docstrings are names: linked where they are documented, code elsewhere.
default_role = "py:obj"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autosummary_generate = False  # site_pages.py writes a page for every public name
numpydoc_show_class_members = False
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 80

sphinx_gallery_conf = {
    "examples_dirs": str(HERE.parent / "examples" / "gallery"),
    "gallery_dirs": "generated/gallery",
    "filename_pattern": r"\.py$",
    "plot_gallery": not os.environ.get("EMFED_DOCS_QUICK"),  # `make docs-quick` runs no script
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_signature": False,
    "write_computation_times": False,  # its table loads scripts from elsewhere
    "remove_config_comments": True,
    "image_srcset": ["2x"],
    "min_reported_time": 3600,  # seconds of the machine that built the site tell a reader nothing
    "within_subsection_order": "FileNameSortKey",
}

html_theme = "pydata_sphinx_theme"
html_title = "emfed"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_math_renderer = "mathml"
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {"index": []}
