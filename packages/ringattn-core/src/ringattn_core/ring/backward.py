# SPDX-License-Identifier: Apache-2.0
"""The backward pass round the ring: while a kernel runs, the next keys arrive and the last keys' gradients leave."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..contract import ordering, packing
from ..contract.protocol import Gradients
from ..placement.layout import put_columns
from ..placement.padding import cleaned
from . import batching, hops, parcels
from .blocks import Differentiable, Ring, block, source
from .directions import Direction, Sum, gradient, joined, of_half, parts, split, with_half
from .forward import Residuals, sinks_of
from .second_derivatives import first_derivative_only
from .sends import Wires, after, after_hop, aligned, permuted, wire

Sums = tuple[Sum, ...]
"""Gradients summed over the hops so far, one entry for each direction round the ring."""
KeyGradients = tuple[jax.Array, ...]
"""`dk` and `dv` packed in one array, for each direction."""


class Rows(NamedTuple):
    """Arrays with a value for each query, which the backward kernel reads beside the block."""

    dout: jax.Array
    lse: jax.Array
    delta: jax.Array
    shift: jax.Array | None

    def parts(self, count: int) -> list["Rows"]:
        """Splits the arrays along their heads into `count` equal shares."""
        arrays = [parts(x, axis, count) for x, axis in zip(self, (2, 1, 1, 1), strict=True)]
        return [Rows(*share) for share in zip(*arrays, strict=True)]


def backward(ring: Ring, bias_fixed: bool, kept: Residuals, dout: Any, dlse: Any) -> Differentiable:
    """The cotangents of the inputs, from the residuals of the forward pass and the cotangents of its result."""
    inputs = kept.inputs
    dout, dlse = first_derivative_only([_array(x, inputs) for x in (dout, dlse)])
    rows = _rows(kept, dout, dlse)
    if ring.plan.ranks == 1:
        return _on_one_rank(ring, kept, bias_fixed, rows)
    directions = split(ring.plan.signs, inputs, kept.fixed)
    kernel = batching.backward(ring.kernel)
    over_ring = _Pass(ring, inputs, directions, rows.parts(len(directions)), kernel, inputs.k.dtype, bias_fixed)
    sums = over_ring.all_hops(dout)
    found = {name: [of_direction[name] for of_direction in sums] for name in sums[0]}
    dk, dv = packing.unpack(joined(found["kv"], -2), inputs.q.shape[-1])
    dbias = None if bias_fixed else gradient(found["bias"], inputs.bias, 1)
    dslopes = gradient(found["slopes"], inputs.slopes, 0)
    return _in_input_dtypes(kept, rows, joined(found["q"], 2), dk, dv, dbias, dslopes)


def _on_one_rank(ring: Ring, kept: Residuals, bias_fixed: bool, rows: Rows) -> Differentiable:
    """The gradients on a ring of one rank, whose kernel may return them in the dtypes of the inputs."""
    inputs = kept.inputs
    alone = block(ring, inputs, (inputs.k, inputs.v), kept.fixed, 0)
    alone = dataclasses.replace(alone, final=True, bias_fixed=bias_fixed, shift=rows.shift)
    found = batching.backward(ring.kernel)(alone, rows.dout, rows.lse, rows.delta, None)
    dslopes = None if found.dslopes is None else found.dslopes[0]
    return _in_input_dtypes(kept, rows, found.dq, found.dk, found.dv, found.dbias, dslopes)


def _rows(kept: Residuals, dout: jax.Array, dlse: jax.Array) -> Rows:
    """The arrays of `Rows`; the cotangents of padding are set to zero."""
    ids = kept.fixed.q_segments
    dout, dlse = cleaned(dout, ids), jnp.swapaxes(cleaned(jnp.swapaxes(dlse, 1, 2), ids), 1, 2)
    # Not an einsum: on a GPU XLA would compile it to a separate vector product for every row.
    products = dout.astype(jnp.float32) * kept.out.astype(jnp.float32)
    return Rows(dout, kept.lse, jnp.swapaxes(products.sum(-1), 1, 2) - dlse, kept.shift)


def _in_input_dtypes(kept: Residuals, rows: Rows, dq: Any, dk: Any, dv: Any, dbias: Any, dslopes: Any) -> Any:
    sinks = sinks_of(kept.inputs)
    dsinks = None if sinks is None else _sink_gradients(sinks, kept, rows.delta)
    inputs = dataclasses.replace(kept.inputs, bias=None if dbias is None else kept.inputs.bias)
    gradients = Differentiable(dq, dk, dv, dsinks, dbias, dslopes)
    return jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), gradients, inputs)


def _sink_gradients(sinks: jax.Array, kept: Residuals, delta: jax.Array) -> jax.Array:
    """The gradient of each sink: minus the sum over rows of the sink's probability times `delta`."""
    above = sinks[None, :, None, :] if kept.shift is None else sinks[None, :, None, :] - kept.shift[..., None]
    probability = jnp.exp(above - jnp.where(jnp.isneginf(kept.lse), 0.0, kept.lse)[..., None])
    return -jnp.einsum("bnt,bnts->ns", delta, probability, precision="highest")


def _array(cotangent: Any, inputs: Differentiable) -> jax.Array:
    """The cotangent as an array; JAX gives a `SymbolicZero` for a result that the loss does not depend on."""
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        zero: Any = cotangent
        return aligned(jnp.zeros(zero.shape, zero.dtype), inputs)
    return cotangent


@dataclasses.dataclass(frozen=True)
class _Pass:
    """What all hops of the backward pass share. `rows` has an entry for each direction."""

    ring: Ring
    inputs: Differentiable
    directions: Sequence[Direction]
    rows: Sequence[Rows]
    kernel: Callable[..., Gradients]
    dtype: Any
    bias_fixed: bool

    def all_hops(self, dout: jax.Array) -> Sums:
        """The sums over all hops: the other ranks' keys first, this rank's own last.

        The first send is tied to the raw cotangent; tying it to a derived array would make XLA compute that first.
        With separate sends, the kernel computes half of the heads of this rank's own keys while the first keys arrive,
        and the other half while the last gradients arrive.
        """
        plan, sums = self.ring.plan, tuple(self._zeros(direction) for direction in self.directions)
        if len(plan.offsets) == 1:
            _, total, sums = self.hop(self._own_keys([dout]), None, sums, 0, None, None)
        else:
            first, early = self._own_keys([dout]), None
            wires = permuted(self.ring, self.directions, first, plan.shifts[0])
            if plan.halves(self.inputs.k.shape[2]):
                early, sums = self._own_half(0, first, sums)
            behind, sums = self._visitors(wires, sums)
            own = self._own_keys([of_direction["q"] for of_direction in sums])
            _, total, sums = self.hop(own, behind, sums, 0, None, plan.homeward, early)
        return tuple({**of_direction, "kv": kv} for of_direction, kv in zip(sums, total, strict=True))

    def _visitors(self, wires: Wires, sums: Sums) -> tuple[KeyGradients, Sums]:
        """Runs the hops with other ranks' keys. Returns the key gradients of the last of these hops, and the sums.

        On a long ring a `scan` runs all of them but the first and the last.
        """
        offsets, shifts = self.ring.plan.offsets[1:], self.ring.plan.shifts
        onward = (*shifts[1:], None)
        wires, behind, sums = self.hop(wires, None, sums, offsets[0], onward[0], None)
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
        return behind, sums

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
        """Computes with the keys in `wires`; meanwhile sends them `onward` ranks, and `behind` by `back` ranks.

        `behind` are the key gradients of the hop before. `early` are this hop's key gradients for half of the heads,
        where these are known; then the kernel computes the other half. Returns three things: the keys that arrive; the
        gradients of the keys in `wires`, which are this hop's plus the gradients that arrive; and the sums.
        """
        done = [of_direction["q"] for of_direction in sums]
        wires = tuple(after(self.ring, x, done) for x in wires)
        sends = self.ring.plan.parcel(onward, back)
        if len(sends) == 1 and sends[0].keys and sends[0].gradients:
            following, arrived = self._send_parcel(wires, behind or (), sends[0].shift)
        else:
            wires, following, arrived = self._send_apart(wires, behind, done, onward, back)
        for arrival in (*(following or ()), *(arrived or ())):
            sums = tuple({**each, "q": ordering.tie_on_cpu(each["q"], arrival)} for each in sums)
        if early is None:
            made = [self._visit(*each, offset=offset) for each in self._each(wires, sums)]
            mine, sums = zip(*made, strict=True)
        else:
            late, sums = self._own_half(1, wires, sums)
            mine = tuple(jnp.concatenate([a, b], -2) for a, b in zip(early, late, strict=True))
        if arrived is not None:
            mine = tuple(here + there for here, there in zip(mine, arrived, strict=True))
        return following, mine, sums

    def _send_parcel(self, wires: Wires, behind: KeyGradients, shift: int) -> tuple[Wires, KeyGradients]:
        """Sends keys and the gradients behind them as one array."""
        leaving = tuple(parcels.join(x, late) for x, late in zip(wires, behind, strict=True))
        arrivals = map(parcels.split, permuted(self.ring, self.directions, leaving, shift))
        following, arrived = zip(*arrivals, strict=True)
        return following, arrived

    def _send_apart(
        self,
        wires: Wires,
        behind: KeyGradients | None,
        done: list[jax.Array],
        onward: int | None,
        back: int | None,
    ) -> tuple[Wires, Wires | None, KeyGradients | None]:
        """Sends keys and gradients as two arrays. Waits for the keys first, because the next hop needs them first."""
        ring = self.ring
        following = None if onward is None else permuted(ring, self.directions, wires, onward)
        if back is None or behind is None:
            return wires, following, None
        behind = tuple(after(ring, x, [*done, *wires]) for x in behind)
        arrived = permuted(ring, self.directions, behind, back)
        if following is not None:
            arrived = tuple(after(ring, x, following) for x in arrived)
        elif not ring.plan.joint:
            # The last send of gradients starts before the last kernel, which hides it.
            wires = tuple(after(ring, x, behind) for x in wires)
        return wires, following, arrived

    def _visit(
        self, direction: Direction, rows: Rows, x: parcels.Wire, sums: Sum, offset: Any
    ) -> tuple[jax.Array, Sum]:
        """Runs the kernel on one block. Returns its dk,dv, packed, and the sums with its other gradients added."""
        offset = direction.signed(offset)
        fixed = after_hop(direction.fixed, sums["q"])
        visited = block(self.ring, direction.inputs, parcels.from_wire(x, self.dtype), fixed, offset)
        visited = dataclasses.replace(visited, bias_fixed=self.bias_fixed, shift=rows.shift)
        found = self.kernel(visited, rows.dout, rows.lse, rows.delta, sums["q"])
        origin = source(self.ring, direction.fixed, offset)
        return packing.pack(found.dk, found.dv), self._added(sums, found, origin)

    def _own_half(self, half: int, wires: Wires, sums: Sums) -> tuple[KeyGradients, Sums]:
        """The key gradients of the first or second half of the heads of this rank's own keys."""
        made = []
        for direction, rows, x, before in self._each(wires, sums):
            share = split((direction.sign, direction.sign), direction.inputs, direction.fixed)[half]
            mine, found = self._visit(share, rows.parts(2)[half], parts(x, -2, 2)[half], of_half(before, half), 0)
            made.append((mine, with_half(before, found, half)))
        mine, sums = zip(*made, strict=True)
        return mine, sums

    def _added(self, sums: Sum, found: Gradients, origin: Any) -> Sum:
        """`sums` with the gradients of one hop added; `dbias` goes to the columns of the hop's keys."""
        bias, slopes = sums["bias"], sums["slopes"]
        if bias is not None and found.dbias is not None:
            bias = put_columns(bias, found.dbias, self.ring.layout, self.ring.plan.ranks, origin)
        if slopes is not None and found.dslopes is not None:
            slopes = slopes + found.dslopes.reshape(slopes.shape)
        return {"q": found.dq, "bias": bias, "slopes": slopes}

    def _own_keys(self, tokens: list[jax.Array]) -> Wires:
        """This rank's K,V, packed anew at each call: keeping them from the first hop to the last would cost memory."""
        pairs = [[after(self.ring, x, tokens) for x in (each.inputs.k, each.inputs.v)] for each in self.directions]
        return tuple(wire(self.ring, packing.pack(k, v)) for k, v in pairs)

    def _zeros(self, direction: Direction) -> Sum:
        bias = None if self.bias_fixed else direction.inputs.bias
        shapes = {"q": direction.inputs.q, "bias": bias, "slopes": direction.inputs.slopes}
        fresh = {name: None if x is None else jnp.zeros(x.shape, jnp.float32) for name, x in shapes.items()}
        return aligned(fresh, self.inputs)

    def _each(self, wires: Wires, sums: Sums) -> Any:
        return zip(self.directions, self.rows, wires, sums, strict=True)
