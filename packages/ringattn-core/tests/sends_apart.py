# SPDX-License-Identifier: Apache-2.0
"""A backend whose kernel sets `separate_sends`, as the TPU kernels do."""

from typing import Final

from ringattn_core import Backend, Feature, Support
from ringattn_xla.block import XlaKernel


class SendsApart(XlaKernel):
    separate_sends = True


APART: Final = Backend("apart", 1, ("cpu",), dict.fromkeys(Feature, Support.FULL), kernel="nowhere:KERNEL")
