# SPDX-License-Identifier: Apache-2.0
"""The gradient of the bias: the kernel keeps a tile of `dbias` and adds what all batch rows, heads, queries give it."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..kernel_inputs import Settings
from ..launch import Step, over_parts
from .derivatives import derivatives
from .scores import Part, keep_columns


def backward_bias(
    step: Step, inputs: Any, outputs: Any, scratch: Any, *, settings: Settings, part: int, begins: Any
) -> None:
    """Adds the `ds` of the step to its tile of `dbias`. `begins(step)`: the step is the tile's first, and zeroes it."""
    row_values, columns = scratch["row_values"], scratch.get("columns")
    keep_columns(inputs.get("q_integers"), columns)
    keep_columns(inputs["row_values"], row_values)

    @pl.when(begins(step))
    def _():
        outputs["dbias"][...] = jnp.zeros_like(outputs["dbias"])

    def visit(start: int, masked: bool) -> None:
        one = Part(settings, step, inputs, columns, False, start, part)
        ds = derivatives(one, row_values, masked).ds
        outputs["dbias"][:, one.lanes] += ds if inputs["bias"].shape[0] > 1 else ds.sum(0, keepdims=True)

    over_parts(step, inputs["k"].shape[0], part, visit)
