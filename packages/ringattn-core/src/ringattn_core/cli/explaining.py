# SPDX-License-Identifier: Apache-2.0
"""How a call is explained: every answer comes from the function that the engine itself asks."""

from collections.abc import Sequence

import jax
import numpy as np

from ..backends import selection
from ..backends.discovery import Registration
from ..contract.features import Feature
from ..errors import BackendNotFoundError, InputError, RingAttnError
from ..ring.hops import Plan, Send
from . import compiling, memory, tracing
from .explanation import MASKED, WHOLE, Candidate, Explanation, Hop, Message
from .request import Request
from .tracing import Shard


def explain(
    request: Request,
    platform: str,
    backend: str | Sequence[str] | None = None,
    tile: tuple[int, int] | None = None,
    compiled: bool = False,
) -> Explanation:
    """What a call would do on devices of `platform`, with `backend` as `ring_attention` takes it."""
    needs = tracing.shard(request).needs
    chosen, refusal = _choice(backend, needs, platform)
    own_ring = chosen is not None and chosen.descriptor().kernel is None
    shard = tracing.shard(request, None if chosen is None or own_ring else chosen.implementation())
    plan, sizes = shard.ring.plan, _tile(tile, shard)
    visits = [(number, turn * offset) for number, offset in enumerate(plan.offsets) for turn in _turns(plan, offset)]
    states = tracing.visited(request, shard, [offset for _, offset in visits], *sizes)
    size, itemsize = memory.elements(shard), shard.inputs.k.dtype.itemsize

    def messages(sends: tuple[Send, ...]) -> tuple[Message, ...]:
        return tuple(Message(send.shift, send.keys, send.gradients, send.bytes(size, itemsize)) for send in sends)

    gradients = chosen is not None and chosen.descriptor().supports(Feature.GRADIENTS)
    return Explanation(
        request=request,
        platform=platform,
        needs=tuple(feature.name for feature in Feature if feature in needs),
        candidates=tuple(_candidate(*found) for found in selection.candidates(needs, platform)),
        choice=None if chosen is None else chosen.name,
        refusal=refusal,
        own_ring=own_ring,
        lengths=(shard.inputs.q.shape[1], shard.inputs.k.shape[1]),
        tile=sizes,
        hops=tuple(
            Hop(number, offset, len(_turns(plan, offset)), *_counts(states[:, column]))
            for column, (number, offset) in enumerate(visits)
        ),
        skipped=tuple(offset for offset in range(plan.ranks) if offset not in plan.offsets),
        forward=messages(plan.forward),
        backward=messages(plan.backward),
        gathered=_gathered(shard),
        memory=memory.held(shard),
        compiled=compiling.compiled(request, shard, chosen.name, gradients) if compiled and chosen else None,
        states=states,
    )


def _choice(
    backend: str | Sequence[str] | None, needs: frozenset[Feature], platform: str
) -> tuple[Registration | None, str | None]:
    """The backend that the call gets, or why it gets none; a name that nobody has is a mistake of the caller."""
    try:
        return selection.select(backend, needs, platform), None
    except RingAttnError as error:
        if isinstance(error, BackendNotFoundError) and error.name is not None:
            raise
        return None, error.one_line()


def _candidate(registration: Registration, reason: str | None) -> Candidate:
    descriptor = registration.backend
    return Candidate(
        name=registration.name,
        distribution=registration.distribution,
        version=registration.version,
        priority=descriptor.priority if descriptor else None,
        reason=reason,
        gradients=descriptor is not None and descriptor.supports(Feature.GRADIENTS),
    )


def _tile(asked: tuple[int, int] | None, shard: Shard) -> tuple[int, int]:
    if asked is None:
        return tracing.default_tiles(shard)
    if min(asked) < 1:
        raise InputError("--tile", f"got {','.join(map(str, asked))}", "Pass positive lengths of queries and keys")
    lengths = shard.inputs.q.shape[1], shard.inputs.k.shape[1]
    return min(asked[0], lengths[0]), min(asked[1], lengths[1])


def _turns(plan: Plan, offset: int) -> tuple[int, ...]:
    """The ways on which keys come over this distance: a rank's own are the same on both."""
    return plan.signs if offset else (1,)


def _counts(states: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For each rank the tiles that are computed, and those without a mask."""
    computed, whole = ((states >= state).sum((1, 2)).tolist() for state in (MASKED, WHOLE))
    return tuple(computed), tuple(whole)


def _gathered(shard: Shard) -> int:
    ids = jax.tree.leaves((shard.fixed.kv_segments, shard.fixed.kv_positions))
    return sum(x.size * x.dtype.itemsize for x in ids) * (shard.ring.plan.ranks - 1)
