# SPDX-License-Identifier: Apache-2.0
"""Runs kernels in the interpreter, by a callback from a JAX program on a CPU that reads and writes XLA's own buffers.

JAX's other callbacks wait for a thread that copies their arguments. Devices that wait for each other in a collective
may occupy that thread, and then a ring deadlocks.
"""

import logging
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

from ..interpreter.programs import run
from .kernel_call import KernelCall

_logger: Final = logging.getLogger("ringattn")


def launch(arrays: Sequence[jax.Array], call: KernelCall) -> list[jax.Array]:
    """Interprets a kernel on `arrays` and returns its outputs.

    If the program runs on one device, an error in the kernel is raised; on several devices it is only logged. A device
    that raised would never reach the next collective, and the other devices would end the process after waiting for a
    minute. Instead, the outputs of the failed device become NaN, or the largest integer.
    """

    def fill(_: Any, outputs: Sequence[Any], *operands: Any) -> None:
        filled = [np.asarray(output) for output in outputs]
        try:
            run(call, [np.asarray(operand) for operand in operands], filled)
        except Exception:
            if call.among == 1:
                raise
            _logger.exception("kernel %s failed on one of %d devices; its outputs there are NaN", call.name, call.among)
            for output in filled:
                output[...] = np.nan if jnp.issubdtype(output.dtype, jnp.floating) else np.iinfo(output.dtype).max

    return buffer_callback(fill, list(call.outputs))(*arrays)
