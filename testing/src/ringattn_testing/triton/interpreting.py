# SPDX-License-Identifier: Apache-2.0
"""Launches a kernel in the interpreter."""

import numpy as np
from ringattn_triton.interpreter.programs import run
from ringattn_triton.launch.kernel_call import KernelCall


def interpret(kernel, operands, outputs, grid=(1,), aliases=None, **constants):
    """The outputs, given by shape and dtype, of one launch."""
    arrays = [np.zeros(shape, dtype) for shape, dtype in outputs]
    aliased, constants = tuple((aliases or {}).items()), tuple(constants.items())
    call = KernelCall(kernel, (), grid, 4, 1, aliased, kernel.__name__, constants, None, 1)
    run(call, [np.asarray(x) for x in operands], arrays)
    return arrays


def some(dtype, size=256, seed=0):
    return (np.random.default_rng(seed).standard_normal(size) * 4).astype(dtype)
