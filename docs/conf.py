"""Sphinx's configuration of the documentation; `make docs` builds it."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

from public_names import missing_frameworks  # noqa: E402

from holdfast import __version__  # noqa: E402

project = "holdfast"
author = "the holdfast developers"
copyright = "the holdfast developers, Apache-2.0"
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "outside_links",
    "public_names",
    "row_plots",
]
exclude_patterns = ["_ext", "bug_tests.md"]

myst_heading_anchors = 4

# What examples in docstrings may use without importing it.
doctest_global_setup = """
from holdfast.digest import hexdigest
from holdfast.inject import parse_schedule
from holdfast.planner import every
from holdfast.replay import expected_steps_to_name
"""

nb_execution_mode = "force"
nb_execution_in_temp = True  # the tutorials' run directories are left nowhere
nb_execution_timeout = 60
nb_execution_raise_on_error = True
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints = "signature"
autodoc_mock_imports = missing_frameworks()
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Keywords", "params_style")]
napoleon_use_ivar = True
add_module_names = False
viewcode_follow_imported_members = True

nitpicky = True
# Types of torch and the standard library have their pages elsewhere, and no index of them is
# fetched; what holdfast keeps private has no page.
nitpick_ignore_regex = [(r"py:.*", r"(?!holdfast\.).*"), (r"py:.*", r"holdfast\..*")]

html_theme = "pydata_sphinx_theme"
html_title = f"holdfast {release}"
html_static_path = ["_static"]
html_css_files = ["holdfast.css"]
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": "holdfast"},
    "navbar_align": "left",
    "header_links_before_dropdown": 9,
    "secondary_sidebar_items": ["page-toc"],
    "show_prev_next": True,
    "navigation_with_keys": False,
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "friendly",
    "pygments_dark_style": "monokai",
}
html_context = {"default_mode": "auto"}
