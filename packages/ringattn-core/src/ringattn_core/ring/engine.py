# SPDX-License-Identifier: Apache-2.0
"""How a block kernel answers a whole call: the per-shard function that core makes of it."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from ..contract.call import Call
from ..contract.protocol import BlockKernel
from ..contract.rule import Rule
from ..contract.varying import align, axes_of
from ..masks.builder import Built
from ..placement import axes
from .blocks import Differentiable, Fixed, Ring
from .custom_vjp import attend
from .hops import plan
from .parcels import joint


def run(kernel: BlockKernel, call: Call) -> tuple[jax.Array, jax.Array]:
    """`(out, lse)` of one shard, by the ring engine over `kernel`."""
    ring, inputs, fixed = prepared(kernel, call)
    # Masked scores, and the lse of a row that sees no key, are -inf on purpose.
    with jax.debug_infs(False):
        return _attend(ring, *align((inputs, fixed), axes_of(inputs, fixed)))


def prepared(kernel: BlockKernel, call: Call) -> tuple[Ring, Differentiable, Fixed]:
    """What the engine makes of the call of one shard: its plan and rule, and its inputs in canonical form."""
    axis = call.axis_name or ()
    ranks = axes.size("axis_name", axis)
    rule = _rule(call)
    q_length, kv_length = call.query.shape[1], call.key.shape[1]
    ring = Ring(
        kernel=kernel,
        rule=rule,
        plan=plan(rule, call.layout, ranks, q_length, kv_length, call.two_way, joint(kernel)),
        layout=call.layout,
        axis=axis,
    )
    inputs = Differentiable(call.query, call.key, call.value, call.softmax_aux, call.bias, call.alibi_slopes)
    fixed = Fixed(
        jnp.asarray(axes.coordinate(axis), jnp.int32),
        _indices(call.batch_axis_name, call.query.shape[0]),
        _indices(call.head_axis_name, call.query.shape[2]),
        call.q_segment_ids,
        call.kv_segment_ids,
        _grouped(call.q_positions),
        _grouped(call.kv_positions),
        call.attention_mask,
        call.dropout_seed,
    )
    return ring, inputs, fixed


@functools.partial(jax.jit, static_argnums=0)
def _attend(ring: Ring, inputs: Differentiable, fixed: Fixed) -> tuple[jax.Array, jax.Array]:
    """Compiled once for equal calls, also where the caller does not use `jax.jit`."""
    return attend(ring, inputs, fixed)


def _indices(axis: tuple[str, ...] | None, count: int) -> Int32[Array, " count"]:
    """The global indices of this rank's share of an axis."""
    return jnp.asarray(axes.coordinate(axis or ()) * count + jnp.arange(count), jnp.int32)


def _grouped(positions: jax.Array | None) -> jax.Array | None:
    return positions[None] if positions is not None and positions.ndim == 1 else positions


def _rule(call: Call) -> Rule:
    built = call.mask_builder or Built((), ())
    return Rule(
        scale=call.softmax_scale,
        causal=call.causal,
        window=call.sliding_window,
        chunk=call.chunk_size,
        soft_cap=call.logits_soft_cap,
        dropout=call.dropout_prob,
        masks=built.masks,
        mask_of_head=built.of_head,
        increasing=call.q_positions is None,
        precision=call.precision,
        fused_backward=call.fused_backward,
        fwd_params=call.fwd_params,
        bwd_params=call.bwd_params,
    )
