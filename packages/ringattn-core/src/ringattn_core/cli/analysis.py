# SPDX-License-Identifier: Apache-2.0
"""Analyses a call without running it: its backend, hops, tiles, messages and memory, by the engine's own functions."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..backends import selection
from ..backends.discovery import Registration
from ..contract.features import Feature
from ..errors import BackendNotFoundError, RingAttnError
from ..ring.hops import Plan, Send
from ..strategies import choose
from ..strategies.work import Work, data_bytes
from .abstract_call import AbstractCall
from .memory import held, planned_by_xla
from .output import Bytes, Rows
from .shards import Shard, shard, tile_size, tile_states

SKIPPED, MASKED, WHOLE = 0, 1, 2
"""The states of a tile: not computed, computed with a mask, or computed without a mask."""


class Hop(NamedTuple):
    """A hop: every rank computes with keys that have travelled `offset` in the direction of `sign`.

    If keys travel in two `ways` round the ring, two hops have the same `number`, each with half of the heads.
    `keys_of` is the rank whose keys rank `r` computes with, such as `r - 2`. In a ring of two levels, the group of that
    rank comes first, for a rank `r` of group `g`: `g - 1, r - 2`.
    """

    number: int
    offset: int
    sign: int
    ways: int
    keys_of: str


@dataclasses.dataclass(frozen=True)
class CallAnalysis:
    """The result of `analyse`.

    `choice` is the backend that would run the call; without one, `refusal` gives the reason. `own_ring` means that this
    backend drives its own ring; the hops are then those of core's engine. `lengths` are the numbers of queries and
    keys of one rank, padding included; `tile` is queries by keys. `skipped` are the offsets at which no query sees any
    key. `gathered` is the number of bytes of ids and positions that each rank receives before the first hop. `states`
    are `SKIPPED`, `MASKED` or `WHOLE`, `[ranks, hops, q tiles, key tiles]`, of the first batch row and all heads.
    """

    call: AbstractCall
    platform: str
    needs: tuple[str, ...]
    backends: Rows
    choice: str | None
    refusal: str | None
    own_ring: bool
    lengths: tuple[int, int]
    tile: tuple[int, int]
    hops: tuple[Hop, ...]
    skipped: tuple[int, ...]
    sent: Rows
    gathered: int
    memory: Rows
    compiled: dict[str, Any] | None
    shard: Shard
    states: np.ndarray = dataclasses.field(repr=False, compare=False)

    @property
    def ranks(self) -> int:
        return self.call.ring

    @property
    def plan(self) -> Plan:
        return self.shard.ring.plan

    @property
    def tiles(self) -> np.ndarray:
        """The number of tiles that each rank computes at each hop, `[hops, ranks]`."""
        return (self.states >= MASKED).sum((2, 3)).T

    @functools.cached_property
    def work(self) -> np.ndarray:
        """The number of tiles by the number of the hop, `[hops, ranks]`. A tile of half of the heads counts half."""
        halves = self.tiles / np.array([[hop.ways] for hop in self.hops])
        return np.add.reduceat(halves, np.unique([hop.number for hop in self.hops], return_index=True)[1])

    @property
    def for_plans(self) -> Work:
        """The work of the call for the cost model: every pair in the tiles that this analysis counts."""
        pairs = np.zeros((self.ranks, self.ranks))
        rank = np.arange(self.ranks)
        for hop, tiles in zip(self.hops, self.tiles, strict=True):
            pairs[rank, self.plan.source(rank, hop.offset, hop.sign)] = tiles * np.prod(self.tile)
        return Work.of_call(self.shard.call, self.plan, pairs)

    @property
    def tiles_of_ranks(self) -> list[int]:
        """How many tiles each rank computes over all hops: its sum of `work`, rounded up."""
        return np.ceil(self.work.sum(0)).astype(int).tolist()

    @property
    def tiles_of_slowest(self) -> int:
        """The tiles of the busiest rank of each hop, summed: the time of a ring whose ranks run in lockstep."""
        return int(np.ceil(self.work.max(1).sum()))


def analyse(
    call: AbstractCall,
    platform: str,
    backend: str | Sequence[str] | None = None,
    tile: tuple[int, int] | None = None,
    compiled: bool = False,
) -> CallAnalysis:
    """Analyses `call` on devices of `platform`; `backend` is as in `ring_attention`.

    Raises what the call raises, unless no backend can run it: then `refusal` gives the reason.
    """
    bare = shard(call)
    needs = bare.needs
    chosen, refusal = _choice(backend, needs, platform)
    if chosen is not None:
        choose.checked(chosen, bare.call, call.ring, call.inner)
    own_ring = chosen is not None and chosen.descriptor().kernel is None
    local = shard(call, None if chosen is None or own_ring else chosen.implementation())
    plan, sizes = local.ring.plan, tile_size(local, tile)
    work = Work.of_call(local.call, plan, np.zeros((plan.ranks, plan.ranks)))
    hops = [
        Hop(number, offset, sign, len(signs), _origin(plan, offset, sign))
        for number, offset in enumerate(plan.offsets)
        for signs in [plan.signs if offset else (1,)]
        for sign in signs
    ]
    ranks = np.arange(call.ring)
    sources = np.stack([plan.source(ranks, hop.offset, hop.sign) for hop in hops], 1)
    gradients = chosen is not None and chosen.descriptor().supports(Feature.GRADIENTS)
    return CallAnalysis(
        call=call,
        platform=platform,
        needs=tuple(feature.name for feature in Feature if feature in needs),
        backends=[_answer(chosen, *found) for found in selection.candidates(needs, platform)],
        choice=None if chosen is None else chosen.name,
        refusal=refusal,
        own_ring=own_ring,
        lengths=local.lengths,
        tile=sizes,
        hops=tuple(hops),
        skipped=tuple(offset for offset in range(plan.ranks) if offset not in plan.offsets),
        sent=_sent(work),
        gathered=data_bytes((local.call.kv_segment_ids, local.call.kv_positions)) * (plan.ranks - 1),
        memory=held(local, work),
        compiled=planned_by_xla(call, chosen.name, gradients) if compiled and chosen else None,
        shard=local,
        states=tile_states(call, local, sizes)[ranks[:, None], :, sources],
    )


def _origin(plan: Plan, offset: int, sign: int) -> str:
    """`Hop.keys_of` of a hop."""
    groups, ranks = divmod(offset, plan.inner)
    return f"{rank(-sign * groups, 'g')}, {rank(-sign * ranks)}" if plan.outer > 1 else rank(-sign * ranks)


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


def _answer(chosen: Registration | None, registration: Registration, reason: str | None) -> dict[str, Any]:
    descriptor = registration.backend
    lacks = descriptor is None or not descriptor.supports(Feature.GRADIENTS)
    return {
        "chosen": registration is chosen,
        "name": registration.name,
        "distribution": f"{registration.distribution} {registration.version}",
        "priority": descriptor.priority if descriptor else None,
        "answer": reason or "runs this call" + (", without gradients" if lacks else ""),
    }


def _sent(work: Work) -> Rows:
    """The messages of each rank. Equal messages of a pass are one row."""

    def row(phase: str, send: Send, times: int) -> dict[str, Any]:
        count = send.bytes(work.keys, work.itemsize)
        to = rank(send.shift, "g" if send.outer else "r")
        return {"pass": phase, "times": times, "what": contents(send), "to": to, "bytes": Bytes(count)}

    passes = {"forward": work.plan.forward, "backward": work.plan.backward}
    return [row(phase, *found) for phase, sends in passes.items() for found in Counter(sends).items()]


def contents(send: Send) -> str:
    return " with ".join(["K,V"] * send.keys + ["dk,dv"] * send.gradients)


def rank(distance: int, letter: str = "r") -> str:
    """The name of the rank `distance` onward from rank `r`, such as `r + 2`; with `letter` "g", of a group."""
    return f"{letter} {'+' if distance > 0 else '-'} {abs(distance)}" if distance else letter
