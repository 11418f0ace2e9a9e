# SPDX-License-Identifier: Apache-2.0
"""The backward pass round the ring: while a kernel runs, the next keys arrive and the last keys' gradients leave."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from ..contract import batching, packing
from ..contract.call import IN_BLOCK, Call
from ..contract.protocol import BlockKernel, Gradients
from ..contract.varying import align, axes_of
from ..placement.arrays import cleaned
from . import whole_keys
from .blocks import BY_COLUMN, Ring, block, owner, put_columns, static_masks
from .forward import Residuals, sinks_of
from .plan import Level, Step
from .sends import KV, after, after_on_cpu, packed, sent, total

LOCAL: Final = tuple(x.name[1:] for x in dataclasses.fields(Gradients) if x.name not in ("dq", "dk", "dv"))
"""The arrays of a block whose gradients a rank adds up over its hops. Kernels continue `dq`; `dk` and `dv` travel."""


class Sums(NamedTuple):
    """Gradients summed over the hops so far: `dq`, which kernels continue, and others by the names of their arrays."""

    dq: jax.Array | None
    others: dict[str, jax.Array]


Body = Callable[[KV, Any, Sums], tuple[KV, Sums]]
"""Returns the gradients of the keys that have travelled some offset to this rank, and continues the other gradients."""


class PerQuery(NamedTuple):
    """Arrays with a value for each query, which the backward kernel reads beside the block."""

    dout: jax.Array
    lse: jax.Array
    delta: jax.Array
    out: jax.Array | None

    @classmethod
    def of(cls, kernel: BlockKernel, kept: Residuals, dout: jax.Array, dlse: jax.Array) -> "PerQuery":
        """These arrays, from the residuals and the cotangents of the results. Cotangents of padding count as zeros."""
        ids = kept.call.q_segment_ids
        dout, dlse = cleaned(dout, ids), jnp.swapaxes(cleaned(jnp.swapaxes(dlse, 1, 2), ids), 1, 2)
        # Not an einsum: on a GPU XLA would compile it to a separate vector product for every row.
        products = dout.astype(jnp.float32) * kept.out.astype(jnp.float32)
        delta = jnp.swapaxes(products.sum(-1), 1, 2) - dlse
        return cls(dout, kept.lse, delta, kept.out if static_masks(kernel) else None)


def backward(ring: Ring, bias_fixed: bool, kept: Residuals, dout: jax.Array, dlse: jax.Array) -> Call:
    """The cotangents of the call's arrays, from the residuals of the forward pass and the cotangents of its result."""
    call, location, queries = kept.call, kept.location, PerQuery.of(ring.kernel, kept, dout, dlse)
    kernel, own = batching.backward(ring.kernel), KV((call.key, call.value))
    travel = bool(ring.levels) or ring.gathers
    final = not travel and not {*call.wide} - ({"bias"} if bias_fixed else set())

    def one_block(kv: KV, offset: Any, sums: Sums) -> tuple[KV, Sums]:
        kv = packed(kv) if ring.passes_on else kv
        visited = block(ring, call, location.after_on_cpu(kv) if ring.levels else location, kv, offset)
        visited = dataclasses.replace(visited, bias_fixed=bias_fixed, out=queries.out, final=final)
        found = kernel(visited, queries.dout, queries.lse, queries.delta, sums.dq)
        dkv = (found.dk, found.dv) if isinstance(kv.arrays, tuple) else packing.pack(found.dk, found.dv)
        others = _added(ring, call, sums.others, found, owner(ring, location, offset), kv.start)
        return KV(dkv, kv.start), Sums(found.dq, others)

    body: Body = one_block
    for level in ring.levels:
        body = around(level, body)
    if ring.gathers:
        body = whole_keys.backward(ring, location, body)
    # No send in the forward pass. Tied to the raw cotangent: a derived array would have to be computed first.
    dkv, sums = body(after(own, dout) if travel else own, 0, Sums(None, {}))
    dk, dv = dkv.pair(call.query.shape[-1])
    found = {"q": sums.dq, "k": dk, "v": dv, "sinks": _sink_gradients(kept, queries.delta), **sums.others}
    return _cotangents(call, found)


def around(level: Level, body: Body) -> Body:
    """The loop over a level: calls `body` with the keys of every rank that it brings here, this rank's own last.

    The kernel with this rank's own keys hides the last send. Gradients leave one hop after the kernel that computed
    them. If keys are passed on, their gradients follow the keys, and each rank adds its contribution (`total`). If rows
    came straight from their owner, the gradients go straight home.
    """

    def loop(own: KV, base: Any, sums: Sums) -> tuple[KV, Sums]:
        def hop(carry: tuple[KV, KV | None, tuple[KV, ...], Sums], step: Step) -> Any:
            kv, behind, returned, sums = carry
            # The sends and the kernel of this hop start after the kernel of the hop before, and keys leave first.
            kv = after(kv, sums.dq)
            leaving = after(own, sums.dq) if level.straight else kv
            behind = after(behind, kv)
            arriving, returning = sent(level, leaving, step.keys), sent(level, behind, step.gradients)
            if arriving is None:  # the kernel must not start before the gradients can leave, which it hides
                kv = after(kv, behind)
            sums = sums._replace(dq=after_on_cpu(sums.dq, (arriving, returning)))
            dkv, sums = body(kv, base + step.offset, sums)
            returning = after(returning, arriving)  # keys are awaited first: the next hop needs them first
            if level.straight and returning is not None:
                return arriving, dkv, (*returned, returning), sums
            return arriving, total(dkv, returning), returned, sums

        arriving = sent(level, after(own, sums.dq), level.first)
        _, behind, returned, sums = level.each(hop, (arriving, None, (), sums), level.backward)
        _, dkv, returned, sums = hop((own, behind, returned, sums), level.own)
        return functools.reduce(total, returned, dkv), sums

    return loop


def _added(
    ring: Ring, call: Call, sums: dict[str, jax.Array], found: Gradients, shard: Any, start: int
) -> dict[str, jax.Array]:
    """The sums with the gradients of one hop, whose keys are the rows of `shard` from `start` on."""

    def added(name: str, new: jax.Array) -> jax.Array:
        if name not in BY_COLUMN or ring.keys.count == 1:
            return sums[name] + new if name in sums else new
        shape = (*new.shape[:-1], getattr(call, name).shape[-1])
        whole = sums[name] if name in sums else align(jnp.zeros(shape, new.dtype), axes_of(new))
        return put_columns(ring, whole, new, shard, start)

    return {name: added(name, x) for name in LOCAL if (x := getattr(found, f"d{name}")) is not None}


def _cotangents(call: Call, found: dict[str, Any]) -> Call:
    """The call with each array replaced by its gradient from `found`, or by `None` if it has none.

    `found` has the names of the arrays in a block.
    """

    def of(name: str) -> Any:
        x, gradient = getattr(call, name), found.get(IN_BLOCK[name])
        dtype = jnp.float32 if name in call.wide else getattr(x, "dtype", None)
        return None if x is None or gradient is None else gradient.reshape(x.shape).astype(dtype)

    return dataclasses.replace(call, **{name: of(name) for name in IN_BLOCK})


def _sink_gradients(kept: Residuals, delta: jax.Array) -> jax.Array | None:
    """The gradient of each sink: minus the sum over rows of the sink's probability times `delta`."""
    sinks = sinks_of(kept.call)
    if sinks is None:
        return None
    probability = jnp.exp(sinks[None, :, None, :] - jnp.where(jnp.isneginf(kept.lse), 0.0, kept.lse)[..., None])
    return -jnp.einsum("bnt,bnts->ns", delta, probability, precision="highest")
