# SPDX-License-Identifier: Apache-2.0
"""The programs that tuning times: the kernel on the hops of one rank, forward and backward, on random arrays."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

from ..config import BwdParams, FwdParams
from ..contract.checks import backward, forward
from ..contract.packing import pack
from ..contract.protocol import Block, BlockKernel, Partial
from ..contract.rule import Rule
from ..masks.builder import Built
from ..placement.layout import indices
from ..ring.backward import Rows
from ..ring.blocks import Differentiable, Fixed, Ring, block
from ..ring.directions import parts, split
from ..ring.hops import plan
from .problem import Problem

HOPS: Final = 4
"""The most hops of a trial: the first is with the rank's own keys, and the later ones are much alike."""
DOCUMENTS: Final = 4
"""The documents of equal length in a shard of a trial, where the call has segment ids."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """The inputs of one rank on one device, and the programs that run them through the kernel.

    The rank is the last, which has the most work under a causal mask. Nothing is sent; with `two_way` the heads are
    those of one direction. Each hop calls one compiled program, so that XLA cannot merge hops, and donates the result
    that it continues.
    """

    ring: Ring
    inputs: Differentiable
    fixed: Fixed
    dout: jax.Array
    offsets: tuple[jax.Array, ...]

    def forward(self, params: FwdParams) -> Callable[[], Partial]:
        """The forward pass over all hops with these parameters."""
        ring = dataclasses.replace(self.ring, rule=dataclasses.replace(self.ring.rule, fwd_params=params))

        def run() -> Partial:
            partial = None
            for offset in self.offsets:
                partial = _forward_hop(ring, self.inputs, self.fixed, offset, partial)
            assert partial is not None
            return partial

        return run

    def backward(self, params: BwdParams, whole: Partial) -> Callable[[], Any]:
        """The backward pass over all hops with these parameters; `whole` is the result of `forward`."""
        ring = dataclasses.replace(self.ring, rule=dataclasses.replace(self.ring.rule, bwd_params=params))
        rows = _rows(whole, self.dout)

        def run() -> Any:
            dq, found = None, []
            for offset in self.offsets:
                dq, others = _backward_hop(ring, self.inputs, self.fixed, offset, rows, dq)
                found.append(others)
            return dq, found

        return run


def trial(kernel: BlockKernel, problem: Problem, device: jax.Device, built: Built | None = None) -> Trial:
    """The trial of `problem` on `device`; `built` are its masks. Equal problems get equal inputs."""
    with jax.default_device(device):
        rule = Rule(
            scale=1.0 / math.sqrt(problem.head_dim),
            causal=problem.causal,
            window=problem.window,
            chunk=problem.chunk,
            soft_cap=30.0 if problem.soft_cap else None,
            dropout=0.1 if problem.dropout else 0.0,
            masks=() if built is None else built.masks,
            mask_of_head=() if built is None else built.of_head,
            increasing=problem.positions is None,
            precision=problem.precision,
            fused_backward=problem.fused_backward,
        )
        lengths = problem.q_length, problem.kv_length
        hops = plan(rule, problem.layout, problem.ranks, *lengths, two_way=problem.two_way)
        inputs, fixed, dout = _inputs(problem)
        direction, *_ = split(hops.signs, inputs, fixed)
        dout, *_ = parts(dout, 2, len(hops.signs))
        offsets = tuple(jnp.asarray(direction.signed(offset), jnp.int32) for offset in hops.offsets[:HOPS])
        ring = Ring(kernel, rule, hops, problem.layout, ())
        made = Trial(ring, direction.inputs, direction.fixed, dout, offsets)
    jax.block_until_ready((made.inputs, made.fixed, made.dout, made.offsets))
    return made


def _inputs(problem: Problem) -> tuple[Differentiable, Fixed, jax.Array]:
    batch, dtype = problem.batch, jnp.dtype(problem.dtype)
    of_q, of_kv = (batch, problem.q_length), (batch, problem.kv_length)
    seeds = jax.random.split(jax.random.key(0), 5)
    shapes = (
        (*of_q, problem.heads, problem.head_dim),
        (*of_kv, problem.kv_heads, problem.head_dim),
        (*of_kv, problem.kv_heads, problem.value_dim),
        (*of_q, problem.heads, problem.value_dim),
    )
    q, k, v, dout = (jax.random.normal(seed, shape, dtype) for seed, shape in zip(seeds, shapes, strict=False))
    rank = problem.ranks - 1
    tokens = indices(problem.layout, problem.ranks, rank, problem.q_length)
    keys = jnp.concatenate([indices(problem.layout, problem.ranks, r, problem.kv_length) for r in range(problem.ranks)])
    document = max(problem.kv_length // DOCUMENTS, 1)
    leading = None if problem.positions is None else (1, *problem.positions)[-2:-1]
    fixed = Fixed(
        rank=jnp.asarray(rank, jnp.int32),
        batch_index=jnp.arange(batch, dtype=jnp.int32),
        head_index=jnp.arange(problem.heads, dtype=jnp.int32),
        q_segments=jnp.broadcast_to(tokens // document, of_q) if problem.segments else None,
        kv_segments=jnp.broadcast_to(keys // document, (batch, keys.size)) if problem.segments else None,
        q_positions=None if leading is None else jnp.broadcast_to(tokens, (*leading, tokens.size)),
        kv_positions=None if leading is None else jnp.broadcast_to(keys, (*leading, keys.size)),
        mask=None if problem.attention_mask is None else jnp.ones(problem.attention_mask, bool),
        seed=jnp.asarray(0, jnp.uint32) if problem.dropout else None,
    )
    bias = None if problem.bias is None else jax.random.normal(seeds[4], problem.bias, dtype)
    slopes = jnp.geomspace(0.5, 2**-8, problem.heads, dtype=jnp.float32) if problem.slopes else None
    return Differentiable(q, k, v, None, bias, slopes), fixed, dout


def _visited(ring: Ring, inputs: Differentiable, fixed: Fixed, offset: jax.Array) -> Block:
    """The block of a hop as the engine makes it: on a ring of one final, with keys and values that are not packed."""
    alone = ring.plan.ranks == 1
    kv = (inputs.k, inputs.v) if alone else pack(inputs.k, inputs.v)
    return dataclasses.replace(block(ring, inputs, kv, fixed, offset), final=alone)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _forward_hop(ring: Ring, inputs: Differentiable, fixed: Fixed, offset: jax.Array, partial: Partial | None) -> Any:
    return forward(ring.kernel, _visited(ring, inputs, fixed, offset), partial)


@jax.jit
def _rows(whole: Partial, dout: jax.Array) -> Rows:
    """What the backward pass of every hop reads of the queries."""
    products = dout.astype(jnp.float32) * whole.out.astype(jnp.float32)
    return Rows(dout, whole.lse, jnp.swapaxes(products.sum(-1), 1, 2), whole.shift)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=5)
def _backward_hop(
    ring: Ring, inputs: Differentiable, fixed: Fixed, offset: jax.Array, rows: Rows, dq: jax.Array | None
) -> tuple[jax.Array, Any]:
    visited = dataclasses.replace(_visited(ring, inputs, fixed, offset), shift=rows.shift)
    found = backward(ring.kernel, visited, rows.dout, rows.lse, rows.delta, dq)
    return found.dq, (found.dk, found.dv, found.dbias, found.dslopes)


def release() -> None:
    """Frees the programs that trials compiled."""
    programs: tuple[Any, ...] = (_forward_hop, _rows, _backward_hop)
    for program in programs:
        program.clear_cache()
