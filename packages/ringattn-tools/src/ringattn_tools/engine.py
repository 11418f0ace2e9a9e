# SPDX-License-Identifier: Apache-2.0
"""What core's ring engine does for a call, as plain data: its hops, its messages, and the blocks that its kernels get.

This is the only module here that imports `ringattn_core.ring`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from ringattn_core.contract import packing
from ringattn_core.contract.call import Call
from ringattn_core.contract.protocol import Block, BlockKernel
from ringattn_core.ring import engine
from ringattn_core.ring.blocks import block_of, queries_of
from ringattn_core.ring.key_ids import with_all_ids
from ringattn_core.ring.kv import KV
from ringattn_core.ring.plan import Hop, Level


class Message(NamedTuple):
    """Arrays of `bytes` that every rank sends to the rank `shift` ranks onward along one level of the ring.

    Level 0 is the innermost mesh axis of the ring. While the message travels, the kernels of the next `during` steps
    run, the step that sends it included.
    """

    what: str
    level: int
    shift: int
    bytes: int
    during: int = 1


class Step(NamedTuple):
    """A kernel with the keys of the rank `distance` ranks back, and the messages that leave before the kernel starts.

    With several levels, `distance` has a digit for each level: the sum of the distances times their `stride`.
    A step that is not `computed` only sends: it runs no kernel, so nothing hides its messages.
    """

    distance: int
    computed: bool
    messages: tuple[Message, ...]


@dataclasses.dataclass(frozen=True)
class Hops:
    """The hops of a ring in order, and the steps of both passes.

    `sizes` has the number of ranks of each level, innermost first. `distances` has the `Step.distance` of
    each hop. `sources[hop, rank]` is the rank whose keys `rank` has at `hop`.
    """

    sizes: tuple[int, ...]
    distances: tuple[int, ...]
    sources: np.ndarray = dataclasses.field(repr=False, compare=False)
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]

    @property
    def ranks(self) -> int:
        return self.sources.shape[1]


def hops_of_call(call: Call, ranks: int, inner: int, stripe: int = 1) -> Hops:
    """The hops of `call`, a call of one rank, on a ring of `ranks` ranks, `inner` of them along its last mesh axis.

    Of the arrays only shapes and dtypes are read. `stripe` is as in core's `engine.run`.
    """
    sizes, call = (ranks // inner, inner) if 1 < inner < ranks else (ranks,), call.placed(strategy="ring")
    ring = engine.ring_of(None, call, (0, *sizes), stripe=stripe)
    forward = _forward(ring.levels, call, 0)
    distances = tuple(step.distance for step in forward)
    return Hops(
        sizes=tuple(level.ranks for level in ring.levels) or (ranks,),
        distances=distances,
        sources=np.stack([_owner(ring.levels, np.arange(ranks), distance) for distance in distances]),
        forward=forward,
        backward=_backward(ring.levels, call, 0),
    )


def _forward(levels: Sequence[Level], call: Call, outer_distance: int) -> tuple[Step, ...]:
    """The steps of the forward pass: a loop over the last of `levels`, with the loops over the levels before it inside.

    The keys come from `outer_distance` ranks back in the loops outside.
    """
    if not levels:
        return (Step(outer_distance, True, ()),)
    *inside, level = levels
    steps: list[Step] = []
    for hop in level.forward_hops:
        inner_steps = _forward(inside, call, outer_distance + hop.distance * level.stride)
        steps += _sending(inner_steps, _keys(len(inside), hop, call))
    return tuple(steps)


def _backward(levels: Sequence[Level], call: Call, outer_distance: int) -> tuple[Step, ...]:
    """The steps of the backward pass, nested as in `_forward`. Each loop begins with a step that only sends."""
    if not levels:
        return (Step(outer_distance, True, ()),)
    *inside, level = levels
    number, start = len(inside), level.forward_hops[0]
    steps = [Step(outer_distance, False, tuple(_keys(number, start, call)))]
    rows_before = (None, *(hop.next_rows for hop in level.forward_hops[:-1]))
    for hop, rows in zip(level.backward_hops, rows_before, strict=True):
        messages = _keys(number, hop, call)
        if hop.gradient_shift is not None:
            count = _elements(call, rows) * 4  # gradients are float32
            messages.append(Message("dk,dv", number, hop.gradient_shift, count))
        steps += _sending(_backward(inside, call, outer_distance + hop.distance * level.stride), messages)
    return tuple(steps)


def _keys(level: int, hop: Hop, call: Call) -> list[Message]:
    if hop.key_shift is None:
        return []
    return [Message("K,V", level, hop.key_shift, _elements(call, hop.next_rows) * call.query.dtype.itemsize)]


def _owner(levels: Sequence[Level], rank: Any, distance: int) -> Any:
    """The owner of the keys that `rank` has at a step with this `distance`."""
    for level in levels:
        rank = level.owner(rank, distance // level.stride)
    return rank


def _elements(call: Call, rows: tuple[int, int] | None) -> int:
    """The number of elements of keys and values in these rows of a shard (first, end); `None` is all rows."""
    first, end = rows or (0, call.key.shape[1])
    return (call.key.size + call.value.size) // call.key.shape[1] * (end - first)


def _sending(steps: tuple[Step, ...], messages: list[Message]) -> list[Step]:
    """Adds `messages` to the first of `steps`. The messages travel while the kernels of all these steps run."""
    first, *others = steps
    added = tuple(message._replace(during=len(steps)) for message in messages)
    return [first._replace(messages=(*added, *first.messages)), *others]


def own_block(call: Call) -> Block:
    """The block of this rank's queries and its own keys. The axis of the call must be bound, as in a `vmap`."""
    ring = engine.ring_of(None, call.placed(strategy="ring"))
    call = with_all_ids(ring, call)
    return block_of(ring, call, queries_of(ring, call), KV(packing.pack(call.key, call.value)), ring.rank)


def blocks_of_last_rank(kernel: BlockKernel, call: Call, ranks: int, most: int) -> tuple[Block, ...]:
    """The blocks that the last of `ranks` ranks computes at the first `most` hops, made without a mesh.

    `call` is the call of that rank, but with the key ids and positions of all ranks. Every block gets the keys and
    values in `call`, because those of other ranks are not here.
    """
    ring = engine.ring_of(kernel, call.placed(strategy="ring"), (ranks - 1, ranks))
    queries, rows = queries_of(ring, call), ring.levels[0].rows if ring.levels else None
    found = []
    for hop, step in enumerate(_forward(ring.levels, call, 0)[:most]):
        first, end = rows[hop] if rows else (0, call.key.shape[1])
        k, v = call.key[:, first:end], call.value[:, first:end]
        kv = packing.pack(k, v) if hop > 0 or (ring.levels and rows is None) else (k, v)
        owner = _owner(ring.levels, ring.rank, step.distance)
        made = block_of(ring, call, queries, KV(kv, first, received=hop > 0), owner)
        found.append(dataclasses.replace(made, final=not ring.levels))
    return tuple(found)
