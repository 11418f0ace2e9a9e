# SPDX-License-Identifier: Apache-2.0
"""What every test of the Triton backend stands on: CPU devices, interpreted kernels, strict promotion.

`JAX_PLATFORMS=cuda pytest test_hopper.py test_hopper_heads.py` runs these modules on a GPU instead.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["RINGATTN_TRITON_INTERPRET"] = "1"
if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
sys.path.insert(0, str(Path(__file__).parent))
