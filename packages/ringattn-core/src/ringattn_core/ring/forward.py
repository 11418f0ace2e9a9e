# SPDX-License-Identifier: Apache-2.0
"""The forward pass round the ring: each hop sends keys for the next hop while the kernel uses the keys at hand.

`docs/architecture.md` follows one hop with shapes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32

from ..contract import batching
from ..contract.call import Call
from ..contract.expansion import Expansion
from ..contract.merge import with_sinks
from ..contract.protocol import Partial
from . import whole_keys
from .blocks import Location, Ring, block_of
from .plan import Hop, Level
from .remat import LSE_NAME, OUT_NAME
from .sends import KV, after, packed, sent


class Result(NamedTuple):
    """One rank's results. `max_logits` covers this rank's queries; it is `None` if the call does not ask for it."""

    out: Float[Array, "B T N Hv"]
    lse: Float32[Array, "B N T"]
    max_logits: Float32[Array, " N"] | None = None


ForwardBody = Callable[[KV, Any, Partial | None], Partial]
"""`body(kv, offset, partial)` continues `partial` with the keys `kv`, which have travelled `offset` to this rank. It is
a kernel, or the loop over an inner mesh axis of the ring."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residuals:
    """What the backward pass reads: the call, with the key ids and positions of all ranks, and the results."""

    call: Call
    location: Location
    out: Float[Array, "B T N Hv"]
    lse: Float32[Array, "B N T"]


def forward(ring: Ring, call: Call, location: Location) -> tuple[Result, Residuals]:
    """The result for this rank's queries and the keys of all ranks, and the residuals for the backward pass."""
    call = whole_keys.with_all_ids(ring, call.narrowed(), location)
    kernel, own = batching.forward(ring.kernel), KV(call.travelling)

    def one_block(kv: KV, offset: Any, partial: Partial | None) -> Partial:
        block = block_of(ring, call, location.after_on_cpu(partial and partial.lse), kv, offset)
        return kernel(dataclasses.replace(block, final=not ring.levels and call.softmax_aux is None), partial)

    body: ForwardBody = one_block if ring.expand is None else expanded(ring.expand, call.expand_params, one_block)
    for level in ring.levels:
        body = around(level, body)
    if ring.gathers:
        body = whole_keys.forward(ring, location, body)
    partial = with_sinks(body(packed(own) if ring.passes_on else own, 0, None), sinks_of(call))
    out = checkpoint_name(partial.out.astype(call.query.dtype), OUT_NAME)
    lse = checkpoint_name(partial.lse, LSE_NAME)
    max_logits = None if partial.max_logits is None else partial.max_logits.max((0, 2))
    return Result(out, lse, max_logits), Residuals(call, location, out, lse)


def around(level: Level, body: ForwardBody) -> ForwardBody:
    """The loop over a `Level`: calls `body` with the keys of each hop, this rank's own first."""

    def loop(own: KV, outer_offset: Any, partial: Partial | None) -> Partial:
        def one_hop(carry: tuple[KV, Partial | None], hop: Hop) -> Any:
            kv, partial = carry
            # The send and the kernel of this hop start after the kernel of the hop before.
            kv = after(kv, partial and partial.lse)
            keys_out = after(own, partial and partial.lse) if level.direct else kv
            keys_in = sent(level, keys_out, hop.key_send)
            return keys_in, body(kv, outer_offset + hop.offset, partial)

        return level.each(one_hop, (own, partial), level.forward_hops)[1]

    return loop


def expanded(expand: Expansion, params: Any, body: ForwardBody) -> ForwardBody:
    """Calls `body` with the keys and values that `expand` computes from the arrays that are here."""

    def on_arrival(latents: KV, offset: Any, partial: Partial | None) -> Partial:
        return body(KV(expand(latents.arrays, params), latents.start), offset, partial)

    return on_arrival


def sinks_of(call: Call) -> Float32[Array, "N sinks"] | None:
    """The attention sinks of the call. A sink of +inf becomes NaN, because it would silently hide every key."""
    sinks = call.softmax_aux
    return None if sinks is None else jnp.where(jnp.isposinf(sinks), jnp.nan, sinks)
