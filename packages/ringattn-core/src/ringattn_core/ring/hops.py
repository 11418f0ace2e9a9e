# SPDX-License-Identifier: Apache-2.0
"""The plan of a ring: whose keys each rank has at each hop, which hops are needed, and what is sent between them."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ..contract.rule import Rule
from ..contract.visibility import position_masks
from ..masks import Coordinates, all_of, any_of
from ..placement.layout import order, pieces

UNROLLED: Final = 8
"""The most hops that are unrolled, which XLA overlaps best. More hops run in a `scan`, which keeps programs small.

In a ring of two levels this limit holds for the hops of one round, and for the hops of all rounds together. So however
large the ring is, its program has at most three rounds in the forward pass and four in the backward pass, each of at
most ten hops.
"""


@dataclasses.dataclass(frozen=True)
class Send:
    """One permute: every rank sends an array `shift` steps onward, along its inner ring or, if `outer`, the outer ring.

    The array holds packed K,V if `keys`, and float32 dk,dv if `gradients`. With two `directions` round the ring, each
    has its own sends, of half of the heads.
    """

    shift: int
    keys: bool
    gradients: bool
    directions: int = 1
    outer: bool = False

    def bytes(self, elements: int, itemsize: int) -> int:
        """The bytes that one rank sends; a shard's packed K,V has `elements` elements of `itemsize` bytes."""
        return elements // self.directions * (itemsize * self.keys + 4 * self.gradients)


Hop = tuple[int, tuple[Send, ...]]
"""The offset of a hop, and the sends during it."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which keys a rank has at each hop. Rank `r` works on the keys of rank `source(r, offsets[t])` at hop `t`.

    A flat ring has one round, in which the keys go round all ranks. With `outer` > 1 there are two levels: groups of
    `inner` consecutive ranks are inner rings, and ranks with the same number in all groups are an outer ring. The keys
    go round the inner ring once in each round. Meanwhile those of the next round travel one step along the outer ring.

    With `two_way` half of the heads go round both rings the other way.
    """

    ranks: int
    offsets: tuple[int, ...]
    two_way: bool = False
    joint: bool = True
    """Whether keys and the gradients behind them travel as one array, at hops where both travel equally far."""
    outer: int = 1
    """The number of groups. More than one group needs a plan that leaves out no hop."""

    @property
    def inner(self) -> int:
        """The number of ranks of an inner ring."""
        return self.ranks // self.outer

    @classmethod
    def of(cls, ranks: int, offsets: tuple[int, ...], two_way: bool, joint: bool) -> "Plan":
        """The plan of these hops. `two_way` has no effect on two ranks, where both directions are the same.

        It has no effect either if hops are left out: a shard that is near in one direction is far in the other.
        """
        return cls(ranks, offsets, two_way and ranks > 2 and len(offsets) == ranks, joint)

    @property
    def signs(self) -> tuple[int, ...]:
        """The sign of each direction that keys travel in: onward (1) and, with `two_way`, back (-1)."""
        return (1, -1) if self.two_way else (1,)

    @property
    def rounds(self) -> tuple[int, ...]:
        """The first offset of each round."""
        return tuple(range(0, self.ranks, self.inner))

    @property
    def round(self) -> tuple[int, ...]:
        """The offsets of the first round. Another round adds its first offset to each of them."""
        return self.offsets[: self.inner]

    @property
    def shifts(self) -> tuple[int, ...]:
        """How far the keys travel along the inner ring after each hop of a round but the last."""
        return tuple(b - a for a, b in zip(self.round, self.round[1:], strict=False))

    def source(self, rank: Any, offset: Any, sign: int = 1) -> Any:
        """The rank that owns the keys which have travelled `offset` to `rank`; either may be an array.

        Along the outer ring they have travelled `offset // inner` steps, and along the inner ring `offset % inner`.
        """
        group = (rank // self.inner - sign * (offset // self.inner)) % self.outer
        return group * self.inner + (rank - sign * offset) % self.inner

    def pairs(self, shift: int, outer: bool = False) -> list[tuple[int, int]]:
        """The sender and the receiver of each message of a permute by `shift` steps along the inner or outer ring."""
        step, ring = (shift * self.inner, self.ranks) if outer else (shift, self.inner)
        return [(rank, rank // ring * ring + (rank + step) % ring) for rank in range(self.ranks)]

    def over(self, inner: int) -> "Plan":
        """The plan in two levels, with inner rings of `inner` ranks.

        A plan that leaves out hops stays flat: its few sends are shorter than a round of every group.
        """
        if self.outer > 1 or len(self.offsets) < self.ranks or not 1 < inner < self.ranks:
            return self
        outer = self.ranks // inner
        return dataclasses.replace(self, outer=outer, two_way=self.two_way and max(inner, outer) > 2)

    @property
    def forward_hops(self) -> tuple[Hop, ...]:
        """The hops of the forward pass. In the first hop of a round, the keys of the next round leave."""
        found = []
        for base in self.rounds:
            ahead = self._ahead(base < self.rounds[-1], gradients=False)
            for offset, shift in zip(self.round, (*self.shifts, None), strict=True):
                found.append(self._hop(base + offset, (*self.parcel(shift, None), *ahead)))
                ahead = ()
        return tuple(found)

    @property
    def backward_hops(self) -> tuple[Hop, ...]:
        """The hops of the backward pass. A rank computes with its own keys last: that kernel hides the last send.

        The first entry is the first send of keys. Meanwhile the kernel computes nothing, or half of the heads of the
        own keys (`halves`). A round ends with the keys that came over the outer ring; the last round is that of the own
        group. In the first hop of a round, the keys of the next round and the gradients of the round before leave over
        the outer ring.
        """
        onward, behind = (*self.shifts[1:], None), (None, *self.shifts[1:])
        first = self._ahead(self.outer > 1, gradients=False)
        found = [self._hop(0, (*first, *self.parcel(next(iter(self.shifts), None), None)))]
        for base in (*self.rounds[1:], 0):
            ahead = self._ahead(0 < base < self.rounds[-1], gradients=self.outer > 1 and base != self.inner)
            for offset, *moves in zip(self.round[1:], onward, behind, strict=False):
                found.append(self._hop(base + offset, (*self.parcel(*moves), *ahead)))
                ahead = ()
            found.append(self._hop(base, self.parcel(self.shifts[0] if base else None, self.homeward)))
        return tuple(found)

    @property
    def forward(self) -> tuple[Send, ...]:
        """The sends of the forward pass."""
        return tuple(send for _, sends in self.forward_hops for send in sends)

    @property
    def backward(self) -> tuple[Send, ...]:
        """The sends of the backward pass."""
        return tuple(send for _, sends in self.backward_hops for send in sends)

    @property
    def homeward(self) -> int | None:
        """How far the last gradients of a round must travel home along the inner ring; `None` if no keys visit."""
        return self.inner - self.round[-1] if self.round[-1] else None

    def halves(self, kv_heads: int) -> bool:
        """Whether the backward pass computes half of the heads of its own keys while it waits for the first keys.

        The other half follows last, and hides the last send of gradients.
        """
        apart = not self.joint or self.outer > 1
        return apart and len(self.offsets) > 1 and kv_heads % (2 * len(self.signs)) == 0

    def parcel(self, onward: int | None, behind: int | None) -> tuple[Send, ...]:
        """The sends during one hop along the inner ring: keys by `onward` ranks, the last hop's dk,dv by `behind`."""
        if self.joint and onward is not None and onward == behind:
            return (Send(onward, keys=True, gradients=True),)
        keys = () if onward is None else (Send(onward, keys=True, gradients=False),)
        gradients = () if behind is None else (Send(behind, keys=False, gradients=True),)
        return keys + gradients

    def _ahead(self, keys: bool, gradients: bool) -> tuple[Send, ...]:
        """The sends of one step along the outer ring: of keys, of gradients, of both, or none."""
        sends = self.parcel(1 if keys else None, 1 if gradients else None)
        return tuple(dataclasses.replace(send, outer=True) for send in sends)

    def _hop(self, offset: int, sends: Iterable[Send]) -> Hop:
        """A hop with these sends in each direction."""
        directions = len(self.signs)
        return offset, tuple(
            dataclasses.replace(send, shift=sign * send.shift, directions=directions)
            for send in sends
            for sign in self.signs
        )


@functools.lru_cache(maxsize=256)
def plan(
    rule: Rule,
    layout: str,
    ranks: int,
    q_length: int,
    kv_length: int,
    two_way: bool = False,
    joint: bool = True,
    stripe: int = 1,
) -> Plan:
    """The plan of a ring: only hops at which some query may see some key. Lengths are those of one shard.

    Masks leave out hops only if they have bounds by position and `rule.increasing` is true; the engine sets it to false
    for queries with an offset. Segment ids leave out none, because they are known only at run time.
    """
    offsets = range(1, ranks)
    if rule.increasing and ranks > 1:
        meets = np.asarray(sight(rule, layout, ranks, q_length, kv_length, stripe)[0].any((1, 3)))
        rank = np.arange(ranks)
        offsets = [offset for offset in offsets if meets[rank, (rank - offset) % ranks].any()]
    return Plan.of(ranks, (0, *offsets), two_way, joint)


def repeated(
    step: Callable[..., Any], carry: tuple[Any, ...], steps: Sequence[tuple[Any, ...]], hops: int = 1
) -> tuple[Any, ...]:
    """Runs `carry = step(*carry, *each)` for each of the `steps`, an offset and shifts; returns the last `carry`.

    A step has `hops` hops. If all steps together have more than `UNROLLED` hops, a `scan` runs all of them but the
    last. A `scan` needs equal shifts in its steps; those of the last step may differ.
    """
    alike = {tuple(shifts) for _, *shifts in steps[:-1]}
    if len(steps) * hops > UNROLLED and len(alike) == 1:
        (shifts,) = alike
        offsets = jnp.asarray([offset for offset, *_ in steps[:-1]], jnp.int32)
        carry, _ = jax.lax.scan(lambda carry, offset: (step(*carry, offset, *shifts), None), carry, offsets)
        steps = steps[-1:]
    for each in steps:
        carry = step(*carry, *each)
    return carry


def sight(
    rule: Rule, layout: str, ranks: int, q_length: int, kv_length: int, stripe: int = 1, parts: int = 1
) -> tuple[np.ndarray, np.ndarray, int]:
    """Which tiles of each rank's queries see each rank's keys, by bounds of their positions.

    Each shard is cut into about `parts` tiles. Returns, for each tile of queries and tile of keys, whether any pair may
    be visible and whether all are, each `[ranks, q tiles, ranks, kv tiles]`; and how many pairs two tiles have.
    """
    masks = [*position_masks(rule)]
    if rule.masks and all(mask.bounded for mask in rule.masks):
        masks.append(any_of(rule.masks))
    q, q_parts = _shards(layout, ranks, q_length, stripe, parts)
    kv, kv_parts = _shards(layout, ranks, kv_length, stripe, parts)
    shape, grid = (ranks, q_parts, ranks, kv_parts), (1, ranks * q_parts, ranks * kv_parts)
    found = [mask.tiles(q, kv) for mask in masks]
    some, full = (
        np.broadcast_to(np.asarray(all_of(x[which] for x in found) if found else True), grid).reshape(shape)
        for which in (0, 1)
    )
    return some, full, q_length * kv_length // (q_parts * kv_parts)


def _shards(layout: str, ranks: int, length: int, stripe: int, least: int) -> tuple[Coordinates, int]:
    """Every rank's tokens, cut into tiles with tight position bounds; and the number of tiles of a rank.

    There are at least as many tiles as the layout has pieces, and no more than `least` where these are enough.
    """
    parts = pieces(layout)
    while 2 * parts <= least and length % (2 * parts) == 0:
        parts *= 2
    index = order(layout, ranks, ranks * length, stripe).reshape(1, ranks * parts, length // parts)
    return Coordinates(index, index), parts
