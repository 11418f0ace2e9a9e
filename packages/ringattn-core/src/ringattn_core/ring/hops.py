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
"""A ring of more hops runs in a `scan`, which keeps programs small; XLA overlaps an unrolled ring best."""


@dataclasses.dataclass(frozen=True)
class Send:
    """One permute: every rank sends an array `shift` ranks onward.

    The array holds packed K,V if `keys`, and float32 dk,dv if `gradients`. With two `directions` round the ring, each
    has its own sends, of half of the heads.
    """

    shift: int
    keys: bool
    gradients: bool
    directions: int = 1

    def bytes(self, elements: int, itemsize: int) -> int:
        """The bytes that one rank sends; a shard's packed K,V has `elements` elements of `itemsize` bytes."""
        return elements // self.directions * (itemsize * self.keys + 4 * self.gradients)


@dataclasses.dataclass(frozen=True)
class Plan:
    """At hop `t` rank `r` works on the keys of rank `(r - offsets[t]) % ranks`; hop 0 is its own shard.

    With `two_way` this holds for half of the heads; the other half works on the keys of `(r + offsets[t]) % ranks`.
    """

    ranks: int
    offsets: tuple[int, ...]
    two_way: bool = False
    joint: bool = True
    """Whether keys and the gradients behind them travel as one array, at hops where both travel equally far."""

    @classmethod
    def of(cls, ranks: int, offsets: tuple[int, ...], two_way: bool, joint: bool) -> "Plan":
        """The plan of these hops. `two_way` has no effect on two ranks, where both directions are the same.

        Nor has it if hops are left out: a shard that is near in one direction is far in the other.
        """
        return cls(ranks, offsets, two_way and ranks > 2 and len(offsets) == ranks, joint)

    @property
    def signs(self) -> tuple[int, ...]:
        """The sign of each direction that keys travel in: onward (1) and, with `two_way`, back (-1)."""
        return (1, -1) if self.two_way else (1,)

    @property
    def shifts(self) -> tuple[int, ...]:
        """How many ranks the keys travel after each hop but the last, after which nothing is sent."""
        return tuple(b - a for a, b in zip(self.offsets, self.offsets[1:], strict=False))

    @property
    def forward(self) -> tuple[Send, ...]:
        return self._in_each_direction(Send(shift, keys=True, gradients=False) for shift in self.shifts)

    @property
    def backward(self) -> tuple[Send, ...]:
        """The sends of the backward pass. A rank computes with its own keys last: that kernel hides the last send."""
        shifts = self.shifts
        sends = [Send(shift, keys=True, gradients=False) for shift in shifts[:1]]
        for onward, behind in zip((*shifts[1:], None), (None, *shifts[1:]), strict=True):
            sends += self.parcel(onward, behind)
        home = self.homeward
        return self._in_each_direction([*sends, *(() if home is None else (Send(home, keys=False, gradients=True),))])

    @property
    def homeward(self) -> int | None:
        """How many ranks the gradients of the last visiting keys must travel to their owner; `None` without sends."""
        return self.ranks - self.offsets[-1] if self.offsets[-1] else None

    def halves(self, kv_heads: int) -> bool:
        """Whether the backward pass computes half of the heads of the own keys first, to hide the first send too."""
        return not self.joint and len(self.offsets) > 1 and kv_heads % (2 * len(self.signs)) == 0

    def parcel(self, onward: int | None, behind: int | None) -> tuple[Send, ...]:
        """The sends during one hop of the backward pass: keys by `onward` ranks, the last hop's dk,dv by `behind`."""
        if self.joint and onward is not None and onward == behind:
            return (Send(onward, keys=True, gradients=True),)
        keys = () if onward is None else (Send(onward, keys=True, gradients=False),)
        gradients = () if behind is None else (Send(behind, keys=False, gradients=True),)
        return keys + gradients

    def most_sent(self, elements: int, itemsize: int) -> int:
        """The most bytes that one rank sends during a hop of the backward pass, in both directions together."""
        onward, behind = (*self.shifts[1:], None), (None, *self.shifts[1:])
        hops = [self.parcel(None, self.homeward), self.parcel(next(iter(self.shifts), None), None)]
        hops += [self.parcel(*moves) for moves in zip(onward, behind, strict=True)]
        return max(sum(send.bytes(elements, itemsize) for send in sends) for sends in hops)

    def _in_each_direction(self, sends: Iterable[Send]) -> tuple[Send, ...]:
        directions = len(self.signs)
        return tuple(
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
    return Plan.of(ranks, _offsets(rule, layout, ranks, q_length, kv_length, stripe), two_way, joint)


def repeated(hop: Callable[..., Any], carry: tuple[Any, ...], steps: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """`carry = hop(*carry, *step)` for all steps, each an offset and shifts. On a long ring a `scan` runs all but one.

    The shifts of the last step differ from those of the others, which must be alike for a `scan`.
    """
    alike = {tuple(shifts) for _, *shifts in steps[:-1]}
    if len(steps) > UNROLLED and len(alike) == 1:
        (shifts,) = alike
        offsets = jnp.asarray([offset for offset, *_ in steps[:-1]], jnp.int32)
        carry, _ = jax.lax.scan(lambda carry, offset: (hop(*carry, offset, *shifts), None), carry, offsets)
        steps = steps[-1:]
    for step in steps:
        carry = hop(*carry, *step)
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


def _offsets(rule: Rule, layout: str, ranks: int, q_length: int, kv_length: int, stripe: int) -> tuple[int, ...]:
    if not rule.increasing or ranks == 1:
        return tuple(range(ranks))
    meets = np.asarray(sight(rule, layout, ranks, q_length, kv_length, stripe)[0].any((1, 3)))
    rank = np.arange(ranks)
    return (0, *(offset for offset in range(1, ranks) if meets[rank, (rank - offset) % ranks].any()))


def _shards(layout: str, ranks: int, length: int, stripe: int, least: int) -> tuple[Coordinates, int]:
    """Every rank's tokens, cut into tiles with tight position bounds; and the number of tiles of a rank.

    There are at least as many tiles as the layout has pieces, and no more than `least` where these are enough.
    """
    parts = pieces(layout)
    while 2 * parts <= least and length % (2 * parts) == 0:
        parts *= 2
    index = order(layout, ranks, ranks * length, stripe).reshape(1, ranks * parts, length // parts)
    return Coordinates(index, index), parts
