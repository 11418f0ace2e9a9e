# SPDX-License-Identifier: Apache-2.0
"""The block kernel that core drives: forward and backward by Pallas, each traced once for all hops of a ring."""

from typing import Final

from .backward import backward
from .forward import forward
from .tuning_candidates import candidate_configs


class TpuKernel:
    """Blockwise attention on TPUs: every feature but float16, heads of up to 256, the same bits at every run."""

    forward = staticmethod(forward)
    backward = staticmethod(backward)
    candidate_configs = staticmethod(candidate_configs)


KERNEL: Final = TpuKernel()
