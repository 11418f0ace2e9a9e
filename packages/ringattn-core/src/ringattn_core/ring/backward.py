# SPDX-License-Identifier: Apache-2.0
"""The backward pass round the ring: while a kernel runs, the next keys arrive and the previous hop's dk, dv leave."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..contract import batching, ordering, packing
from ..contract.call import ARRAYS, Call
from ..contract.expansion import Expansion
from ..contract.protocol import Partial
from ..contract.static_masks import wants_static_masks
from ..placement.arrays import zero_padding
from . import all_gather
from .blocks import Ring, block_of, queries_of
from .exchange import exchange
from .forward import sinks_of
from .kv import KV, total
from .plan import Hop, Level


class Sums(NamedTuple):
    """Gradients summed over the hops so far; `None` before the first. Kernels add to `dq`, core to the others.

    In a `ring_loop`, `dq` is the carry.
    """

    dq: Any = None
    dbias: jax.Array | None = None
    dslopes: jax.Array | None = None
    dparams: list[jax.Array] | None = None


Body = Callable[[KV, Any, Sums], tuple[KV, Sums]]
"""`body(kv, owner, sums)` returns the gradients of keys and values `kv` of the rank `owner`, and `sums` with the
gradients of this hop added. It is a kernel, or the loop over an inner mesh axis of the ring."""


def backward(ring: Ring, call: Call, result: Partial, dout: jax.Array, dlse: jax.Array, bias_fixed: bool) -> Call:
    """The cotangents of the arrays of `call`, as a `Call`, from the forward pass's `result` and its cotangents.

    `bias_fixed`: the bias is not differentiated.
    """
    raw = dout
    dout, delta = _dout_and_delta(call, result, dout, dlse)
    kernel, own, queries = batching.backward(ring.kernel), KV(call.travelling), queries_of(ring, call)
    travel = bool(ring.levels) or ring.all_gather
    # Gradients of these arrays are summed over ranks in float32 outside, so the kernel must not round them.
    summed_over_ranks = {*call.wide} - ({"bias"} if bias_fixed else set())
    block_fields = {"bias_fixed": bias_fixed, "final": not travel and not summed_over_ranks}
    block_fields |= {"out": result.out} if wants_static_masks(ring.kernel) else {}

    def one_block(kv: KV, owner: Any, sums: Sums) -> tuple[KV, Sums]:
        owner = ordering.tie_on_cpu(owner, kv) if ring.levels else owner  # as in the forward pass
        block = block_of(ring, call, queries, kv, owner)
        new = kernel(dataclasses.replace(block, **block_fields), dout, result.lse, delta, sums.dq)
        # Gradients take the form of the keys: a pair, or packed in one array.
        dkv = (new.dk, new.dv) if isinstance(kv.arrays, tuple) else packing.pack(new.dk, new.dv)
        dbias, dslopes = new.dbias, new.dslopes
        if call.bias is not None and dbias is not None and ring.key_shards.count > 1:
            zeros = ordering.zeros(call.bias.shape, dbias).astype(dbias.dtype)
            whole = zeros if sums.dbias is None else sums.dbias
            dbias = ring.key_shards.put_columns(whole, dbias, owner, kv.start)
        if dslopes is not None and sums.dslopes is not None:
            dslopes += sums.dslopes
        return dataclasses.replace(kv, arrays=dkv), Sums(new.dq, dbias, dslopes)

    body: Body = one_block if call.expand is None else expanding(call.expand, call.expand_params, one_block)
    for level in ring.levels:
        body = around(level, body)
    if ring.all_gather:
        body = all_gather.scattering(ring, body)
    # The raw `dout` makes the first send wait for the forward pass. Arrays derived from `dout` are ready later.
    dkv, sums = body(ordering.tie(own, raw) if travel else own, ring.rank, Sums())
    gradients = {"query": sums.dq, "softmax_aux": _sink_gradients(call, result.lse, delta)}
    gradients |= {"bias": sums.dbias, "alibi_slopes": sums.dslopes}
    if call.expand is not None:
        dlatents = [dx if dx is None else dx.astype(x.dtype) for dx, x in zip(dkv.arrays, call.travelling, strict=True)]
        return dataclasses.replace(_cotangents(call, gradients), latents=dlatents, expand_params=sums.dparams)
    dk, dv = packing.unpack(dkv.arrays, call.query.shape[-1])
    return _cotangents(call, gradients | {"key": dk, "value": dv})


def around(level: Level, body: Body) -> Body:
    """The loop over a `Level`, as a body: it calls `body` with the keys of each hop.

    The last call has the keys that the loop is `given`, of the rank `owner`. These are this rank's own keys in the
    outermost loop, and the keys of the outer hop in a loop inside another. Each hop sends the gradients of keys
    and values that the hop before computed; the last kernel hides the last of these sends. If ranks pass keys on, the
    gradients follow the keys, and each rank adds its own. If keys come straight from their owner, their gradients go
    straight back to it.
    """

    def loop(given: KV, owner: Any, sums: Sums) -> tuple[KV, Sums]:
        def one_hop(carry: tuple[KV, tuple[KV, ...], Sums], hop: Hop) -> Any:
            kv, gradients, sums = carry
            now = exchange(level, hop, given, kv, ended=sums.dq, gradients=gradients)
            sums = sums._replace(dq=now.before_kernel(sums.dq))
            dkv, sums = body(now.kv, level.owner(owner, hop.distance), sums)
            return now.keys_in, now.added_to(dkv), sums

        *others, last = level.backward_hops
        # The keys of the second hop of the forward pass are those of the first hop here. No kernel hides this send.
        first = exchange(level, level.forward_hops[0], given, given, ended=sums.dq)
        _, gradients, sums = level.run_hops(one_hop, (first.keys_in, (), sums), others)
        _, gradients, sums = one_hop((given, gradients, sums), last)
        return functools.reduce(total, gradients), sums

    return loop


def expanding(expand: Expansion, params: Any, body: Body) -> Body:
    """Calls `body` with the keys and values that `expand` computes from the latents of each hop.

    Returns the gradients of these arrays in place of `dk` and `dv`, and adds those of the parameters to `sums`. The
    gradient of an array of integers is `None`.
    """

    def on_arrival(latents: KV, owner: Any, sums: Sums) -> tuple[KV, Sums]:
        pair, pull = jax.vjp(expand, latents.arrays, params)
        dkv, new = body(dataclasses.replace(latents, arrays=pair), owner, sums)
        of_latents, of_params = pull(tuple(dx.astype(x.dtype) for dx, x in zip(dkv.arrays, pair, strict=True)))
        dlatents, dparams = (
            [None if dx.dtype == jax.dtypes.float0 else dx.astype(jnp.float32) for dx in gradients]
            for gradients in (of_latents, of_params)
        )
        dparams = dparams if sums.dparams is None else jax.tree.map(jnp.add, sums.dparams, dparams)
        return dataclasses.replace(latents, arrays=dlatents), new._replace(dparams=dparams)

    return on_arrival


def _dout_and_delta(call: Call, result: Partial, dout: jax.Array, dlse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`dout` with zeros in its padding, and `delta`: for each query and head, `Σ dout * out - dlse`."""
    ids = call.q_segment_ids
    dout, dlse = zero_padding(dout, ids), jnp.swapaxes(zero_padding(jnp.swapaxes(dlse, 1, 2), ids), 1, 2)
    # Not an einsum: on a GPU XLA would compile it to a separate vector product for every row.
    assert result.out is not None
    products = dout.astype(jnp.float32) * result.out.astype(jnp.float32)
    return dout, jnp.swapaxes(products.sum(-1), 1, 2) - dlse


def _cotangents(call: Call, gradients: dict[str, jax.Array | None]) -> Call:
    """The call with each array replaced by its gradient, or `None`. Arrays in `call.wide` get theirs in float32."""

    def of(name: str) -> Any:
        x, gradient = getattr(call, name), gradients.get(name)
        if x is None or gradient is None:
            return None
        return gradient.reshape(x.shape).astype(jnp.float32 if name in call.wide else x.dtype)

    return dataclasses.replace(call, **{name: of(name) for name in ARRAYS})


def _sink_gradients(call: Call, lse: jax.Array, delta: jax.Array) -> jax.Array | None:
    """The gradient of each sink: minus the sum over rows of the sink's probability times `delta`."""
    sinks = sinks_of(call)
    if sinks is None:
        return None
    probability = jnp.exp(sinks[None, :, None, :] - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None])
    return -jnp.einsum("bnt,bnts->ns", delta, probability, precision="highest")
