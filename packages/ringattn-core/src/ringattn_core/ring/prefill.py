# SPDX-License-Identifier: Apache-2.0
"""Attention of a chunk of queries to a sharded cache, where queries and partial results travel, and keys stay."""

import dataclasses
import functools
from typing import Any

import jax
from jaxtyping import Array, Float, Float32

from ..contract.call import Call
from ..contract.merge import log_sum_exp, merged_over, with_sinks
from ..contract.protocol import BlockKernel
from ..contract.varying import align, axes_of
from ..placement import axes
from ..placement.layout import order
from . import batching
from .blocks import block
from .directions import Direction
from .engine import prepared, without_derivative
from .forward import sinks_of


def prefill(kernel: BlockKernel, call: Call) -> tuple[Float[Array, "B T N Hv"], Float32[Array, "B N T"]]:
    """`(out, lse)` of this rank's queries against the keys of all ranks. The call has a `query_offset`."""
    call = _not_differentiable(call)
    with jax.debug_infs(False):  # -inf is a valid score and a valid lse
        return _attend(kernel, call)


@functools.partial(jax.jit, static_argnums=0)
def _attend(kernel: BlockKernel, call: Call) -> Any:
    ring, everyone, location = prepared(kernel, _with_all_queries(call))
    here = Direction(1, *align((everyone, location), axes_of(everyone, location)))
    own = block(ring, here, (here.call.key, here.call.value), 0)
    partial = merged_over(batching.forward(kernel)(own, None), ring.axis, scattered=True)
    partial = with_sinks(partial, sinks_of(everyone))
    return partial.out.astype(call.query.dtype), log_sum_exp(partial)


def _with_all_queries(call: Call) -> Call:
    """The call with the queries of all ranks, in the order of the ranks, and their positions."""
    assert call.axis_name is not None and call.query_offset is not None
    ranks = axes.size("axis_name", call.axis_name)
    index = order(call.layout, ranks, ranks * call.query.shape[1])
    return dataclasses.replace(
        call,
        query=jax.lax.all_gather(call.query, call.axis_name, axis=1, tiled=True),
        q_positions=call.query_offset.reshape(-1, 1) + index[None],
        query_offset=None,
    )


_not_differentiable = without_derivative(
    "prefill_attention has no derivative where it sends the queries. Pass send='keys'"
)
