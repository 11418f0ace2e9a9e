# SPDX-License-Identifier: Apache-2.0
"""All gradients of a block in one pass: the kernel keeps a tile of keys, and the gradients of a head in vector memory.

The gradients stay in vector memory until the head is done, so each score is computed only once.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..block_sizes import LANES
from ..kernel_inputs import Settings
from ..launch import Step, over_parts
from ..steps import FIRST, LAST, OPENS
from .derivatives import derivatives
from .scores import Part, keep_columns, matmul


def backward_fused(step: Step, inputs: Any, outputs: Any, scratch: Any, *, settings: Settings, part: int) -> None:
    """Writes `dq`, `dk` and `dv`. If `dq` is an input too, the output is the input plus the gradient.

    The query heads that read one key head run one after the other, each with all of its steps.
    """
    dk, dv, columns = scratch["dk"], scratch["dv"], scratch.get("columns")
    q_tile, kv_tile = inputs["q"].shape[0], inputs["k"].shape[0]

    @pl.when(step.has(OPENS))
    def _():
        outputs["dq"][...] = inputs["dq"][...] if "dq" in inputs else jnp.zeros_like(outputs["dq"])

    @pl.when(step.has(FIRST))
    def _():
        keep_columns(inputs.get("kv_integers"), columns)
        dk[...] = jnp.zeros_like(dk)
        dv[...] = jnp.zeros_like(dv)

    def visit(start: int, masked: bool) -> None:
        one = Part(settings, step, inputs, columns, True, start, part)
        found = derivatives(one, None, masked)
        q, k = one.rows("q"), one.rows("k")
        dproduct = found.dproduct.astype(q.dtype)
        dv[...] += matmul(found.p, one.rows("dout"), settings)
        dk[...] += matmul(dproduct, q, settings)
        added = jax.lax.dot_general(
            dproduct, k, (((0,), (0,)), ((), ())), precision=settings.precision, preferred_element_type=jnp.float32
        )
        rows = pl.ds(pl.multiple_of(step.at.visiting * q_tile + start, LANES), part)
        outputs["dq"][rows, :] += added * settings.rule.softmax_scale

    over_parts(step, q_tile, part, visit)
    rows = pl.ds(pl.multiple_of(step.at.own * kv_tile, LANES), kv_tile)

    @pl.when(step.has(LAST) & (step.at.member == 0))
    def _():
        outputs["dk"][rows, :] = (dk[...] * settings.rule.softmax_scale).astype(outputs["dk"].dtype)
        outputs["dv"][rows, :] = dv[...].astype(outputs["dv"].dtype)

    if step.members > 1:

        @pl.when(step.has(LAST) & (step.at.member > 0))
        def _():
            outputs["dk"][rows, :] += dk[...] * settings.rule.softmax_scale
            outputs["dv"][rows, :] += dv[...]
