# SPDX-License-Identifier: Apache-2.0
"""The backward pass round the ring: while a kernel runs, the next keys arrive and the last keys' gradients leave."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from ..contract import ordering, packing
from ..contract.call import IN_BLOCK, Call
from ..contract.protocol import BlockKernel, Gradients
from ..contract.varying import align, axes_of
from ..placement.layout import put_columns
from ..placement.padding import cleaned
from . import batching, hops, parcels
from .blocks import BY_COLUMN, Ring, block, in_block_form, source, static_masks
from .directions import CALL_NAMES, Direction, Sum, halved, joined, joined_sums, parts, split
from .forward import Residuals, sinks_of
from .sends import Wires, after, after_hop, permuted, wire
from .whole_keys import own_gradients, whole_keys

SUMMED: Final = tuple(x.name[1:] for x in dataclasses.fields(Gradients) if x.name not in ("dq", "dk", "dv"))
"""The arrays whose gradients this file adds up. Kernels continue `dq`; `dk` and `dv` travel behind their keys."""
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
    out: jax.Array | None

    @classmethod
    def of(cls, kernel: BlockKernel, kept: Residuals, dout: jax.Array, dlse: jax.Array) -> "Rows":
        """The rows, from the residuals and the cotangents of the results. Cotangents of padding count as zeros."""
        ids = kept.call.q_segment_ids
        dout, dlse = cleaned(dout, ids), jnp.swapaxes(cleaned(jnp.swapaxes(dlse, 1, 2), ids), 1, 2)
        # Not an einsum: on a GPU XLA would compile it to a separate vector product for every row.
        products = dout.astype(jnp.float32) * kept.out.astype(jnp.float32)
        delta = jnp.swapaxes(products.sum(-1), 1, 2) - dlse
        return cls(dout, kept.lse, delta, kept.shift, kept.out if static_masks(kernel) else None)

    def parts(self, count: int) -> list["Rows"]:
        """Splits the arrays along their heads into `count` equal shares."""
        arrays = [parts(x, axis, count) for x, axis in zip(self, (2, 1, 1, 1, 2), strict=True)]
        return [Rows(*share) for share in zip(*arrays, strict=True)]


def backward(ring: Ring, bias_fixed: bool, kept: Residuals, dout: jax.Array, dlse: jax.Array) -> Call:
    """The cotangents of the call's arrays, from the residuals of the forward pass and the cotangents of its result."""
    call, rows = kept.call, Rows.of(ring.kernel, kept, dout, dlse)
    directions, kernel = split(ring.plan.signs, call, kept.location), batching.backward(ring.kernel)
    if ring.plan.ranks == 1:
        # If no rank adds to them, the kernel may return final gradients in the dtypes of the inputs.
        alone = block(ring, directions[0], whole_keys(ring, call, kept.location, [dout]), 0)
        added = ring.gathers or bool({*call.wide} - ({"bias"} if bias_fixed else set()))
        alone = dataclasses.replace(alone, final=not added, bias_fixed=bias_fixed, shift=rows.shift, out=rows.out)
        made = kernel(alone, rows.dout, rows.lse, rows.delta, None)
        found = {field.name[1:]: getattr(made, field.name) for field in dataclasses.fields(made)}
        found["k"], found["v"] = own_gradients(ring, call, kept.location, made.dk, made.dv)
    else:
        kv, sums = _Pass(ring, directions, rows.parts(len(directions)), kernel, bias_fixed).all_hops(dout)
        found = joined_sums(sums, call)
        found["k"], found["v"] = packing.unpack(joined(kv, -2), call.query.shape[-1])
    return _cotangents(ring, call, found | {"sinks": _sink_gradients(kept, rows.delta)})


def _cotangents(ring: Ring, call: Call, found: dict[str, Any]) -> Call:
    """The call with each array replaced by its gradient from `found`, or by `None` if it has none.

    The keys of `found` are the names of the arrays in a block.
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
    above = sinks[None, :, None, :] if kept.shift is None else sinks[None, :, None, :] - kept.shift[..., None]
    probability = jnp.exp(above - jnp.where(jnp.isneginf(kept.lse), 0.0, kept.lse)[..., None])
    return -jnp.einsum("bnt,bnts->ns", delta, probability, precision="highest")


@dataclasses.dataclass(frozen=True)
class _Pass:
    """What all hops of the backward pass share. `rows` has an entry for each direction."""

    ring: Ring
    directions: Sequence[Direction]
    rows: Sequence[Rows]
    kernel: Callable[..., Gradients]
    bias_fixed: bool

    def all_hops(self, dout: jax.Array) -> tuple[KeyGradients, Sums]:
        """The gradients of this rank's keys, and the sums over all hops. The last hop has this rank's own keys.

        The first send is tied to the raw cotangent; tying it to a derived array would make XLA compute that first.
        If `plan.halves`, the kernel computes half of the heads of this rank's own keys while the first keys arrive,
        and the other half while the last gradients arrive.
        """
        plan, sums = self.ring.plan, tuple(self._zeros(direction) for direction in self.directions)
        first, early, gradients = self._own_keys([dout]), None, None
        if len(plan.offsets) == 1:
            return self.hop(first, None, sums, 0, None, None)[1:]
        ahead = first if plan.outer == 1 else permuted(self.ring, self.directions, first, 1, outer=True)
        wires = permuted(self.ring, self.directions, ahead, plan.shifts[0])
        if plan.halves(len(self.directions) * self.directions[0].call.key.shape[2]):
            early, sums = self._own_half(0, first, sums)
        if plan.outer > 1:
            wires, gradients, sums = self._other_groups(ahead, wires, sums)
        _, _, mine, sums = self.round(None, wires, gradients, sums, 0, None, early)
        return mine, sums

    def _other_groups(self, ahead: Wires, wires: Wires, sums: Sums) -> tuple[Wires, KeyGradients, Sums]:
        """Runs all rounds but the last one: those with the keys of other groups.

        `ahead` are the keys that have come over the outer ring for the first of these rounds, and `wires` are the keys
        of its first hop. Returns the keys for the first hop of the last round, which is that of the own group; the
        gradients of the keys of the round before it; and the sums.
        """
        rounds = self.ring.plan.rounds[1:]
        first, *steps = zip(rounds, (*(1 for _ in rounds[1:]), None), strict=True)
        carry = self.round(ahead, wires, None, sums, *first)
        return hops.repeated(self.round, carry, steps, self.ring.plan.inner)[1:]

    def round(
        self,
        keys: Wires | None,
        wires: Wires,
        gradients: KeyGradients | None,
        sums: Sums,
        base: Any,
        ahead: int | None,
        early: KeyGradients | None = None,
    ) -> tuple[Any, Any, KeyGradients, Sums]:
        """Runs one round of the inner ring, from the offset `base` on.

        Its last hop computes with `keys`, or with this rank's own keys if that is `None`. Meanwhile `keys` travel
        `ahead` steps along the outer ring, and the `gradients` of the round before travel one step. Returns four
        things: the keys that arrive over the outer ring, which the next round ends with; the keys of the first hop of
        the next round; the gradients of this round's keys, to which those that arrive are added; and the sums.
        """
        plan, following, arrived = self.ring.plan, None, None
        if ahead is not None or gradients is not None:
            back = None if gradients is None else 1
            _, following, arrived, sums = self._sent(keys or (), keys or (), gradients, sums, ahead, back, outer=True)
        behind, sums = self._visitors(wires, sums, base)
        if keys is None:
            keys, leaving, onward = self._own_keys([each["q"] for each in sums]), None, None
        else:
            leaving, onward = following or self._own_keys([each["q"] for each in sums]), plan.shifts[0]
        wires, mine, sums = self.hop(keys, behind, sums, base, onward, plan.homeward, early, leaving)
        return following, wires, _total(mine, arrived), sums

    def _visitors(self, wires: Wires, sums: Sums, base: Any) -> tuple[KeyGradients, Sums]:
        """Runs all hops of a round but the last. Returns the key gradients of the last of these hops, and the sums."""
        offsets, shifts = [base + offset for offset in self.ring.plan.round[1:]], self.ring.plan.shifts
        first, *steps = zip(offsets, (*shifts[1:], None), (None, *shifts[1:]), strict=True)
        wires, behind, sums = self.hop(wires, None, sums, *first)
        return hops.repeated(self.hop, (wires, behind, sums), steps)[1:]

    def hop(
        self,
        wires: Wires,
        behind: KeyGradients | None,
        sums: Sums,
        offset: Any,
        onward: int | None,
        back: int | None,
        early: KeyGradients | None = None,
        leaving: Wires | None = None,
    ) -> tuple[Any, Any, Sums]:
        """Computes with the keys in `wires`; meanwhile sends keys `onward` ranks, and `behind` by `back` ranks.

        It sends the keys in `leaving`, or those in `wires` if that is `None`. `behind` are the key gradients of the
        hop before. `early` are this hop's key gradients for half of the heads, where these are known; then the kernel
        computes the other half. Returns three things: the keys that arrive; the gradients of the keys in `wires`, which
        are this hop's plus the gradients that arrive; and the sums.
        """
        wires, following, arrived, sums = self._sent(wires, leaving, behind, sums, onward, back)
        if early is None:
            made = [self._visit(*each, offset=offset) for each in self._each(wires, sums)]
            mine, sums = zip(*made, strict=True)
        else:
            late, sums = self._own_half(1, wires, sums)
            mine = tuple(jnp.concatenate([a, b], -2) for a, b in zip(early, late, strict=True))
        return following, _total(mine, arrived), sums

    def _sent(
        self,
        wires: Wires,
        leaving: Wires | None,
        behind: KeyGradients | None,
        sums: Sums,
        onward: int | None,
        back: int | None,
        outer: bool = False,
    ) -> tuple[Wires, Any, Any, Sums]:
        """Sends keys by `onward` steps, and the gradients in `behind` by `back` steps.

        It sends the keys in `leaving`, or those in `wires` if that is `None`. All sends wait for the kernels of the hop
        before. Returns four things: `wires` for the kernels of this hop, the keys that arrive, the gradients that
        arrive, and `sums` for the kernels of this hop.
        """
        done = [each["q"] for each in sums if "q" in each]
        wires = tuple(after(self.ring, x, done) for x in wires)
        leaving = wires if leaving is None else tuple(after(self.ring, x, done) for x in leaving)
        send = functools.partial(permuted, self.ring, self.directions, outer=outer)
        if self.ring.plan.joint and onward is not None and onward == back:
            following, arrived = _parcel(send, leaving, behind or (), onward)
        else:
            wires, following, arrived = self._sent_apart(send, wires, leaving, behind, done, onward, back)
        if done:
            arrivals = (*(following or ()), *(arrived or ()))
            tied = [functools.reduce(ordering.tie_on_cpu, arrivals, dq) for dq in done]
            sums = tuple({**each, "q": dq} for each, dq in zip(sums, tied, strict=True))
        return wires, following, arrived, sums

    def _sent_apart(
        self,
        send: Callable[..., Wires],
        wires: Wires,
        leaving: Wires,
        behind: KeyGradients | None,
        done: list[jax.Array],
        onward: int | None,
        back: int | None,
    ) -> tuple[Wires, Wires | None, KeyGradients | None]:
        """Sends keys and gradients as two arrays. Waits for the keys first, because the next hop needs them first."""
        ring = self.ring
        following = None if onward is None else send(leaving, onward)
        if back is None or behind is None:
            return wires, following, None
        behind = tuple(after(ring, x, [*done, *leaving]) for x in behind)
        arrived = send(behind, back)
        if following is not None:
            arrived = tuple(after(ring, x, following) for x in arrived)
        elif not ring.plan.joint:
            # The last send of gradients starts before the last kernel, which hides it.
            wires = tuple(after(ring, x, behind) for x in wires)
        return wires, following, arrived

    def _visit(
        self, direction: Direction, rows: Rows, x: parcels.Wire, sums: Sum, offset: Any
    ) -> tuple[jax.Array, Sum]:
        """Runs the kernel on one block. Returns its dk,dv, packed, and the sums: with its dq, and the others added."""
        kv = parcels.from_wire(x, direction.call.key.dtype)
        # The keys wait for the kernels of the hop before, and the first kernel has no dq to wait for.
        visited = block(self.ring, after_hop(direction, x), kv, offset)
        visited = dataclasses.replace(visited, bias_fixed=self.bias_fixed, shift=rows.shift, out=rows.out)
        found = self.kernel(visited, rows.dout, rows.lse, rows.delta, sums.get("q"))
        return packing.pack(found.dk, found.dv), self._added(sums, found, source(self.ring, direction, offset))

    def _own_half(self, half: int, wires: Wires, sums: Sums) -> tuple[KeyGradients, Sums]:
        """The key gradients of the first or second half of the heads of this rank's own keys."""
        mine, added = [], []
        for direction, rows, x, before in self._each(wires, sums):
            share = split((direction.sign, direction.sign), direction.call, direction.location)[half]
            halves = halved(before)
            made, halves[half] = self._visit(share, rows.parts(2)[half], parts(x, -2, 2)[half], halves[half], 0)
            for each in halves:  # if these are the first kernels, the other half has no dq yet
                each.setdefault("q", jnp.zeros_like(halves[half]["q"]))
            mine.append(made)
            added.append(joined_sums(halves, direction.call))
        return tuple(mine), tuple(added)

    def _added(self, sums: Sum, found: Gradients, origin: Any) -> Sum:
        """Adds the gradients of one hop to `sums`; `dbias` goes to the columns of the keys of rank `origin`."""
        layout, ring = self.directions[0].call.layout, self.ring

        def added(name: str, total: jax.Array) -> Any:
            new = getattr(found, f"d{name}")
            if name not in BY_COLUMN:
                return total + new
            return put_columns(total, new, layout, ring.plan.ranks, origin, ring.stripe)

        # The kernel has continued dq.
        return {name: added(name, total) for name, total in sums.items() if name != "q"} | {"q": found.dq}

    def _own_keys(self, tokens: list[jax.Array]) -> Wires:
        """This rank's K,V, packed anew at each call: keeping them from the first hop to the last would cost memory."""
        pairs = [[after(self.ring, x, tokens) for x in (each.call.key, each.call.value)] for each in self.directions]
        return tuple(wire(self.ring, packing.pack_to_send(k, v)) for k, v in pairs)

    def _zeros(self, direction: Direction) -> Sum:
        names = [name for name in SUMMED if name != "bias" or not self.bias_fixed]
        given = {name: in_block_form(name, getattr(direction.call, CALL_NAMES[name])) for name in names}
        zeros = {name: jnp.zeros(x.shape, jnp.float32) for name, x in given.items() if x is not None}
        return align(zeros, axes_of(direction.call, direction.location))

    def _each(self, wires: Wires, sums: Sums) -> Any:
        return zip(self.directions, self.rows, wires, sums, strict=True)


def _parcel(send: Callable[..., Wires], leaving: Wires, behind: KeyGradients, shift: int) -> tuple[Wires, KeyGradients]:
    """Sends keys and the gradients behind them as one array."""
    parcel = tuple(parcels.join(x, late) for x, late in zip(leaving, behind, strict=True))
    following, arrived = zip(*map(parcels.split, send(parcel, shift)), strict=True)
    return following, arrived


def _total(mine: KeyGradients, arrived: KeyGradients | None) -> KeyGradients:
    """Adds the key gradients that arrive from another rank to this rank's own, `mine`, which are of the same keys."""
    return mine if arrived is None else tuple(here + there for here, there in zip(mine, arrived, strict=True))
