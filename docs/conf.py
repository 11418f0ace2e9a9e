# SPDX-License-Identifier: Apache-2.0
"""How the documentation is built."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent

project = "ringattn"
author = project_copyright = "The ringattn authors"
version = release = tomllib.loads((ROOT / "packages/ringattn-core/pyproject.toml").read_text())["project"]["version"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_title = f"ringattn {version}"
# Shapes are in the text of docstrings. Types of other libraries have no link target here.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
# A signature that is longer than a line of the page gets a line for each argument.
maximum_signature_line_length = 80
# In the docstring of an attribute, napoleon reads what comes before a colon as a type. Write it without a colon.
# Docstrings are Markdown where code is concerned: `name` is code.
default_role = "code"
nitpicky = False
