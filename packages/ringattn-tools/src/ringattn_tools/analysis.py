# SPDX-License-Identifier: Apache-2.0
"""Analyses a call without running it: its backend, hops, tiles, messages and memory, by the engine's own functions."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from ringattn_core.backends import selection
from ringattn_core.backends.discovery import Registration
from ringattn_core.call.cache import bytes_to_send
from ringattn_core.call.options import head_sizes, needs
from ringattn_core.contract.call import Call
from ringattn_core.contract.features import Feature
from ringattn_core.contract.tiles import tiles
from ringattn_core.errors import BackendNotFoundError, InputError, RingAttnError
from ringattn_core.strategies import run

from .abstract_call import AXIS, AbstractCall, every_rank, local_call
from .engine import Hops, hops_of_call, own_block
from .memory import held, planned_by_xla
from .output import Bytes, Rows, one_line
from .work import Work, data_bytes

SKIPPED, MASKED, WHOLE = 0, 1, 2
"""The states of a tile: not computed, computed with a mask, or computed without a mask."""
_TILE: Final = 128
_MANY_TILES, _MOST_TILES = 2**22, 2**26
"""The default tile size grows until all ranks together have at most `_MANY_TILES` tiles. A size with more than
`_MOST_TILES` tiles raises."""
_LEVELS: Final = "rg"
"""The letters for a rank of an inner ring, "r", and for its group, "g"."""

_OF_PREFILL: Final = {
    "causal", "query_offset", "softmax_aux", "sliding_window", "chunk_size", "logits_soft_cap", "softmax_scale",
    "alibi_slopes", "layout", "precision", "return_lse",
}  # fmt: skip
"""The options of `ring_attention` that `prefill_attention` has too, or that it always sets."""


@dataclasses.dataclass(frozen=True)
class CallAnalysis:
    """The result of `analyse`.

    `choice` is the backend that would run the call; without one, `refusal` gives the reason. `own_ring` means that this
    backend drives its own ring; the hops are then those of core's engine. `strategy` is the strategy that the call
    takes, and `not_possible` are those that it cannot take, with the reasons. `lengths` are the numbers of queries and
    keys of one rank, padding included; `tile` is queries by keys. `keys_of` has for each hop the rank whose keys rank
    `r` computes with, such as `r - 2`; in a ring of two levels the group of that rank comes first, for a rank `r` of
    group `g`: `g - 1, r - 2`. `skipped` are the distances at which no query sees any key. `gathered` is the number of
    bytes of ids and positions that each rank receives before the first hop. `prefill` says what `prefill_attention`
    would send for the same queries, if they suit it. `states` are `SKIPPED`, `MASKED` or `WHOLE`, `[ranks, hops, q
    tiles, key tiles]`, of the first batch row and all heads.
    """

    call: AbstractCall
    platform: str
    needs: tuple[str, ...]
    backends: Rows
    choice: str | None
    refusal: str | None
    own_ring: bool
    strategy: str
    not_possible: dict[str, str]
    lengths: tuple[int, int]
    tile: tuple[int, int]
    keys_of: tuple[str, ...]
    skipped: tuple[int, ...]
    sent: Rows
    gathered: int
    prefill: Rows
    memory: Rows
    compiled: dict[str, Any] | None
    work: Work
    states: np.ndarray = dataclasses.field(repr=False, compare=False)

    @property
    def ranks(self) -> int:
        return self.call.ring

    @property
    def tiles(self) -> np.ndarray:
        """The number of tiles that each rank computes at each hop, `[hops, ranks]`."""
        return (self.states >= MASKED).sum((2, 3)).T

    @property
    def tiles_of_ranks(self) -> list[int]:
        """How many tiles each rank computes over all hops."""
        return self.tiles.sum(0).tolist()

    @property
    def tiles_of_slowest(self) -> int:
        """The tiles of the busiest rank of each hop, summed: the time of a ring whose ranks run in lockstep."""
        return int(self.tiles.max(1).sum())


def analyse(
    call: AbstractCall,
    platform: str,
    backend: str | Sequence[str] | None = None,
    tile: tuple[int, int] | None = None,
    compiled: bool = False,
) -> CallAnalysis:
    """Analyses `call` on devices of `platform`; `backend` is as in `ring_attention`, `compiled` asks XLA for memory.

    Raises the errors that the call would raise, except where no backend can run it: `refusal` then gives the reason.
    """
    local = local_call(call)
    needed, heads, lengths = needs(local), head_sizes(local), (local.query.shape[1], local.key.shape[1])
    chosen, refusal = _choice(backend, needed, platform, heads)
    gradients = chosen is not None and chosen.descriptor().supports(Feature.GRADIENTS)
    size, hops = tile_size(lengths, call.ring, tile), hops_of_call(local, call.ring, call.inner)
    states = tile_states(call, lengths, size)
    # Every pair of a query and a key in a computed tile counts.
    work = Work(local, hops, (states >= MASKED).sum((1, 3)) * math.prod(size))
    return CallAnalysis(
        call=call,
        platform=platform,
        needs=tuple(feature.name for feature in Feature if feature in needed),
        backends=[_answer(chosen, *answer) for answer in selection.candidates(needed, platform, heads)],
        choice=None if chosen is None else chosen.name,
        refusal=refusal,
        own_ring=chosen is not None and chosen.descriptor().kernel is None,
        strategy=run.strategy_of(chosen, local, (call.ring, call.inner)),
        not_possible=run.refusals(chosen, local, call.ring, call.inner),
        lengths=lengths,
        tile=size,
        keys_of=tuple(_origin(hops, distance) for distance in hops.distances),
        skipped=tuple(distance for distance in range(call.ring) if distance not in hops.distances),
        sent=_sent(hops),
        gathered=data_bytes((local.kv_segment_ids, local.kv_positions)) * (call.ring - 1),
        prefill=_prefill(call, local),
        memory=held(work),
        compiled=planned_by_xla(call, chosen.name, gradients) if compiled and chosen else None,
        work=work,
        states=states[np.arange(call.ring)[:, None], :, hops.sources.T],
    )


def tile_states(call: AbstractCall, lengths: tuple[int, int], tile: tuple[int, int]) -> np.ndarray:
    """The state of each tile (`SKIPPED`, `MASKED`, `WHOLE`), `[ranks, q tiles, ranks of the keys, kv tiles]`.

    `lengths` are as in `tile_size`. The states are those of the first batch row. A tile is `SKIPPED` only if no head
    sees any of its pairs.
    """
    q_length, kv_length = (-(-length // size) * size for length, size in zip(lengths, tile, strict=True))

    def of_rank(local: Call) -> jax.Array:
        own = own_block(local).padded_to(q_length, kv_length)

        def of_all_ranks(x: jax.Array, axis: int) -> jax.Array:
            return jax.lax.all_gather(x, AXIS, axis=axis, tiled=True)

        visible = tiles(own.map_keys(of_all_ranks), *tile).of_all_heads
        states = visible.some[0, 0].astype(jnp.uint8) + visible.full[0, 0].astype(jnp.uint8)
        return states.reshape(q_length // tile[0], call.ring, kv_length // tile[1])

    # Only the shapes of the large arrays are read, so XLA under `jit` never allocates them.
    return np.asarray(jax.jit(functools.partial(every_rank, call, of_rank))(call.integers))


def tile_size(lengths: tuple[int, int], ranks: int, asked: tuple[int, int] | None) -> tuple[int, int]:
    """The queries and keys of a tile: as `asked`; else 128 by 128, or more for very long sequences. At most a shard.

    `lengths` are the numbers of queries and keys of a shard.
    """
    size = asked or (_TILE, _TILE)
    if min(size) < 1:
        raise InputError("--tile", f"got {size[0]},{size[1]}", "Pass positive lengths of queries and keys")

    def count() -> int:
        return math.prod(ranks * -(-length // tile) for length, tile in zip(lengths, size, strict=True))

    while asked is None and min(size) < max(lengths) and count() > _MANY_TILES:
        size = (2 * size[0], 2 * size[1])
    if count() > _MOST_TILES:
        raise InputError("--tile", f"{size[0]},{size[1]} makes {count()} tiles", f"At most {_MOST_TILES} can be shown")
    return min(size[0], lengths[0]), min(size[1], lengths[1])


def _choice(
    backend: str | Sequence[str] | None, needs: frozenset[Feature], platform: str, heads: selection.Heads
) -> tuple[Registration | None, str | None]:
    """The backend that runs the call, or `None` and the reason. Raises for a name that is not registered."""
    try:
        return selection.select(backend, needs, platform, heads), None
    except RingAttnError as error:
        if isinstance(error, BackendNotFoundError) and error.name is not None:
            raise
        return None, one_line(error)


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


def _origin(hops: Hops, distance: int) -> str:
    """The `keys_of` of a hop with this `engine.Step.distance`."""
    digits = []
    for letter, size in zip(_LEVELS, hops.sizes, strict=False):
        digits.append(_rank(-(distance % size), letter))
        distance //= size
    return ", ".join(reversed(digits))


def _sent(hops: Hops) -> Rows:
    """A table of the messages that each rank sends. Equal messages of a pass share a row."""
    passes = {"forward": hops.forward, "backward": hops.backward}
    return [
        {"pass": phase, "times": times, "what": what, "to": _rank(shift, _LEVELS[level]), "bytes": Bytes(count)}
        for phase, steps in passes.items()
        for (what, level, shift, count), times in Counter(
            message[:4] for step in steps for message in step.messages
        ).items()
    ]


def _prefill(call: AbstractCall, local: Call) -> Rows:
    """What `prefill_attention` would send for the same queries: a row if it sends keys, and a row if it sends queries.

    Empty on one rank, and unless the call is causal, has `query_offset`, and has only options in `_OF_PREFILL`.
    """
    if call.ring == 1 or not {"causal", "query_offset"} <= call.said.keys() <= _OF_PREFILL:
        return []
    of_keys, of_queries = (Bytes((call.ring - 1) * count) for count in bytes_to_send(local))
    return [
        {"chosen": of_keys <= of_queries, "send": "keys", "sent": of_keys, "hides": "behind kernels"},
        {"chosen": of_keys > of_queries, "send": "queries", "sent": of_queries, "hides": "no"},
    ]


def _rank(distance: int, letter: str) -> str:
    """The name of the rank `distance` places after rank `r`, such as `r + 2`; with `letter` "g", of a group."""
    return f"{letter} {'+' if distance > 0 else '-'} {abs(distance)}" if distance else letter
