# SPDX-License-Identifier: Apache-2.0
"""How the documentation is built."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent

project = "ringattn"
author = "The ringattn authors"
version = release = tomllib.loads((ROOT / "packages/ringattn-core/pyproject.toml").read_text())["project"]["version"]
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"ringattn {version}"
# Pages show signatures in full. Types of other libraries have no link target here.
autodoc_typehints = "none"
nitpicky = False
