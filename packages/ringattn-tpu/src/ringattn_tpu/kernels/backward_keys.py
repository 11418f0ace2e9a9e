# SPDX-License-Identifier: Apache-2.0
"""The gradients of keys and values: they keep their tile while the queries of all heads of their group visit it."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..launch import Step
from ..operands import Facts
from ..tables import FIRST, IDLE, LAST, MASKED
from .derivatives import derivatives
from .scores import Part, keep_columns


def backward_keys(step: Step, inputs: Any, outputs: Any, scratch: Any, *, facts: Facts, part: int) -> None:
    """`dk` and `dv`; every tile of keys has a step, if only to say that nobody sees it."""
    dk, dv, columns = scratch["dk"], scratch["dv"], scratch.get("columns")
    visiting = inputs["q"].shape[0]

    @pl.when(step.has(FIRST) & (step.member == 0))
    def _():
        keep_columns(facts, inputs, columns, by_keys=True)
        dk[...] = jnp.zeros_like(dk)
        dv[...] = jnp.zeros_like(dv)

    def over(masked: bool) -> None:
        for start in range(0, visiting, part):
            one = Part(facts, step, inputs, columns, True, start, part)
            found = derivatives(one, None, masked)
            q, dout = inputs["q"][one.lanes, :], inputs["dout"][one.lanes, :]
            dv[...] += jnp.dot(
                found.p.astype(dout.dtype), dout, precision=facts.precision, preferred_element_type=jnp.float32
            )
            dproduct = found.of_seen(found.dproduct).astype(q.dtype)
            dk[...] += jnp.dot(dproduct, q, precision=facts.precision, preferred_element_type=jnp.float32)

    for masked in (False, True):
        wanted = MASKED if masked else 0
        pl.when((step.flags & (MASKED | IDLE)) == wanted)(lambda masked=masked: over(masked))

    @pl.when(step.has(LAST) & (step.member == step.members - 1))
    def _():
        outputs["dk"][...] = dk[...] * facts.scale
        outputs["dv"][...] = dv[...]
