# SPDX-License-Identifier: Apache-2.0
"""The block kernel that core drives: forward and backward, each traced once for all hops of a ring."""

from typing import Final

import jax

from .backward import backward
from .forward import forward
from .tuning_candidates import candidate_configs


class XlaKernel:
    """Blockwise attention in `jax.lax`: any shape, every feature, memory linear in the lengths."""

    forward = staticmethod(jax.jit(forward))
    backward = staticmethod(jax.jit(backward))
    candidate_configs = staticmethod(candidate_configs)


KERNEL: Final = XlaKernel()
