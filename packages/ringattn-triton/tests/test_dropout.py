# SPDX-License-Identifier: Apache-2.0
"""Dropout stores no random bits. The conformance suite compares which entries the kernels keep."""

from typing import Any

import jax
import numpy as np
from compile_reports import launches
from given_blocks import make_block
from ringattn_triton.block_kernel import KERNEL
from test_backward import given_to


def test_nothing_of_the_size_of_the_scores_is_stored() -> None:
    block = make_block(1, 512, 512, 1, 1, 16, dropout_prob=0.1, seed=np.array([7], np.uint32))

    def both(block: Any, *given: Any) -> Any:
        return KERNEL.forward(block, None), KERNEL.backward(block, *given)

    found = launches(jax.make_jaxpr(both)(block, *given_to(block)).jaxpr)
    assert max(output.size for call, _ in found for output in call.outputs) < 512 * 512 / 4
