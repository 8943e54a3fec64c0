"""How the site is made of these pages: `make docs`.

Rules:

1. Nothing is fetched: no fonts, no other project's index, no picture from elsewhere.
2. A warning is an error, so that no link and no reference leads nowhere.
"""

from __future__ import annotations

from tensorcast_dask.version import __version__

project = "tensorcast_dask"
author = "The tensorcast_dask developers"
project_copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]
#: What is in one pair of backticks in a docstring is code.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings have them, as people read them
autodoc_class_signature = "mixed"
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"tensorcast_dask {__version__}"
html_show_sphinx = False
html_copy_source = False
