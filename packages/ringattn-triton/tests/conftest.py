# SPDX-License-Identifier: Apache-2.0
"""Setup of the tests of the Triton backend: kernels are interpreted, and no rank is promoted.

`JAX_PLATFORMS=cuda pytest test_hopper.py test_hopper_heads.py` runs these modules on a GPU instead.
"""

import os
import sys
from pathlib import Path

import jax

os.environ["RINGATTN_TRITON_INTERPRET"] = "1"
jax.config.update("jax_numpy_rank_promotion", "raise")
sys.path.insert(0, str(Path(__file__).parent))
