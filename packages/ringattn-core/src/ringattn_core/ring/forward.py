# SPDX-License-Identifier: Apache-2.0
"""The forward pass round the ring: each hop sends keys for the next hop while the kernel uses the keys at hand.

`docs/architecture.md` follows one hop with shapes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float32

from ..contract import batching, ordering
from ..contract.call import Call
from ..contract.protocol import Partial
from . import all_gather
from .blocks import Ring, block_of, queries_of
from .exchange import exchange
from .kv import KV
from .plan import Hop, Level
from .remat import LSE_NAME, OUT_NAME

Body = Callable[[KV, Any, Any], Any]
"""`body(kv, owner, partial)` continues `partial` with keys `kv` of the rank `owner`. It is a kernel, or the loop over
an inner mesh axis of the ring. `partial` is a `Partial`, or the carry of a `ring_loop`; `None` at the first call."""


def _computed(partial: Partial | None) -> jax.Array | None:
    """An array that the kernel of the hop before computes; `None` before the first kernel."""
    return None if partial is None or partial.out is None else partial.lse


def forward(ring: Ring, call: Call) -> Partial:
    """Attention of this rank's queries to the keys of all ranks; `out` is in the dtype of the queries.

    `call` has the segment ids and positions of the keys of all ranks (`key_ids.with_all_ids`).
    """
    kernel, own, queries = batching.forward(ring.kernel), KV(call.travelling), queries_of(ring, call)

    def one_block(kv: KV, owner: Any, partial: Partial | None) -> Partial:
        if call.expand is not None:
            kv = dataclasses.replace(kv, arrays=call.expand(kv.arrays, call.expand_params))
        # Without this, XLA on CPU computes positions and tile lists, which derive from the owner, for all hops at once.
        owner = ordering.tie_on_cpu(owner, _computed(partial))
        block = block_of(ring, call, queries, kv, owner)
        # With an all-gather too: one block has all keys, so nothing continues its output.
        return kernel(dataclasses.replace(block, final=not ring.levels), partial)

    body: Body = one_block
    for level in ring.levels:
        body = around(level, body)
    if ring.all_gather:
        body = all_gather.gathering(ring, body)
    partial = body(own, ring.rank, beginning(call))
    assert partial.out is not None
    out = checkpoint_name(partial.out.astype(call.query.dtype), OUT_NAME)
    return Partial(out, checkpoint_name(partial.lse, LSE_NAME), partial.max_logits)


def around(level: Level, body: Body, ended: Callable[[Any], Any] = _computed) -> Body:
    """The loop over a `Level`, as a body: it calls `body` with the keys of each hop.

    The first call has the keys that the loop is `given`, of the rank `owner`. These are this rank's own keys in the
    outermost loop, and the keys of the outer hop in a loop inside another. `ended` finds, in a partial result, an array
    that the kernel of the hop computes.
    """

    def loop(given: KV, owner: Any, partial: Any) -> Any:
        def one_hop(carry: tuple[KV, Any], hop: Hop) -> Any:
            kv, partial = carry
            now = exchange(level, hop, given, kv, ended=ended(partial))
            return now.keys_in, body(now.kv, level.owner(owner, hop.distance), partial)

        return level.run_hops(one_hop, (given, partial), level.forward_hops)[1]

    return loop


def beginning(call: Call) -> Partial | None:
    """The partial result that the ring begins from: weight and no value if the call has sinks, else `None`.

    Only the first kernel gets it, so sinks count once, not once a hop.
    """
    sinks = sinks_of(call)
    if sinks is None:
        return None
    batch, length, heads, _ = call.query.shape
    lse = jnp.broadcast_to(jax.nn.logsumexp(sinks, axis=-1)[None, :, None], (batch, heads, length))
    return Partial(None, lse, jnp.full_like(lse, -jnp.inf) if call.rule.return_max_logits else None)


def sinks_of(call: Call) -> Float32[Array, "N sinks"] | None:
    """The attention sinks of the call. A sink of +inf becomes NaN, because it would silently hide every key."""
    sinks = call.softmax_aux
    return None if sinks is None else jnp.where(jnp.isposinf(sinks), jnp.nan, sinks)
