# SPDX-License-Identifier: Apache-2.0
"""A backend whose kernel wants keys and gradients sent as two arrays, as those of TPUs do."""

from typing import Final

from ringattn_core import Backend, Feature, Support
from ringattn_xla.block import XlaKernel


class SendsApart(XlaKernel):
    separate_sends = True


APART: Final = Backend("apart", 1, ("cpu",), dict.fromkeys(Feature, Support.FULL), kernel="nowhere:KERNEL")
