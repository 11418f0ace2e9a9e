# SPDX-License-Identifier: Apache-2.0
"""The engine: drives any block kernel round the ring, forward and backward, under one custom_vjp."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from ..contract import nonfinite, ordering, packing, rounding
from ..contract.merge import empty, lse_with_sinks, with_sinks
from ..contract.protocol import Own, OwnRows, Partial
from ..contract.varying import align, axes_of
from ..placement import axes
from ..placement.layout import put_columns
from . import batching
from .blocks import Differentiable, Fixed, Ring, block, gathered, source
from .directions import Sum, Way, gradient, joined, of_half, parts, split, with_half
from .second_derivatives import once

UNROLLED: Final = 8
"""Hops up to which the ring is unrolled: XLA overlaps an unrolled ring best; beyond, a scan keeps programs small."""

Result = tuple[Float[Array, "B T N Hv"], Float32[Array, "B N T"]]
Rows = tuple[jax.Array, jax.Array, jax.Array]
Wires = tuple[packing.Wire, ...]
Partials = tuple[Partial, ...]
Sums = tuple[Sum, ...]
"""One of each for every way round."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(ring: Ring, inputs: Differentiable, fixed: Fixed) -> Result:
    """`(out, lse)` of this rank's queries against the keys of all ranks."""
    return _forward(ring, inputs, fixed, kept=False)[0]


def _forward(ring: Ring, inputs: Differentiable, fixed: Fixed, kept: bool = True) -> tuple[Result, tuple[Any, ...]]:
    """The result, and what the backward pass needs if that is to be `kept`."""
    dtype_of_out = inputs.q.dtype
    in_two = kept and rounding.in_two(dtype_of_out)
    final = inputs.sinks is None and _finishes(ring) and (in_two or not kept)
    fixed = gathered(ring, fixed)
    q, bad = (inputs.q, None) if getattr(ring.kernel, "any_queries", False) else nonfinite.queries(inputs.q)
    ways = split(ring.plan.turns, dataclasses.replace(inputs, q=q), fixed)
    wires = tuple(_wire(ring, _packed(ring, way.inputs.k, way.inputs.v, poison=True)) for way in ways)
    kernel, dtype = batching.forward(ring.kernel), inputs.k.dtype
    own = _own(ring, inputs)

    def nothing_yet(way: Way, wire: packing.Wire) -> Partial:
        whole = block(ring, way.inputs, packing.from_wire(wire, dtype), way.fixed, 0)
        return _aligned(ring, empty(whole, dtype_of_out if final else jnp.float32, final and in_two), inputs)

    partials = tuple(nothing_yet(way, wire) for way, wire in zip(ways, wires, strict=True))

    def hop(wires: Wires, partials: Partials, offset: Any, shift: int | None) -> tuple[Wires, Partials]:
        # All sends are issued before the kernels, and not before the kernels of the last hop are done.
        done = [partial.out for partial in partials if not partial.empty]
        wires = wires if shift is None else tuple(_after(ring, wire, done) for wire in wires)
        following = wires if shift is None else _sent(ring, ways, wires, shift)
        found = []
        for way, wire, partial in zip(ways, wires, partials, strict=True):
            kv = packing.from_wire(wire, dtype)
            visited = block(ring, way.inputs, kv, _at(way.fixed, partial.lse), way.come(offset))
            found.append(kernel(dataclasses.replace(visited, own=own), partial))
        return following, tuple(found)

    offsets, shifts = ring.plan.offsets, (*ring.plan.shifts, None)
    if len(offsets) > UNROLLED and set(ring.plan.shifts) == {1}:
        looped = len(offsets) - 1
        partials = tuple(dataclasses.replace(partial, empty=False) for partial in partials)
        (wires, partials), _ = jax.lax.scan(
            lambda carry, offset: (hop(*carry, offset, 1), None), (wires, partials), jnp.arange(looped, dtype=jnp.int32)
        )
        offsets, shifts = offsets[looped:], shifts[looped:]
    for offset, shift in zip(offsets, shifts, strict=True):
        wires, partials = hop(wires, partials, offset, shift)
    out, lse = joined([partial.out for partial in partials], 2), joined([partial.lse for partial in partials], 1)
    partial = Partial(out, lse) if bad is None else nonfinite.poisoned(Partial(out, lse), bad)
    whole = with_sinks(partial, _sinks(inputs))
    rests = [partial.rest for partial in partials if partial.rest is not None]
    own = own and own._replace(found=partials[0].found)
    kept_out = whole.out, joined(rests, 2) if rests else None
    return (whole.out.astype(dtype_of_out), whole.lse), (inputs, fixed, *kept_out, partial.lse, own)


def _differentiated(ring: Ring, *given: Any) -> tuple[Result, tuple[Any, ...]]:
    """`_forward` of inputs that come with whether anybody differentiates by them.

    Of the bias the backward pass has to know: an array of the length 1 says that nobody does. It may not be in the tree
    of what is kept: of a function that JAX has traced once it remembers one tree, whatever it is differentiated by.
    """
    inputs, fixed = jax.tree.map(lambda x: x.value, given)
    bias_fixed = inputs.bias is not None and not given[0].bias.perturbed
    result, kept = _forward(ring, once(inputs), fixed)
    return result, (jnp.zeros(int(bias_fixed), jnp.int8), *kept)


def _backward(ring: Ring, residuals: tuple[Any, ...], cotangents: tuple[Any, Any]) -> tuple[Differentiable, None]:
    told, inputs, fixed, out, rest, keys_lse, own = residuals
    bias_fixed = told.size == 1
    dout, dlse = once([_whole(ring, x, inputs) for x in cotangents])
    sinks = _sinks(inputs)
    lse = keys_lse if sinks is None else lse_with_sinks(keys_lse, sinks)[0]
    seen = ~jnp.isneginf(keys_lse)
    rows = getattr(ring.kernel, "rows", nonfinite.rows)(inputs.q, dout, out, rest, lse, dlse, seen)
    dsinks = None
    if sinks is not None:
        share = jnp.exp(sinks[:, None, :] - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None])
        dsinks = -jnp.einsum("bnt,bnts->ns", rows.whole, share, precision="highest")
    elif own is not None:
        # What is not read of this, or of `rows`, is not made: zeros neither.
        given_dlse = None if _nothing(cotangents[1]) else dlse
        own = own._replace(rows=OwnRows(inputs.q, dout, out, rest, lse, given_dlse))
    numbers, given = dataclasses.replace(inputs, q=rows.q), (rows.dout, rows.lse, rows.delta)
    if _finishes(ring):
        sums = _alone(ring, numbers, fixed, bias_fixed, own, *given)
    else:
        sums = _gradients(ring, numbers, fixed, bias_fixed, *given)
    found = {name: [of_way[name] for of_way in sums] for name in sums[0]}
    dk, dv = packing.unpack(joined(found["kv"], -2), inputs.q.shape[-1])
    inputs = dataclasses.replace(inputs, bias=None if bias_fixed else inputs.bias)
    dbias, dslopes = gradient(found["bias"], inputs.bias, 1), gradient(found["slopes"], inputs.slopes, 0)
    gradients = Differentiable(joined(found["q"], 2), dk, dv, dsinks, dbias, dslopes)
    return jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), gradients, inputs), None


attend.defvjp(_differentiated, _backward, symbolic_zeros=True)


def _whole(ring: Ring, cotangent: Any, inputs: Differentiable) -> jax.Array:
    """A cotangent as an array: where nothing depends on a result JAX gives only the shape of one."""
    if not _nothing(cotangent):
        return cotangent
    like: Any = cotangent
    return _aligned(ring, jnp.zeros(like.shape, like.dtype), inputs)


def _nothing(cotangent: Any) -> bool:
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


def _finishes(ring: Ring) -> bool:
    """Whether the kernel gives what is final: its results need not be summed in float32, nor start from anything."""
    return ring.plan.ranks == 1 and getattr(ring.kernel, "finishes", False)


def _own(ring: Ring, inputs: Differentiable) -> Own | None:
    """K and V as they came, where the kernel wants to see to them itself."""
    counts = getattr(ring.kernel, "counts", 0)
    if not counts or not _finishes(ring):
        return None
    return Own(inputs.k, inputs.v, _aligned(ring, jnp.zeros(counts, jnp.int32), inputs))


def _alone(
    ring: Ring,
    inputs: Differentiable,
    fixed: Fixed,
    bias_fixed: bool,
    own: Own | None,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
) -> Sums:
    """The gradients on a ring of one rank, as its kernel `finishes` them."""
    # Not after the rows that are made fit, where a kernel may do without: they would be made for that.
    token = dout if own is None or own.rows is None else own.rows.dout
    k, v = (_after(ring, x, [token]) for x in (inputs.k, inputs.v))
    kv = _packed(ring, k, v, poison=False)
    visited = dataclasses.replace(block(ring, inputs, kv, fixed, 0, bias_fixed), own=own)
    found = batching.backward(ring.kernel)(visited, dout, lse, delta, None)
    slopes = None if found.dslopes is None else found.dslopes[0]
    return ({"q": found.dq, "kv": packing.pack(found.dk, found.dv), "bias": found.dbias, "slopes": slopes},)


def _gradients(
    ring: Ring,
    inputs: Differentiable,
    fixed: Fixed,
    bias_fixed: bool,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
) -> Sums:
    """The sums over all hops, of each way. Each parcel brings the next keys, and the gradients of those before them.

    The way back begins with a send and ends with one. Where sends are apart, half of the heads of the rank's own keys
    are worked on while the first arrives, and half while the last does.
    """
    ways = split(ring.plan.turns, inputs, fixed)
    kernel, dtype = batching.backward(ring.kernel), inputs.k.dtype
    given = _rows(dout, lse, delta, len(ways))

    def zeros(way: Way) -> Sum:
        bias = None if bias_fixed else way.inputs.bias
        shapes = {"q": way.inputs.q, "bias": bias, "slopes": way.inputs.slopes}
        fresh = {name: None if x is None else jnp.zeros(x.shape, jnp.float32) for name, x in shapes.items()}
        return _aligned(ring, fresh, inputs)

    def compute(way: Way, rows: Rows, kv: packing.Packed, sums: Sum, offset: Any) -> tuple[jax.Array, Sum]:
        offset = way.come(offset)
        visited = block(ring, way.inputs, kv, _at(way.fixed, sums["q"]), offset, bias_fixed)
        found = kernel(visited, *rows, sums["q"])
        return packing.pack(found.dk, found.dv), _added(ring, sums, found, source(ring, fixed, offset))

    def whole(number: int, kv: packing.Packed, sums: Sum, offset: Any) -> tuple[jax.Array, Sum]:
        return compute(ways[number], given[number], kv, sums, offset)

    def own_half(half: int, number: int, kv: packing.Packed, sums: Sum) -> tuple[jax.Array, Sum]:
        way = ways[number]
        share = split((way.turn, way.turn), way.inputs, way.fixed)[half]
        mine, found = compute(share, _rows(*given[number], 2)[half], parts(kv, -2, 2)[half], of_half(sums, half), 0)
        return mine, with_half(sums, found, half)

    def hop(
        wires: Wires, behind: Any, sums: Sums, offset: Any, onward: int | None, back: int | None, work: Any = whole
    ) -> tuple[Any, Any, Sums]:
        """Works on the keys of `wires` while they go `onward` and the gradients `behind` them follow by `back`."""
        done = [of_way["q"] for of_way in sums]
        wires = tuple(_after(ring, wire, done) for wire in wires)
        sends = ring.plan.parcel(onward, back)
        if len(sends) == 1 and sends[0].keys and sends[0].gradients:
            joint = tuple(packing.join(wire, late) for wire, late in zip(wires, behind, strict=True))
            arrivals = [packing.split(parcel) for parcel in _sent(ring, ways, joint, sends[0].shift)]
            following, arrived = zip(*arrivals, strict=True)
        else:
            following = None if onward is None else _sent(ring, ways, wires, onward)
            # Keys leave first and are awaited first: what computes next needs them, and the gradients later.
            late = None if back is None else tuple(_after(ring, x, [*done, *wires]) for x in behind)
            arrived = None if back is None or late is None else _sent(ring, ways, late, back)
            if following is not None and arrived is not None:
                arrived = tuple(_after(ring, x, following) for x in arrived)
            if onward is None and late is not None and not ring.plan.joint:
                # What goes home leaves before the last kernel begins, and arrives behind it.
                wires = tuple(_after(ring, wire, late) for wire in wires)
        for came in (*(following or ()), *(arrived or ())):
            sums = tuple({**of_way, "q": ordering.settled(of_way["q"], came)} for of_way in sums)
        mine, sums = each(work, wires, sums, offset)
        if arrived is not None:
            mine = tuple(here + there for here, there in zip(mine, arrived, strict=True))
        return following, mine, sums

    def each(work: Any, wires: Wires, sums: Sums, *offset: Any) -> Any:
        made = [work(n, packing.from_wire(wire, dtype), sums[n], *offset) for n, wire in enumerate(wires)]
        return zip(*made, strict=True)

    def own(tokens: list[jax.Array]) -> Wires:
        """Packed when it is needed, twice, and not kept between."""
        pairs = [(_after(ring, way.inputs.k, tokens), _after(ring, way.inputs.v, tokens)) for way in ways]
        return tuple(_wire(ring, _packed(ring, k, v, poison=False)) for k, v in pairs)

    sums: Sums = tuple(zeros(way) for way in ways)
    behind, last = None, whole
    offsets, shifts = ring.plan.offsets[1:], ring.plan.shifts
    if offsets:
        first = own([dout])
        wires = _sent(ring, ways, first, shifts[0])
        if ring.plan.halves(inputs.k.shape[2]):
            early, sums = each(functools.partial(own_half, 0), first, sums)

            def last(number: int, kv: packing.Packed, sums: Sum, offset: Any) -> tuple[jax.Array, Sum]:
                late, sums = own_half(1, number, kv, sums)
                return jnp.concatenate([early[number], late], -2), sums

        onward = (*shifts[1:], None)
        wires, behind, sums = hop(wires, behind, sums, offsets[0], onward[0], None)
        steps = list(zip(offsets[1:], onward[1:], shifts[1:], strict=True))
        if len(steps) > UNROLLED and set(shifts) == {1}:
            (wires, behind, sums), _ = jax.lax.scan(
                lambda carry, offset: (hop(*carry, offset, 1, 1), None),
                (wires, behind, sums),
                jnp.asarray(offsets[1:-1]),
            )
            steps = steps[-1:]
        for offset, onward, back in steps:
            wires, behind, sums = hop(wires, behind, sums, offset, onward, back)
    mine = own([of_way["q"] for of_way in sums])
    _, total, sums = hop(mine, behind, sums, 0, None, ring.plan.homeward, last)
    return tuple({**of_way, "kv": kv} for of_way, kv in zip(sums, total, strict=True))


def _rows(dout: jax.Array, lse: jax.Array, delta: jax.Array, count: int) -> list[Rows]:
    """What belongs to the rows of queries, for each share of the heads."""
    return list(zip(parts(dout, 2, count), parts(lse, 1, count), parts(delta, 1, count), strict=True))


def _added(ring: Ring, sums: Sum, found: Any, origin: Any) -> Sum:
    """The sums with what one hop found; every hop has columns of the bias for itself."""
    bias, slopes = sums["bias"], sums["slopes"]
    if bias is not None:
        bias = put_columns(bias, found.dbias, ring.layout, ring.plan.ranks, origin)
    if slopes is not None:
        slopes = slopes + found.dslopes.reshape(slopes.shape)
    return {"q": found.dq, "bias": bias, "slopes": slopes}


def _sinks(inputs: Differentiable) -> Float32[Array, "N n"] | None:
    if inputs.sinks is None:
        return None
    sinks = inputs.sinks.astype(jnp.float32)
    return jnp.where(jnp.isposinf(sinks), jnp.nan, sinks)


def _at(fixed: Fixed, token: jax.Array) -> Fixed:
    """The same for one hop: the tables that a kernel makes of it are not made for all hops at the start."""
    return dataclasses.replace(fixed, rank=ordering.number(fixed.rank, token))


def _after(ring: Ring, x: jax.Array, tokens: Iterable[jax.Array]) -> jax.Array:
    """`x`, such that nothing that reads it starts before all the tokens are there."""
    return functools.reduce(ordering.of(ring.kernel), tokens, x)


def _sent(ring: Ring, ways: Sequence[Way], given: Wires, shift: int) -> Wires:
    """What arrives where every rank sends the share of each way `shift` ranks on, on that way."""
    ranks = ring.plan.ranks

    def permuted(x: jax.Array, shift: int) -> jax.Array:
        return jax.lax.ppermute(x, ring.axis, [(rank, (rank + shift) % ranks) for rank in range(ranks)])

    def as_integers(x: jax.Array, shift: int) -> jax.Array:
        return packing.from_wire(permuted(packing.to_wire(x), shift), x.dtype)

    def sent(x: jax.Array, shift: int) -> jax.Array:
        if x.dtype in (jnp.float32, jnp.uint16):
            return permuted(x, shift)
        integers, floats = (functools.partial(send, shift=shift) for send in (as_integers, permuted))
        if not axes.bound(ring.axis):  # a branch may not name the axis then
            return integers(x)
        return jax.lax.platform_dependent(x, tpu=floats, default=integers)

    return tuple(sent(x, way.come(shift)) for way, x in zip(ways, given, strict=True))


def _packed(ring: Ring, k: jax.Array, v: jax.Array, poison: bool) -> packing.Packed:
    return getattr(ring.kernel, "keys_and_values", nonfinite.keys_and_values)(k, v, poison)


def _wire(ring: Ring, kv: packing.Packed) -> packing.Wire:
    """K,V as the engine carries it. Where it never joins a parcel it stays what the kernel reads: no copy a hop.

    The barrier keeps XLA from packing it twice, once for the kernel and once for the send.
    """
    return packing.to_wire(kv) if ring.plan.joint else jax.lax.optimization_barrier(kv)


def _aligned(ring: Ring, tree: Any, inputs: Differentiable) -> Any:
    """Fresh accumulators vary over whatever the inputs vary over."""
    return align(tree, axes_of(inputs))
