# SPDX-License-Identifier: Apache-2.0
"""The gradients of queries and of per-head parameters: the kernel keeps a tile of queries while keys visit it."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..block_sizes import SUBLANES
from ..kernel_inputs import Settings
from ..launch import Step, over_parts
from ..steps import FIRST, LAST, OPENS
from .derivatives import derivatives
from .scores import Part, distance, folded, keep_columns, matmul


def backward_queries(step: Step, inputs: Any, outputs: Any, scratch: Any, *, settings: Settings, part: int) -> None:
    """Writes `dq`, plus the input `dq` if there is one, and `dheads`, the gradient of each head's ALiBi slope.

    `dheads` has partial sums, `[8, 128]` for each head.
    """
    acc, row_values, columns = scratch["acc"], scratch["row_values"], scratch.get("columns")

    @pl.when(step.has(FIRST))
    def _():
        keep_columns(inputs.get("q_integers"), columns)
        keep_columns(inputs["row_values"], row_values)
        acc[...] = jnp.zeros_like(acc)

    if "dheads" in outputs:

        @pl.when(step.has(OPENS))
        def _():
            outputs["dheads"][...] = jnp.zeros_like(outputs["dheads"])

    def visit(start: int, masked: bool) -> None:
        one = Part(settings, step, inputs, columns, False, start, part)
        found = derivatives(one, row_values, masked)
        acc[...] += matmul(found.dproduct, one.rows("k"), settings)
        if "dheads" in outputs:
            outputs["dheads"][...] -= _in_one_register(found.ds * distance(one))

    over_parts(step, inputs["k"].shape[0], part, visit)

    @pl.when(step.has(LAST))
    def _():
        dq = acc[...] * settings.rule.softmax_scale
        outputs["dq"][...] = (inputs["dq"][...] + dq if "dq" in inputs else dq).astype(outputs["dq"].dtype)


def _in_one_register(x: Any) -> Any:
    """Adds up all vector registers of `x`, each `[8, 128]`, elementwise to one."""
    return folded(x.reshape(-1, SUBLANES, x.shape[1]).sum(0))
