# SPDX-License-Identifier: Apache-2.0
"""Plans the hops of a ring: whose keys a rank has at each hop, and what the rank sends meanwhile."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..contract.tiles import overlaps
from ..masks import Reach
from ..placement.layout import Shards, pieces

UNROLLED: Final = 8
"""A level is unrolled if its hops after the first are at most this many, each counted with all hops of the levels
inside it. XLA overlaps unrolled hops best. Other levels run in a `scan`, which keeps programs small, unless their sends
differ because masks leave out hops in the middle."""
MOST_TILES: Final = 64
"""Only whole tiles of a shard's rows are sent; the plan cuts a shard into at most this many tiles."""


class Hop(NamedTuple):
    """One hop: whose keys a rank computes with, and what it sends meanwhile, counted in ranks of a `Level`.

    The keys belong to the rank `distance` ranks back. Meanwhile every rank sends the keys of the *next* hop `key_shift`
    ranks onward: the rows `[start, end)` if `next_rows` is a pair, else the whole shard. It sends the gradients of the
    hop *before* `gradient_shift` ranks onward. A shift of `None` sends nothing.
    """

    distance: Any
    key_shift: int | None
    next_rows: tuple[int, int] | None
    gradient_shift: int | None = None


@dataclasses.dataclass(frozen=True)
class Level:
    """One loop of the ring, over one or more mesh axes. A ring over several axes can have a loop inside a loop.

    At hop `t`, rank `r` has the keys of rank `r - distances[t]`; `distances[0]` is 0.

    Without `rows`, shards are passed on from rank to rank. With `rows`, each hop's rows of a shard come straight from
    the rank that owns them, and their gradients go straight back; such a level is the only one, and its hops are
    unrolled. `stride` is how far apart neighbours of this level are in the whole ring: the product of the sizes of the
    levels inside it. `distances` and shifts count ranks of this level.
    """

    axis: tuple[str, ...]
    ranks: int
    distances: tuple[int, ...]
    stride: int = 1
    rows: tuple[tuple[int, int], ...] | None = None
    """For each hop, the first row of a shard that some rank sees at that hop, and one more than the last."""

    @property
    def direct(self) -> bool:
        """Whether each hop's keys come straight from their owner; otherwise ranks pass shards on."""
        return self.rows is not None

    @property
    def forward_hops(self) -> tuple[Hop, ...]:
        """The hops of the forward pass, the hop at distance 0 first.

        The keys of a hop are sent during the hop before.
        """
        steps = self.distances[1:] if self.direct else _steps(self.distances)
        rows = self.rows or (None,) * len(self.distances)
        return tuple(map(Hop, self.distances, (*steps, None), (*rows[1:], None)))

    @property
    def backward_hops(self) -> tuple[Hop, ...]:
        """The hops of the backward pass, the hop at distance 0 last.

        Each hop sends the gradients of the hop before. Where ranks pass keys on, gradients follow them, and the last
        send takes them to the owner. With `rows`, each hop's gradients go straight to the owner.
        """
        _, *others = self.forward_hops
        far = self.distances[1:]
        homeward = tuple(-distance for distance in far) if self.direct else _steps((*far, self.ranks))
        hops = zip((*others, Hop(0, None, None)), (None, *homeward), strict=True)
        return tuple(hop._replace(gradient_shift=shift) for hop, shift in hops)

    def owner(self, rank: Any, distance: Any) -> Any:
        """The owner of the keys that `rank` has: the rank `distance` ranks back round this level. All may be arrays."""
        number = rank // self.stride % self.ranks
        return rank + ((number - distance) % self.ranks - number) * self.stride

    def run_hops(self, one_hop: Callable[[Any, Hop], Any], carry: Any, hops: Sequence[Hop]) -> Any:
        """Runs `carry = one_hop(carry, hop)` for all `hops`: unrolled, or with all but the first and last in a `scan`.

        In a `scan` all hops need the same sends. A hop of this level counts as all hops of the levels inside it.
        """
        between = hops[1:-1]
        if (len(self.distances) - 1) * self.stride <= UNROLLED or len({hop[1:] for hop in between}) != 1:
            return functools.reduce(one_hop, hops, carry)
        distances = jnp.asarray([hop.distance for hop in between], jnp.int32)
        carry = one_hop(carry, hops[0])
        carry, _ = jax.lax.scan(
            lambda carry, distance: (one_hop(carry, between[0]._replace(distance=distance)), None), carry, distances
        )
        return one_hop(carry, hops[-1])


def _steps(distances: Sequence[int]) -> tuple[int, ...]:
    return tuple(far - near for near, far in itertools.pairwise(distances))


@functools.lru_cache(maxsize=256)
def levels(
    reach: Reach, shards: Shards, lengths: tuple[int, int], axis: tuple[str, ...], sizes: tuple[int, ...]
) -> tuple[Level, ...]:
    """The loops of a ring over mesh axes of these `sizes`, innermost first; none if no rank needs another's keys.

    A ring that needs the whole shards of all ranks has a level for each axis. A ring that leaves out hops or rows has
    one level over all axes, because a few sends take less time than a round of every axis. `lengths` are the numbers of
    queries and keys of a shard.
    """
    seen = rows_seen(reach, shards, lengths)
    if len(seen) == 1:
        return ()
    if len(seen) < shards.count or {*seen.values()} != {(0, lengths[1])}:
        rows = tuple(seen.values()) if len(seen) - 1 <= UNROLLED else None
        return (Level(axis, shards.count, tuple(seen), rows=rows),)
    innermost_first, stride = [], 1
    for name, size in reversed([*zip(axis or ("",) * len(sizes), sizes, strict=True)]):
        if size > 1:
            innermost_first.append(Level((name,), size, tuple(range(size)), stride))
        stride *= size
    return tuple(innermost_first)


def rows_seen(reach: Reach, shards: Shards, lengths: tuple[int, int]) -> dict[int, tuple[int, int]]:
    """The distances at which some query may see some key, each with the range of a shard's rows that some rank sees.

    `reach` is the `reach_of_hops` of a call. Nothing else leaves out hops or rows: segment ids, ranges and other arrays
    are known only at run time. If more than `UNROLLED` hops remain, each has all rows of a shard.
    """
    whole = (0, lengths[1])
    if reach == Reach():
        return dict.fromkeys(range(shards.count), whole)
    others = [distance for distance in range(1, shards.count) if _visible(reach, shards, lengths, distance, 1).any()]
    if len(others) > UNROLLED:
        return dict.fromkeys((0, *others), whole)
    rows = {distance: _rows_at(reach, shards, lengths, distance) for distance in others}
    return {0: whole} | {distance: x for distance, x in rows.items() if x is not None}


def _rows_at(reach: Reach, shards: Shards, lengths: tuple[int, int], distance: int) -> tuple[int, int] | None:
    """The rows that some rank sees of the shard `distance` ranks back, in whole tiles; `None` for no row."""
    some = _visible(reach, shards, lengths, distance, MOST_TILES)
    seen, tile = np.flatnonzero(some.any((0, 1))), lengths[1] // some.shape[-1]
    return (int(seen[0]) * tile, (int(seen[-1]) + 1) * tile) if seen.size else None


def _visible(reach: Reach, shards: Shards, lengths: tuple[int, int], distance: int, parts: int) -> np.ndarray:
    """True where a tile of a rank's queries may see a tile of the keys of the rank `distance` ranks back.

    A shard is cut into up to `parts` tiles, and into at least as many as its layout has pieces. The result is
    `[ranks, query tiles, key tiles]`. Positions increase within a tile, so its ends bound them, and what it sees.
    """
    q, kv = (_tile_ends(shards, length, parts) for length in lengths)
    keys = np.roll(kv[0], distance, 0), np.roll(kv[1], distance, 0)
    # One pair for each bound of the reach: what the first query of a tile sees, and what the last one sees.
    first, last = (None if pair[0] is None else pair for pair in zip(*map(reach.bounds, q), strict=True))
    some = np.ones((*q[0].shape, keys[0].shape[1]), bool)
    return functools.reduce(np.logical_and, (of_bound for of_bound, _ in overlaps(first, last, keys)), some)


@functools.lru_cache(maxsize=4)
def _tile_ends(shards: Shards, length: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """The global index of the first and of the last token of each tile, both `[ranks, tiles]`.

    Each shard is cut into up to `parts` equal tiles.
    """
    count = pieces(shards.layout)
    while 2 * count <= parts and length % (2 * count) == 0:
        count *= 2
    tokens = shards.order(shards.count * length).reshape(shards.count, count, length // count)
    return tokens[..., 0], tokens[..., -1]
