# SPDX-License-Identifier: Apache-2.0
"""The gradient of the queries, and of the slopes: queries keep their tile while keys and values visit it."""

from typing import Any, Final

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..launch import Step
from ..operands import Facts
from ..tables import FIRST, LAST, MASKED, OPENS
from .derivatives import derivatives, keep_state
from .scores import Part, distance, folded, keep_columns

SUBLANES: Final = 8


def backward_queries(step: Step, inputs: Any, outputs: Any, scratch: Any, *, facts: Facts, part: int) -> None:
    """`dq` continued with the keys that the steps bring, and what they add to each head's `dslopes`, in any lane."""
    acc, state, columns = scratch["acc"], scratch["state"], scratch.get("columns")
    visiting = inputs["k"].shape[0]

    @pl.when(step.has(FIRST))
    def _():
        keep_columns(facts, inputs, columns, by_keys=False)
        keep_state(inputs, state)
        acc[...] = jnp.zeros_like(acc)

    if facts.slopes:

        @pl.when(step.has(OPENS))
        def _():
            outputs["dslopes"][...] = jnp.zeros_like(outputs["dslopes"])

    def over(masked: bool) -> None:
        for start in range(0, visiting, part):
            one = Part(facts, step, inputs, columns, False, start, part)
            found = derivatives(one, state, masked)
            k = inputs["k"][one.lanes, :]
            dproduct = found.of_seen(found.dproduct).astype(k.dtype)
            acc[...] += jnp.dot(dproduct, k, precision=facts.precision, preferred_element_type=jnp.float32)
            if facts.slopes:
                outputs["dslopes"][...] -= _in_one_register(found.of_seen(found.ds) * distance(one))

    pl.when(~step.has(MASKED))(lambda: over(False))
    pl.when(step.has(MASKED))(lambda: over(True))

    @pl.when(step.has(LAST))
    def _():
        outputs["dq"][...] = inputs["dq"][...] + acc[...] * facts.scale


def _in_one_register(x: Any) -> Any:
    """The sums of what lies in the same place of each register: `[8, 128]`."""
    return folded(x.reshape(-1, SUBLANES, x.shape[1]).sum(0))
