# SPDX-License-Identifier: Apache-2.0
"""A backend whose kernel sets `separate_sends`, as the TPU kernels do."""

from typing import Final

from ringattn_core import Backend, Feature
from ringattn_xla.block import XlaKernel


class SeparateSends(XlaKernel):
    separate_sends = True


SEPARATE: Final = Backend("separate", 1, ("cpu",), frozenset(Feature), kernel="nowhere:KERNEL")
