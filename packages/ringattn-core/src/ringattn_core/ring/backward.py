# SPDX-License-Identifier: Apache-2.0
"""The backward pass round the ring: the next keys, and the gradients of the last ones, travel while a hop computes."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..contract import nonfinite, ordering, packing
from ..contract.merge import lse_with_sinks
from ..contract.protocol import Gradients, Own, OwnRows
from ..placement.layout import put_columns
from . import batching, hops
from .blocks import Differentiable, Fixed, Ring, block, source
from .directions import Sum, Way, gradient, joined, of_half, parts, split, with_half
from .forward import finishes, sinks_of
from .second_derivatives import once
from .sends import Wires, after, after_hop, aligned, packed, permuted, wire

Rows = tuple[jax.Array, jax.Array, jax.Array]
"""`dout`, `lse` and `delta`."""
Sums = tuple[Sum, ...]
"""The sums over the hops so far, one for every direction round the ring."""
KeyGradients = tuple[jax.Array, ...]
"""`dk` and `dv` packed in one array, one for every direction."""


def backward(
    ring: Ring,
    bias_fixed: bool,
    inputs: Differentiable,
    fixed: Fixed,
    out: jax.Array,
    rest: jax.Array | None,
    keys_lse: jax.Array,
    own: Own | None,
    dout: Any,
    dlse: Any,
) -> Differentiable:
    """The cotangents of `inputs`, from the residuals of the forward pass and the cotangents of its result."""
    unused_lse = _is_zero(dlse)
    dout, dlse = once([_array(x, inputs) for x in (dout, dlse)])
    sinks = sinks_of(inputs)
    lse = keys_lse if sinks is None else lse_with_sinks(keys_lse, sinks)[0]
    seen = ~jnp.isneginf(keys_lse)
    rows = getattr(ring.kernel, "rows", nonfinite.rows)(inputs.q, dout, out, rest, lse, dlse, seen)
    dsinks = None if sinks is None else _sink_gradients(sinks, lse, rows.whole)
    if sinks is None and own is not None:
        # XLA drops what the kernel does not read of these, or of `rows`.
        own = own._replace(rows=OwnRows(inputs.q, dout, out, rest, lse, None if unused_lse else dlse))
    numbers, given = dataclasses.replace(inputs, q=rows.q), (rows.dout, rows.lse, rows.delta)
    if finishes(ring):
        sums = _on_one_rank(ring, numbers, fixed, bias_fixed, own, given)
    else:
        ways = split(ring.plan.turns, numbers, fixed)
        shares = _shares(given, len(ways))
        kernel = batching.backward(ring.kernel)
        sums = _Pass(ring, inputs, ways, shares, kernel, inputs.k.dtype, bias_fixed).all_hops(rows.dout)
    return _gradients(sums, inputs, dsinks, bias_fixed)


def _gradients(sums: Sums, inputs: Differentiable, dsinks: jax.Array | None, bias_fixed: bool) -> Differentiable:
    """The gradients of all heads, in the dtypes of the inputs."""
    found = {name: [of_way[name] for of_way in sums] for name in sums[0]}
    dk, dv = packing.unpack(joined(found["kv"], -2), inputs.q.shape[-1])
    inputs = dataclasses.replace(inputs, bias=None if bias_fixed else inputs.bias)
    dbias, dslopes = gradient(found["bias"], inputs.bias, 1), gradient(found["slopes"], inputs.slopes, 0)
    gradients = Differentiable(joined(found["q"], 2), dk, dv, dsinks, dbias, dslopes)
    return jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), gradients, inputs)


def _sink_gradients(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    share = jnp.exp(sinks[:, None, :] - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None])
    return -jnp.einsum("bnt,bnts->ns", delta, share, precision="highest")


def _array(cotangent: Any, inputs: Differentiable) -> jax.Array:
    """A cotangent as an array: JAX gives only the shape of one for a result that nothing depends on."""
    if not _is_zero(cotangent):
        return cotangent
    return aligned(jnp.zeros(cotangent.shape, cotangent.dtype), inputs)


def _is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


def _on_one_rank(
    ring: Ring, inputs: Differentiable, fixed: Fixed, bias_fixed: bool, own: Own | None, rows: Rows
) -> Sums:
    """The gradients on a ring of one rank, whose kernel returns final results."""
    # Ordered after the raw cotangent: a cleaned one would have to be computed for that alone.
    token = rows[0] if own is None or own.rows is None else own.rows.dout
    k, v = (after(ring, x, [token]) for x in (inputs.k, inputs.v))
    visited = block(ring, inputs, packed(ring, k, v, poison=False), fixed, 0, bias_fixed)
    found = batching.backward(ring.kernel)(dataclasses.replace(visited, own=own), *rows, None)
    slopes = None if found.dslopes is None else found.dslopes[0]
    return ({"q": found.dq, "kv": packing.pack(found.dk, found.dv), "bias": found.dbias, "slopes": slopes},)


def _shares(rows: Rows, count: int) -> list[Rows]:
    """The rows of each of `count` equal shares of the heads."""
    dout, lse, delta = rows
    return list(zip(parts(dout, 2, count), parts(lse, 1, count), parts(delta, 1, count), strict=True))


@dataclasses.dataclass(frozen=True)
class _Pass:
    """What stays the same from hop to hop. Directions round the ring are counted by their index in `ways`."""

    ring: Ring
    inputs: Differentiable
    ways: Sequence[Way]
    rows: Sequence[Rows]
    kernel: Callable[..., Gradients]
    dtype: Any
    bias_fixed: bool

    def all_hops(self, dout: jax.Array) -> Sums:
        """The sums over all hops: the other ranks' keys first, this rank's own last.

        The pass begins after `dout` is computed, with a send, and ends with a send. Where keys and gradients travel
        apart, half of the heads of the rank's own keys are computed while the first keys arrive, and the other half
        while the last gradients do.
        """
        plan, sums = self.ring.plan, tuple(self._zeros(way) for way in self.ways)
        offsets, shifts = plan.offsets[1:], plan.shifts
        behind = early = None
        if offsets:
            first = self._own_keys([dout])
            wires = permuted(self.ring, self.ways, first, shifts[0])
            if plan.halves(self.inputs.k.shape[2]):
                early, sums = self._own_half(0, first, sums)
            onward = (*shifts[1:], None)
            wires, behind, sums = self.hop(wires, behind, sums, offsets[0], onward[0], None)
            steps = list(zip(offsets[1:], onward[1:], shifts[1:], strict=True))
            if len(steps) > hops.UNROLLED and set(shifts) == {1}:
                (wires, behind, sums), _ = jax.lax.scan(
                    lambda carry, offset: (self.hop(*carry, offset, 1, 1), None),
                    (wires, behind, sums),
                    jnp.asarray(offsets[1:-1]),
                )
                steps = steps[-1:]
            for offset, forth, back in steps:
                wires, behind, sums = self.hop(wires, behind, sums, offset, forth, back)
        own = self._own_keys([of_way["q"] for of_way in sums])
        _, total, sums = self.hop(own, behind, sums, 0, None, plan.homeward, early)
        return tuple({**of_way, "kv": kv} for of_way, kv in zip(sums, total, strict=True))

    def hop(
        self,
        wires: Wires,
        behind: KeyGradients | None,
        sums: Sums,
        offset: Any,
        onward: int | None,
        back: int | None,
        early: KeyGradients | None = None,
    ) -> tuple[Any, Any, Sums]:
        """Computes with the keys in `wires`, while they go `onward` and the gradients `behind` them follow by `back`.

        With `early`, the gradients of half of the heads, only the other half is computed. Returns the keys and the
        key gradients that arrive, and the sums.
        """
        done = [of_way["q"] for of_way in sums]
        wires = tuple(after(self.ring, x, done) for x in wires)
        sends = self.ring.plan.parcel(onward, back)
        if len(sends) == 1 and sends[0].keys and sends[0].gradients:
            following, arrived = self._send_parcel(wires, behind or (), sends[0].shift)
        else:
            wires, following, arrived = self._send_apart(wires, behind, done, onward, back)
        for arrival in (*(following or ()), *(arrived or ())):
            sums = tuple({**of_way, "q": ordering.settled(of_way["q"], arrival)} for of_way in sums)
        if early is None:
            made = [self._work(way, rows, x, s, offset) for way, rows, x, s in self._each(wires, sums)]
            mine, sums = zip(*made, strict=True)
        else:
            late, sums = self._own_half(1, wires, sums)
            mine = tuple(jnp.concatenate([a, b], -2) for a, b in zip(early, late, strict=True))
        if arrived is not None:
            mine = tuple(here + there for here, there in zip(mine, arrived, strict=True))
        return following, mine, sums

    def _send_parcel(self, wires: Wires, behind: KeyGradients, shift: int) -> tuple[Wires, KeyGradients]:
        """Sends keys and the gradients behind them as one array."""
        parcels = tuple(packing.join(x, late) for x, late in zip(wires, behind, strict=True))
        following, arrived = zip(*map(packing.split, permuted(self.ring, self.ways, parcels, shift)), strict=True)
        return following, arrived

    def _send_apart(
        self,
        wires: Wires,
        behind: KeyGradients | None,
        done: list[jax.Array],
        onward: int | None,
        back: int | None,
    ) -> tuple[Wires, Wires | None, KeyGradients | None]:
        """Sends keys, then gradients. Keys are awaited first, because the next hop needs them first."""
        ring = self.ring
        following = None if onward is None else permuted(ring, self.ways, wires, onward)
        if back is None or behind is None:
            return wires, following, None
        behind = tuple(after(ring, x, [*done, *wires]) for x in behind)
        arrived = permuted(ring, self.ways, behind, back)
        if following is not None:
            arrived = tuple(after(ring, x, following) for x in arrived)
        elif not ring.plan.joint:
            # The gradients that go home leave before the last kernel begins, and arrive behind it.
            wires = tuple(after(ring, x, behind) for x in wires)
        return wires, following, arrived

    def _work(self, way: Way, rows: Rows, x: packing.Wire, sums: Sum, offset: Any) -> tuple[jax.Array, Sum]:
        """The key gradients of one block, packed, and the sums with its other gradients."""
        return self._work_on(way, rows, packing.from_wire(x, self.dtype), sums, way.come(offset))

    def _work_on(self, way: Way, rows: Rows, kv: packing.Packed, sums: Sum, offset: Any) -> tuple[jax.Array, Sum]:
        visited = block(self.ring, way.inputs, kv, after_hop(way.fixed, sums["q"]), offset, self.bias_fixed)
        found = self.kernel(visited, *rows, sums["q"])
        origin = source(self.ring, way.fixed, offset)
        return packing.pack(found.dk, found.dv), self._added(sums, found, origin)

    def _own_half(self, half: int, wires: Wires, sums: Sums) -> tuple[KeyGradients, Sums]:
        """The key gradients of the first or second half of the heads of this rank's own keys."""
        made = []
        for way, rows, x, of_way in self._each(wires, sums):
            share = split((way.turn, way.turn), way.inputs, way.fixed)[half]
            kv = parts(packing.from_wire(x, self.dtype), -2, 2)[half]
            mine, found = self._work_on(share, _shares(rows, 2)[half], kv, of_half(of_way, half), 0)
            made.append((mine, with_half(of_way, found, half)))
        mine, sums = zip(*made, strict=True)
        return mine, sums

    def _added(self, sums: Sum, found: Gradients, origin: Any) -> Sum:
        """The sums with the gradients of one hop; every hop has its own columns of the bias."""
        bias, slopes = sums["bias"], sums["slopes"]
        if bias is not None and found.dbias is not None:
            bias = put_columns(bias, found.dbias, self.ring.layout, self.ring.plan.ranks, origin)
        if slopes is not None and found.dslopes is not None:
            slopes = slopes + found.dslopes.reshape(slopes.shape)
        return {"q": found.dq, "bias": bias, "slopes": slopes}

    def _own_keys(self, tokens: list[jax.Array]) -> Wires:
        """This rank's keys and values, packed twice: keeping them between the first hop and the last costs memory."""
        pairs = [(after(self.ring, way.inputs.k, tokens), after(self.ring, way.inputs.v, tokens)) for way in self.ways]
        return tuple(wire(self.ring, packed(self.ring, k, v, poison=False)) for k, v in pairs)

    def _zeros(self, way: Way) -> Sum:
        bias = None if self.bias_fixed else way.inputs.bias
        shapes = {"q": way.inputs.q, "bias": bias, "slopes": way.inputs.slopes}
        fresh = {name: None if x is None else jnp.zeros(x.shape, jnp.float32) for name, x in shapes.items()}
        return aligned(fresh, self.inputs)

    def _each(self, wires: Wires, sums: Sums) -> Any:
        return zip(self.ways, self.rows, wires, sums, strict=True)
