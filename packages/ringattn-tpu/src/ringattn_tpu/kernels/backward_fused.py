# SPDX-License-Identifier: Apache-2.0
"""All gradients of a block in one pass: keys keep their tile, and what their visitors get stays in vector memory.

The gradients of a whole head lie there until it is done, so each score is computed once and not twice.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..launch import Step
from ..operands import Facts
from ..tables import FIRST, IDLE, LAST, MASKED, OPENS
from .derivatives import derivatives
from .scores import LANES, Part, keep_columns


def backward_fused(step: Step, inputs: Any, outputs: Any, scratch: Any, *, facts: Facts, part: int) -> None:
    """`dq` continued, `dk` and `dv`; the members of a group come one after the other, each with all of its steps."""
    dk, dv, columns = scratch["dk"], scratch["dv"], scratch.get("columns")
    q_tile, kv_tile = inputs["q"].shape[0], inputs["k"].shape[0]

    @pl.when(step.has(OPENS))
    def _():
        outputs["dq"][...] = inputs["dq"][...]

    @pl.when(step.has(FIRST))
    def _():
        keep_columns(facts, inputs, columns, by_keys=True)
        dk[...] = jnp.zeros_like(dk)
        dv[...] = jnp.zeros_like(dv)

    def over(masked: bool) -> None:
        for start in range(0, q_tile, part):
            one = Part(facts, step, inputs, columns, True, start, part)
            found = derivatives(one, None, masked, by_weight=True)
            q, dout, k = inputs["q"][one.lanes, :], inputs["dout"][one.lanes, :], inputs["k"][...]
            dproduct = found.of_weighed(found.dproduct.astype(q.dtype))
            dv[...] += jnp.dot(
                found.p.astype(dout.dtype), dout, precision=facts.precision, preferred_element_type=jnp.float32
            )
            dk[...] += jnp.dot(dproduct, q, precision=facts.precision, preferred_element_type=jnp.float32)
            added = jax.lax.dot_general(
                dproduct, k, (((0,), (0,)), ((), ())), precision=facts.precision, preferred_element_type=jnp.float32
            )
            rows = pl.ds(pl.multiple_of(step.at.visiting * q_tile + start, LANES), part)
            outputs["dq"][rows, :] += added * facts.scale

    for masked in (False, True):
        wanted = MASKED if masked else 0
        pl.when((step.flags & (MASKED | IDLE)) == wanted)(lambda masked=masked: over(masked))

    rows = pl.ds(pl.multiple_of(step.at.own * kv_tile, LANES), kv_tile)

    @pl.when(step.has(LAST) & (step.member == 0))
    def _():
        outputs["dk"][rows, :] = dk[...] * facts.scale
        outputs["dv"][rows, :] = dv[...]

    if step.members > 1:

        @pl.when(step.has(LAST) & (step.member > 0))
        def _():
            outputs["dk"][rows, :] += dk[...] * facts.scale
            outputs["dv"][rows, :] += dv[...]
