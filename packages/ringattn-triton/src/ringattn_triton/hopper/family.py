# SPDX-License-Identifier: Apache-2.0
"""The family of Gluon kernels for Hopper GPUs: on which devices, and with which versions of Triton, they run."""

import functools
import logging
from typing import Final

import triton
from ringattn_core.contract.protocol import Block

from .. import kernel_inputs
from ..availability import TRITON_FLOOR, triton_version
from ..launch.target import Target
from . import backward as backward_pass
from . import forward as forward_pass
from .backward import TARGET
from .backward import backward as backward
from .forward import forward as forward

_logger: Final = logging.getLogger("ringattn")
_TRITON_CEILING: Final = (3, 10)
"""The first version of Triton with which these kernels have not been compiled. Gluon may change in every version."""


def why_not_forward(block: Block, target: Target) -> str | None:
    reason = _why_not_here(block, target)
    return reason or forward_pass.why_not(block, kernel_inputs.of_block(block, fast=True).constants)


def why_not_backward(block: Block, target: Target) -> str | None:
    reason = _why_not_here(block, target)
    return reason or backward_pass.why_not(block, kernel_inputs.of_block(block, fast=True).constants)


def _why_not_here(block: Block, target: Target) -> str | None:
    """Why no kernel of this family takes the block on this device, or `None` if device, Triton and dtype are right."""
    if target != TARGET:
        return "the Hopper kernels are for compute capability 9.0"
    if not TRITON_FLOOR <= triton_version() < _TRITON_CEILING:
        return _logged_once(f"the Hopper kernels have not been tried with Triton {triton.__version__}")
    if block.q.dtype.itemsize != 2:
        return "the Hopper kernels are for half precision"
    return None


@functools.cache
def _logged_once(reason: str) -> str:
    """Returns `reason`, and logs it once: on a Hopper GPU, users expect these kernels to run."""
    _logger.warning("%s; slower kernels run instead", reason)
    return reason
