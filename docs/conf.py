"""The site: `python3 -m uv run --group docs sphinx-build -W docs OUT` builds it, without network.

Its sources are the notebooks and pages of the whole repository, where they stand. Their links therefore hold here and
in the repository alike. That is why `setup` makes Sphinx read from the folder above this one.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "docs"), str(ROOT), str(ROOT / "virtual-gpus" / "src")]

project = "Multi-GPU PyTorch"
copyright = "the authors of this course, under the BSD-3-Clause licence"
language = "en"

# ---- sources

root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "notebooks/*.ipynb",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "data/README.md",
    "virtual-gpus/*.md",
    "virtual-gpus/docs/*.md",
]
exclude_patterns = [".*", "build", "tests", "helpers", "virtual-gpus/src", "virtual-gpus/tests"]  # not searched

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "extensions.docstrings",
    "extensions.lessons",
    "extensions.offline",
]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types of PyTorch and Python, whose pages are elsewhere

# ---- lessons, as they are stored

nb_execution_mode = "off"
nb_merge_streams = True
nb_render_error_lexer = "text"  # the lexer of tracebacks takes "in use" in the words of an error for a function

# ---- the reference

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # those of nn.Module
python_maximum_signature_line_length = 80

# ---- looks

html_theme = "furo"
html_title = project
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
templates_path = ["templates"]
html_additional_pages = {"index": "redirect.html"}
pygments_dark_style = "a11y-high-contrast-dark"


def setup(app):
    app.srcdir = type(app.srcdir)(ROOT)
