# SPDX-License-Identifier: Apache-2.0
"""Lets these tests import the kernels that lie beside them, whatever the import mode."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
