# SPDX-License-Identifier: Apache-2.0
"""Analyses a call without running it: its backend, hops, tiles, messages and memory, by the engine's own functions."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np

from ..backends import selection
from ..backends.discovery import Registration
from ..contract.features import Feature
from ..errors import BackendNotFoundError, InputError, RingAttnError
from ..ring.hops import Plan, Send
from .abstract_call import AbstractCall
from .memory import HeldArrays, XlaMemory, held, planned_by_xla
from .shards import Shard, default_tile, shard, tile_states

SKIPPED, MASKED, WHOLE = 0, 1, 2
"""The states of a tile: not computed, computed with a mask, or computed without a mask."""
WORDS: Final = {WHOLE: "computed without a mask", MASKED: "masked, or in part skipped", SKIPPED: "skipped"}
"""The legend of a picture. A cell of the picture may stand for several tiles."""


@dataclasses.dataclass(frozen=True)
class BackendAnswer:
    """A registered backend; `reason` says why it cannot run this call, and is `None` if it can."""

    name: str
    distribution: str
    version: str
    priority: int | None
    reason: str | None
    gradients: bool


@dataclasses.dataclass(frozen=True)
class Message:
    """One send of every rank, to the rank `shift` onward: of K,V, of dk,dv, or of both."""

    shift: int
    keys: bool
    gradients: bool
    bytes: int


@dataclasses.dataclass(frozen=True)
class Hop:
    """The hop at which rank `r` computes with the keys of rank `r - offset`.

    `tiles` are the numbers of tiles that each rank computes, `whole` those of tiles without a mask. If keys travel in
    two `ways` round the ring, two hops have the same `number`, each with half of the heads.
    """

    number: int
    offset: int
    ways: int
    tiles: tuple[int, ...]
    whole: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class CallAnalysis:
    """The result of `analyse`. The JSON output has the names of these fields.

    `choice` is the backend that would run the call; without one, `refusal` gives the reason. `own_ring` means that this
    backend drives its own ring; the hops are then those of core's engine. `lengths` are the numbers of queries and
    keys of one rank, padding included; `tile` is queries by keys. `skipped` are the offsets at which no query sees any
    key. `gathered` is the number of bytes of ids and positions that each rank receives before the first hop. `states`
    are `SKIPPED`, `MASKED` or `WHOLE`, `[ranks, hops, q tiles, key tiles]`, of the first batch row and all heads.
    """

    request: AbstractCall
    platform: str
    needs: tuple[str, ...]
    candidates: tuple[BackendAnswer, ...]
    choice: str | None
    refusal: str | None
    own_ring: bool
    lengths: tuple[int, int]
    tile: tuple[int, int]
    hops: tuple[Hop, ...]
    skipped: tuple[int, ...]
    forward: tuple[Message, ...]
    backward: tuple[Message, ...]
    gathered: int
    memory: tuple[HeldArrays, ...]
    compiled: XlaMemory | None
    states: np.ndarray = dataclasses.field(repr=False, compare=False)

    @property
    def ranks(self) -> int:
        return self.request.ring

    @property
    def grid(self) -> int:
        """The number of tiles of one rank at one hop, including skipped tiles."""
        return self.states.shape[2] * self.states.shape[3]

    @property
    def of_ranks(self) -> tuple[int, ...]:
        """The number of tiles that each rank computes. A tile with half of the heads counts half; rounded up."""
        return tuple(-(-sum(counts) // 2) for counts in zip(*self._halves().values(), strict=True))

    @property
    def slowest(self) -> int:
        """The tiles of the busiest rank of each hop, summed: the time of a ring whose ranks run in lockstep."""
        return -(-sum(map(max, self._halves().values())) // 2)

    def _halves(self) -> dict[int, list[int]]:
        """Twice the number of tiles of each rank, by the number of the hop."""
        found = {hop.number: [0] * self.ranks for hop in self.hops}
        for hop in self.hops:
            counts = zip(found[hop.number], hop.tiles, strict=True)
            found[hop.number] = [before + 2 * count // hop.ways for before, count in counts]
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with numbers of tiles in place of `states`."""
        plain = dataclasses.asdict(dataclasses.replace(self, states=np.empty(0)))
        del plain["states"]
        return plain | {"tiles_of_ranks": self.of_ranks, "tiles_of_slowest": self.slowest}


def analyse(
    call: AbstractCall,
    platform: str,
    backend: str | Sequence[str] | None = None,
    tile: tuple[int, int] | None = None,
    compiled: bool = False,
) -> CallAnalysis:
    """Analyses `call` on devices of `platform`; `backend` is as in `ring_attention`."""
    needs = shard(call).needs
    chosen, refusal = _choice(backend, needs, platform)
    own_ring = chosen is not None and chosen.descriptor().kernel is None
    local = shard(call, None if chosen is None or own_ring else chosen.implementation())
    plan, sizes = local.ring.plan, _tile(tile, local)
    visits = [(number, sign * offset) for number, offset in enumerate(plan.offsets) for sign in _signs(plan, offset)]
    states = tile_states(call, local, [offset for _, offset in visits], sizes)

    def messages(sends: tuple[Send, ...]) -> tuple[Message, ...]:
        itemsize = local.call.key.dtype.itemsize
        return tuple(Message(x.shift, x.keys, x.gradients, x.bytes(local.elements, itemsize)) for x in sends)

    gradients = chosen is not None and chosen.descriptor().supports(Feature.GRADIENTS)
    return CallAnalysis(
        request=call,
        platform=platform,
        needs=tuple(feature.name for feature in Feature if feature in needs),
        candidates=tuple(_answer(*found) for found in selection.candidates(needs, platform)),
        choice=None if chosen is None else chosen.name,
        refusal=refusal,
        own_ring=own_ring,
        lengths=local.lengths,
        tile=sizes,
        hops=tuple(
            Hop(number, offset, len(_signs(plan, offset)), *_counts(states[:, column]))
            for column, (number, offset) in enumerate(visits)
        ),
        skipped=tuple(offset for offset in range(plan.ranks) if offset not in plan.offsets),
        forward=messages(plan.forward),
        backward=messages(plan.backward),
        gathered=_gathered(local),
        memory=held(local),
        compiled=planned_by_xla(call, local, chosen.name, gradients) if compiled and chosen else None,
        states=states,
    )


def _choice(
    backend: str | Sequence[str] | None, needs: frozenset[Feature], platform: str
) -> tuple[Registration | None, str | None]:
    """The backend that runs the call, or `None` and the reason. Raises for a name that is not registered."""
    try:
        return selection.select(backend, needs, platform), None
    except RingAttnError as error:
        if isinstance(error, BackendNotFoundError) and error.name is not None:
            raise
        return None, error.one_line()


def _answer(registration: Registration, reason: str | None) -> BackendAnswer:
    descriptor = registration.backend
    return BackendAnswer(
        name=registration.name,
        distribution=registration.distribution,
        version=registration.version,
        priority=descriptor.priority if descriptor else None,
        reason=reason,
        gradients=descriptor is not None and descriptor.supports(Feature.GRADIENTS),
    )


def _tile(asked: tuple[int, int] | None, shard: Shard) -> tuple[int, int]:
    if asked is None:
        return default_tile(shard)
    if min(asked) < 1:
        raise InputError("--tile", f"got {','.join(map(str, asked))}", "Pass positive lengths of queries and keys")
    return min(asked[0], shard.lengths[0]), min(asked[1], shard.lengths[1])


def _signs(plan: Plan, offset: int) -> tuple[int, ...]:
    """The directions in which keys with this offset travel; a rank's own keys count once."""
    return plan.signs if offset else (1,)


def _counts(states: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For each rank, the number of computed tiles, and the number of tiles computed without a mask."""
    computed, whole = ((states >= state).sum((1, 2)).tolist() for state in (MASKED, WHOLE))
    return tuple(computed), tuple(whole)


def _gathered(shard: Shard) -> int:
    ids = jax.tree.leaves((shard.call.kv_segment_ids, shard.call.kv_positions))
    return sum(x.size * x.dtype.itemsize for x in ids) * (shard.ring.plan.ranks - 1)
