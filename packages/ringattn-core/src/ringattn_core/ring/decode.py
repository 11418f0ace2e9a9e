# SPDX-License-Identifier: Apache-2.0
"""Attention of a few queries to a cache of keys that is sharded over the ring: results are merged, no key travels."""

import functools
from typing import Any

import jax
from jaxtyping import Array, Float, Float32

from ..contract.call import Call
from ..contract.merge import log_sum_exp, merged_over, with_sinks
from ..contract.protocol import BlockKernel
from ..contract.varying import align, axes_of
from ..errors import DerivativeError
from . import batching
from .blocks import block
from .directions import Direction
from .engine import prepared
from .forward import sinks_of


def decode(kernel: BlockKernel, call: Call) -> tuple[Float[Array, "B T N Hv"], Float32[Array, "B N T"]]:
    """`(out, lse)` of queries that all ranks of the ring have, each rank with its own shard of the keys."""
    call = _not_differentiable(call)
    with jax.debug_infs(False):  # -inf is a valid score and a valid lse
        return _attend(kernel, call)


@functools.partial(jax.jit, static_argnums=0)
def _attend(kernel: BlockKernel, call: Call) -> Any:
    ring, call, location = prepared(kernel, call)
    here = Direction(1, *align((call, location), axes_of(call, location)))
    own = block(ring, here, (here.call.key, here.call.value), 0)
    partial = merged_over(batching.forward(kernel)(own, None), ring.axis)
    partial = with_sinks(partial, sinks_of(call))
    return partial.out.astype(call.query.dtype), log_sum_exp(partial)


@jax.custom_jvp
def _not_differentiable(call: Call) -> Call:
    return call


@_not_differentiable.defjvp
def _(primals: Any, tangents: Any) -> Any:
    raise DerivativeError("decode_attention has no derivative. For training, call ring_attention")
