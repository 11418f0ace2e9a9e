# SPDX-License-Identifier: Apache-2.0
"""The gradient of the bias: a tile of it stays while all that shares it, batch rows, heads and queries, visits it."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..launch import Step
from ..operands import Facts
from ..tables import MASKED
from .derivatives import derivatives, keep_state
from .scores import Part, keep_columns


def backward_bias(step: Step, inputs: Any, outputs: Any, scratch: Any, *, facts: Facts, part: int, begins: Any) -> None:
    """`dbias`, where `begins(step)` says that a step is the first of its tile of the bias."""
    state, columns = scratch["state"], scratch.get("columns")
    keep_columns(facts, inputs, columns, by_keys=False)
    keep_state(inputs, state)

    @pl.when(begins(step))
    def _():
        outputs["dbias"][...] = jnp.zeros_like(outputs["dbias"])

    def over(masked: bool) -> None:
        for start in range(0, inputs["k"].shape[0], part):
            one = Part(facts, step, inputs, columns, False, start, part)
            found = derivatives(one, state, masked)
            ds = found.of_seen(found.ds)
            outputs["dbias"][:, one.lanes] += ds if facts.bias_rows else ds.sum(0, keepdims=True)

    pl.when(~step.has(MASKED))(lambda: over(False))
    pl.when(step.has(MASKED))(lambda: over(True))
