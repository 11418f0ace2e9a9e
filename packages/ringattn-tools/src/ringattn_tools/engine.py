# SPDX-License-Identifier: Apache-2.0
"""What core's ring engine does for a call, as plain data: its hops, its messages, and the blocks of its kernels.

This is the only module here that imports `ringattn_core.ring`.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from ringattn_core.contract import packing
from ringattn_core.contract.call import Call
from ringattn_core.contract.protocol import Block, BlockKernel
from ringattn_core.ring import engine
from ringattn_core.ring.blocks import block, gathered
from ringattn_core.ring.directions import Direction
from ringattn_core.ring.hops import Plan, Send


class Message(NamedTuple):
    """Arrays of `bytes` that every rank sends to the rank `distance` onward along one level of the ring.

    Level 0 is the innermost mesh axis of the ring. While the message travels, the kernels of the next `during` steps
    run, beginning with that of the step that sends it.
    """

    what: str
    level: int
    distance: int
    bytes: int
    during: int = 1


class Step(NamedTuple):
    """A kernel over `share` of the heads, with the keys that have travelled `offset`, and messages that leave first.

    A step with the share 0 runs no kernel, so nothing hides its messages.
    """

    offset: int
    share: float
    messages: tuple[Message, ...]


@dataclasses.dataclass(frozen=True)
class Hops:
    """The hops of a ring in order, for each pass.

    `sizes` are the ranks of each level, innermost first. `offsets` are the distances that keys have travelled at each
    hop. `sources[hop, rank]` is the rank whose keys a rank then has.
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    sources: np.ndarray = dataclasses.field(repr=False, compare=False)
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]

    @property
    def ranks(self) -> int:
        return self.sources.shape[1]


def hops_of_call(kernel: Any, call: Call, inner: int) -> Hops:
    """The hops of the call of one shard, traced over one axis for the whole ring, with `inner` ranks on the last level.

    What the ring sends may depend on `kernel`; `None` is a kernel with nothing of its own.
    """
    ring, _ = engine.prepared(kernel, call)
    keys = call.key.size + call.value.size
    return _hops(ring.plan.over(inner), keys, call.query.dtype.itemsize, call.key.shape[2])


def hops_of_ring(ranks: int, offsets: tuple[int, ...], keys: int, itemsize: int) -> Hops:
    """The hops of a ring of one level. A shard of keys and values has `keys` elements."""
    return _hops(Plan(ranks, offsets), keys, itemsize, 1)


def _hops(plan: Plan, keys: int, itemsize: int, kv_heads: int) -> Hops:
    def messages(sends: tuple[Send, ...], round_of: int) -> tuple[Message, ...]:
        """The messages of a step; `round_of` steps hide those between groups."""
        return tuple(
            Message(
                " with ".join(["K,V"] * send.keys + ["dk,dv"] * send.gradients),
                int(send.outer),
                send.shift,
                send.bytes(keys, itemsize),
                round_of if send.outer else 1,
            )
            for send in sends
        )

    first, *between, last = plan.backward_hops
    early = 0.5 * plan.halves(kv_heads)
    backward = [
        Step(first[0], early, messages(first[1], 1)),
        # The last hop of a round sends on the keys that have arrived from the next group.
        *(Step(offset, 1.0, messages(sends, max(plan.inner - 1, 1))) for offset, sends in between),
        Step(last[0], 1.0 - early, messages(last[1], 1)),
    ]
    return Hops(
        sizes=(plan.inner, plan.outer) if plan.outer > 1 else (plan.inner,),
        offsets=plan.offsets,
        sources=np.stack([plan.source(np.arange(plan.ranks), offset) for offset in plan.offsets]),
        forward=tuple(Step(offset, 1.0, messages(sends, plan.inner)) for offset, sends in plan.forward_hops),
        backward=tuple(step for step in backward if step.share or step.messages),
    )


def own_block(call: Call) -> Block:
    """The block of a rank's queries and its own keys, inside a trace that has the call's axis."""
    ring, location = engine.prepared(None, call)
    direction = Direction(1, gathered(ring, call, location.rank), location)
    return block(ring, direction, packing.pack(call.key, call.value), 0)


def blocks_of_last_rank(kernel: BlockKernel, call: Call, ranks: int, most: int) -> tuple[Block, ...]:
    """The blocks of the last of `ranks` ranks at the first `most` hops, without a mesh.

    The ids and positions of keys in `call` are those of all ranks. Every block has this rank's keys and values.
    """
    ring, location = engine.prepared(kernel, call, (ranks - 1, ranks))
    keys = (call.key, call.value) if ranks == 1 else packing.pack(call.key, call.value)
    direction = Direction(1, call, location)
    blocks = [block(ring, direction, keys, offset) for offset in ring.plan.offsets[:most]]
    return tuple(dataclasses.replace(each, final=ranks == 1) for each in blocks)
