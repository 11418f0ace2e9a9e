# SPDX-License-Identifier: Apache-2.0
"""Which kernels give the gradients of a block, and on what."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from ringattn_core.contract.protocol import Block, Gradients
from ringattn_core.contract.tile_padding import padded
from ringattn_core.contract.varying import align, axes_of

from . import block_sizes, operands, tables
from .block_sizes import LANES
from .kernels.backward_bias import backward_bias
from .kernels.backward_fused import backward_fused
from .kernels.backward_keys import backward_keys
from .kernels.backward_queries import SUBLANES, backward_queries
from .kernels.scores import own_numbers
from .launch import VMEM_LIMIT, At, Grid, Operand, launch
from .operands import LOG2_E, Operands
from .tables import FIRST, Steps

Shape = jax.ShapeDtypeStruct


@jax.jit
def backward(block: Block, dout: jax.Array, lse: jax.Array, delta: jax.Array, dq: jax.Array) -> Gradients:
    """What the block adds to each gradient, from the final `lse` and `delta`."""
    block, dout, lse, delta, dq = align((block, dout, lse, delta, dq), axes_of(block, dout, lse, delta, dq))
    q_length, kv_length = block.q_length, block.kv_length
    given = operands.of(block, block_sizes.choose(block, block.rule.bwd_params))
    whole = _Whole(given, _of_rows(given, dout, lse, delta))
    dq = padded(jnp.swapaxes(dq, 1, 2), given.sizes.q_length, 2)
    steps = whole.steps_by_keys()
    found = whole.fused(dq, steps) if whole.fuses(steps) else {**whole.keys(steps), **whole.queries(dq)}
    dk, dv = (jnp.swapaxes(found[name][:, :, :kv_length], 1, 2) for name in ("dk", "dv"))
    dslopes = None
    if block.slopes is not None:
        each = found["dslopes"].sum((2, 3))
        dslopes = each if block.slopes.shape[0] > 1 else each.sum(0, keepdims=True)
    dbias = None
    if block.bias is not None and not block.bias_fixed:
        rows = q_length if given.facts.bias_rows else 1
        dbias = whole.bias()["dbias"][:, :, :rows, :kv_length]
    return Gradients(jnp.swapaxes(found["dq"][:, :, :q_length], 1, 2), dk, dv, dbias, dslopes)


def _of_rows(given: Operands, dout: jax.Array, lse: jax.Array, delta: jax.Array) -> dict[str, jax.Array]:
    """What comes with each query in every backward kernel. A row that saw nothing, or is padding, has no weight."""
    length = given.sizes.q_length
    lse = padded(jnp.where(jnp.isneginf(lse), jnp.inf, lse * LOG2_E), length, 2, jnp.inf)
    return {
        "dout": padded(jnp.swapaxes(dout, 1, 2), length, 2),
        "state": jnp.stack([lse, padded(delta, length, 2)], 2),
    }


class _Whole:
    """A block with the cotangents of its queries, and the kernels that run over it."""

    def __init__(self, given: Operands, of_rows: dict[str, jax.Array]) -> None:
        self.given = given
        self.of_rows = of_rows
        self.sizes = given.sizes
        self.batch, _, self.heads, self.head_dim = given.block.q.shape
        self.kv_heads, self.value_dim = given.block.kv.shape[-2], given.block.value_dim

    @functools.cached_property
    def _by_queries(self) -> dict[str, Operand]:
        """What the kernels of the queries and of the bias have in common, and the masks among it are made once."""
        return self._inputs(by_keys=False)

    def _inputs(self, by_keys: bool) -> dict[str, Operand]:
        inputs = operands.inputs(self.given, by_keys)
        q = inputs["q"]
        assert q.at is not None and q.block is not None
        inputs["dout"] = Operand(self.of_rows["dout"], (*q.block[:-1], self.value_dim), q.at)
        of_q = q.at
        inputs["state"] = Operand(
            self.of_rows["state"],
            (None, None, 2, self.sizes.q_tile),
            lambda at: (*of_q(at)[:2], 0, of_q(at)[2]),
        )
        return inputs

    def _scratch(self, by_keys: bool) -> dict[str, Any]:
        tile = self.sizes.kv_tile if by_keys else self.sizes.q_tile
        numbers = len(own_numbers(self.given.facts, by_keys))
        scratch: dict[str, Any] = {} if by_keys else {"state": pltpu.VMEM((2, tile, LANES), jnp.float32)}
        if numbers:
            scratch["columns"] = pltpu.VMEM((numbers, tile, LANES), jnp.int32)
        return scratch

    def steps_by_keys(self) -> Steps:
        """Every tile of keys has a step, because `dk` and `dv` are this block's alone."""
        return tables.steps(self.given.block, self.sizes.q_tile, self.sizes.kv_tile, by_keys=True, every_own=True)

    def fuses(self, steps: Steps) -> bool:
        """Whether one pass has room for the gradients of a head, and comes by each head but once."""
        wide = [-(-dim // LANES) * LANES for dim in (self.head_dim, self.value_dim)]
        floats = 2 * self.sizes.q_length * wide[0] + self.sizes.kv_length * sum(wide)
        return (
            not self.given.facts.slopes
            and (steps.rows == 1 or self.given.group == 1)
            and 2 * 4 * floats <= VMEM_LIMIT * 3 // 4
        )

    def fused(self, dq: jax.Array, steps: Steps) -> dict[str, jax.Array]:
        """`dq` continued, `dk` and `dv`, in one pass."""
        sizes, tile, group = self.sizes, self.sizes.kv_tile, self.given.group
        dims = {"dk": self.head_dim, "dv": self.value_dim}
        inputs = self._inputs(by_keys=True)
        block = (None, None, sizes.q_length, self.head_dim)
        inputs["dq"] = Operand(dq, block, lambda at: (at.batch, at.head * group + at.member, 0, 0))
        whole = {
            name: Operand(
                Shape((self.batch, self.kv_heads, sizes.kv_length, dim), jnp.float32),
                (None, None, sizes.kv_length, dim),
                lambda at: (at.batch, at.head, 0, 0),
            )
            for name, dim in dims.items()
        }
        return launch(
            functools.partial(backward_fused, facts=self.given.facts, part=sizes.part_of(sizes.q_tile)),
            steps,
            Grid(self.batch, self.kv_heads, group, members_inside=False),
            inputs,
            {"dq": inputs["dq"], **whole},
            scratch=self._scratch(by_keys=True) | {n: pltpu.VMEM((tile, dim), jnp.float32) for n, dim in dims.items()},
            aliases={"dq": "dq"},
            cost=operands.cost(self.given, products=5),
            name="ringattn_backward_fused",
        )

    def keys(self, steps: Steps) -> dict[str, jax.Array]:
        """`dk` and `dv`."""
        sizes, tile = self.sizes, self.sizes.kv_tile
        dims = {"dk": self.head_dim, "dv": self.value_dim}
        return launch(
            functools.partial(backward_keys, facts=self.given.facts, part=sizes.part_of(sizes.q_tile)),
            steps,
            Grid(self.batch, self.kv_heads, self.given.group),
            self._inputs(by_keys=True),
            {
                name: Operand(
                    Shape((self.batch, self.kv_heads, sizes.kv_length, dim), jnp.float32),
                    (None, None, tile, dim),
                    lambda at: (at.batch, at.head, at.own, 0),
                )
                for name, dim in dims.items()
            },
            scratch=self._scratch(by_keys=True) | {n: pltpu.VMEM((tile, dim), jnp.float32) for n, dim in dims.items()},
            cost=operands.cost(self.given, products=4),
            name="ringattn_backward_keys",
        )

    def queries(self, dq: jax.Array) -> dict[str, jax.Array]:
        """`dq` continued, and `dslopes [B, N, 8, 128]` in any place of the last two axes."""
        sizes, tile = self.sizes, self.sizes.q_tile
        inputs = dict(self._by_queries)
        inputs["dq"] = Operand(dq, (None, None, tile, self.head_dim), lambda at: (at.batch, at.head, at.own, 0))
        outputs, aliases = {"dq": inputs["dq"]}, {"dq": "dq"}
        if self.given.facts.slopes:
            zeros = jnp.zeros((self.batch, self.heads, SUBLANES, LANES), jnp.float32)
            inputs["dslopes"] = Operand(align(zeros, axes_of(dq)))
            outputs["dslopes"] = Operand(zeros, (None, None, SUBLANES, LANES), lambda at: (at.batch, at.head, 0, 0))
            aliases["dslopes"] = "dslopes"
        return launch(
            functools.partial(backward_queries, facts=self.given.facts, part=sizes.part_of(sizes.kv_tile)),
            tables.steps(self.given.block, tile, sizes.kv_tile),
            Grid(self.batch, self.heads),
            inputs,
            outputs,
            scratch=self._scratch(by_keys=False) | {"acc": pltpu.VMEM((tile, self.head_dim), jnp.float32)},
            aliases=aliases,
            cost=operands.cost(self.given, products=3),
            name="ringattn_backward_queries",
        )

    def bias(self) -> dict[str, jax.Array]:
        """`dbias` in the shape of the padded bias. What shares a tile of it are the members of the grid."""
        sizes, facts = self.sizes, self.given.facts
        bias = self.given.block.bias
        assert bias is not None
        of_batch, of_head = bias.shape[0] > 1 or self.batch == 1, bias.shape[1] > 1 or self.heads == 1
        shared_heads = 1 if of_head else self.heads
        members = shared_heads * (1 if of_batch else self.batch)

        def real(at: At) -> At:
            batch = at.batch if of_batch else jax.lax.div(at.member, np.int32(shared_heads))
            head = at.head if of_head else jax.lax.rem(at.member, np.int32(shared_heads))
            q, kv = (at.own, at.visiting) if facts.bias_rows else (at.visiting, at.own)
            return At(batch, head, 0, q, kv)

        inputs = {name: operand._replace(at=_through(real, operand.at)) for name, operand in self._by_queries.items()}
        shape = (*bias.shape[:2], sizes.q_length if facts.bias_rows else 1, sizes.kv_length)
        zeros = jnp.zeros(shape, jnp.float32)
        inputs["dbias"] = Operand(align(zeros, axes_of(self.of_rows)))
        tile = inputs["bias"]
        dbias = Operand(zeros, tile.block, tile.at)
        return launch(
            functools.partial(
                backward_bias,
                facts=facts,
                part=sizes.part_of(sizes.kv_tile),
                begins=lambda step: (step.member == 0) if facts.bias_rows else (step.member == 0) & step.has(FIRST),
            ),
            tables.steps(
                self.given.block, sizes.q_tile, sizes.kv_tile, by_keys=not facts.bias_rows, one_list=not of_batch
            ),
            Grid(self.batch if of_batch else 1, self.heads if of_head else 1, members),
            inputs,
            {"dbias": dbias},
            scratch=self._scratch(by_keys=False),
            aliases={"dbias": "dbias"},
            cost=operands.cost(self.given, products=2),
            name="ringattn_backward_bias",
        )


def _through(real: Any, index: Any) -> Any:
    return lambda at: index(real(at))
