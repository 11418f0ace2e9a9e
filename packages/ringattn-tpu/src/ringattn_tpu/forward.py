# SPDX-License-Identifier: Apache-2.0
"""Which kernel gives the output of a block, and on what."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from ringattn_core.contract.protocol import Block, Partial
from ringattn_core.contract.tile_padding import padded
from ringattn_core.contract.varying import align, axes_of

from . import block_sizes, operands, tables
from .block_sizes import LANES
from .kernels.forward import forward as forward_kernel
from .kernels.scores import own_numbers
from .launch import Grid, Operand, launch
from .operands import LOG2_E


@jax.jit
def forward(block: Block, partial: Partial) -> Partial:
    """`partial` continued with the keys of the block."""
    block, partial = align((block, partial), axes_of(block, partial))
    q_length = block.q_length
    sizes = block_sizes.choose(block, block.rule.fwd_params)
    given = operands.of(block, sizes)
    block = given.block
    batch, _, heads, _ = block.q.shape
    value_dim, tile = block.value_dim, sizes.q_tile
    steps = tables.steps(block, tile, sizes.kv_tile, every_own=partial.empty)

    def rows(x: Any, last: int) -> Operand:
        return Operand(x, (None, None, tile, last), lambda at: (at.batch, at.head, at.own, 0))

    def row(x: Any) -> Operand:
        return Operand(x, (None, None, 1, tile), lambda at: (at.batch, at.head, 0, at.own))

    inputs = operands.inputs(given, by_keys=False)
    state = {
        "out": rows(jax.ShapeDtypeStruct((batch, heads, sizes.q_length, value_dim), jnp.float32), value_dim),
        "lse": row(jax.ShapeDtypeStruct((batch, heads, 1, sizes.q_length), jnp.float32)),
    }
    if not partial.empty:
        inputs["out"] = rows(padded(jnp.swapaxes(partial.out, 1, 2), sizes.q_length, 2), value_dim)
        inputs["lse"] = row(padded(partial.lse[:, :, None] * LOG2_E, sizes.q_length, 3))
    scratch = {
        "acc": pltpu.VMEM((tile, value_dim), jnp.float32),
        "m": pltpu.VMEM((tile, LANES), jnp.float32),
        "total": pltpu.VMEM((tile, LANES), jnp.float32),
    }
    if given.facts.q_rows:
        scratch["columns"] = pltpu.VMEM((len(own_numbers(given.facts, False)), tile, LANES), jnp.int32)
    found = launch(
        functools.partial(forward_kernel, facts=given.facts, part=sizes.part_of(sizes.kv_tile), fresh=partial.empty),
        steps,
        Grid(batch, heads),
        inputs,
        state,
        scratch=scratch,
        aliases={} if partial.empty else {"out": "out", "lse": "lse"},
        cost=operands.cost(given, products=2),
        name="ringattn_forward",
    )
    out = jnp.swapaxes(found["out"][:, :, :q_length], 1, 2)
    return Partial(out, found["lse"][:, :, 0, :q_length] / LOG2_E)
