# SPDX-License-Identifier: Apache-2.0
"""Setup of the tests of the Triton backend: kernels are interpreted.

`JAX_PLATFORMS=cuda pytest test_hopper.py` runs that module on a GPU instead.
"""

import os

os.environ["RINGATTN_TRITON_INTERPRET"] = "1"
