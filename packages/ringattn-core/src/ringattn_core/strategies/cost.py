# SPDX-License-Identifier: Apache-2.0
"""What each plan of a call costs: seconds and bytes of its steps, which sends hide behind kernels, and memory.

The costs follow from the constants of a device; nothing is measured. The model assumes that all ranks run in lockstep,
so each step takes as long as on its busiest rank.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from ..ring.hops import Hop, Send
from .devices import Device, Link
from .ulysses import misfit
from .work import Work

ALONG_OUTER: Final = "the same along the outer ring"
"""The name of the messages between groups in the list of arrays."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A kernel that runs for `computes` seconds, beside a message of `sent` bytes that takes `sends` seconds.

    Where the message `overlaps`, it travels while the kernel runs; else the kernel waits for it. It may also travel
    during other steps, which take `beside` seconds.
    """

    name: str
    computes: float
    sent: int = 0
    sends: float = 0.0
    overlaps: bool = True
    beside: float = 0.0

    @property
    def hides(self) -> bool | None:
        """Whether kernels hide the message, so that it costs no time; `None` without a message."""
        return self.overlaps and self.sends <= self.computes + self.beside if self.sent else None

    @property
    def waits(self) -> float:
        """The seconds in which no kernel runs because of the message."""
        return max(0.0, self.sends - self.computes - self.beside) if self.overlaps else self.sends

    @property
    def seconds(self) -> float:
        return self.computes + self.waits


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one plan. Groups of `inner` consecutive ranks exchange heads for tokens; a ring connects the groups.

    `inner` is 1 if no heads are exchanged. `memory` is the peak of one device in bytes, over both passes. `refusal`
    says why the call cannot use the plan. A plan that cannot run at all has no steps; one that is too large has.
    """

    strategy: str
    inner: int
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    memory: int
    refusal: str | None = None

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.forward + self.backward

    @property
    def seconds(self) -> float:
        """The time of a forward and a backward pass."""
        return total(self.steps)

    @property
    def waits(self) -> float:
        return sum(step.waits for step in self.steps)

    @property
    def sent(self) -> int:
        """The bytes that one rank sends in both passes."""
        return sum(step.sent for step in self.steps)


def total(steps: Sequence[Step]) -> float:
    return sum(step.seconds for step in steps)


def ring(work: Work, device: Device) -> Cost:
    """Keys travel round the ring; the send of each hop hides behind the kernel of that hop.

    On a ring of two levels, a send along the outer ring hides behind the hops of a round.
    """
    links = device.link(work.plan.inner), device.link(work.ranks)
    return Cost(
        strategy="ring",
        inner=1,
        forward=_forward(work, device, *links),
        backward=_backward(work, device, *links),
        memory=_call_bytes(work) + _engine_bytes(work),
    )


def all_gather(work: Work, device: Device) -> Cost:
    """Every rank gathers all keys and runs one kernel; the backward pass gathers again and reduce-scatters dk,dv."""
    link, ranks = device.link(work.ranks), work.ranks
    kernels = _Kernels(work, device)
    keys, pairs = work.itemsize * work.keys, work.of_hops.sum(0)
    gather = Step("gather K,V", 0.0, (ranks - 1) * keys, link.gather(keys, ranks), overlaps=False)
    scattered = link.gather(4 * work.keys, ranks)
    scatter = Step("reduce-scatter dk,dv", 0.0, (ranks - 1) * 4 * work.keys, scattered, overlaps=False)
    gathered = ranks * work.keys * (work.itemsize + 4)
    return Cost(
        strategy="all_gather",
        inner=1,
        forward=_nonempty(gather, Step("kernel", kernels.forward(pairs, partial=False))),
        backward=_nonempty(gather, Step("kernel", kernels.backward(pairs)), scatter),
        memory=_call_bytes(work) + gathered + 4 * work.queries + work.itemsize * work.outputs + 8 * work.rows,
    )


def ulysses(work: Work, device: Device, inner: int) -> Cost:
    """Groups of `inner` consecutive ranks exchange heads for tokens; each group is then one rank of an outer ring."""
    refusal = misfit(work.heads, inner)
    if refusal is not None:
        return Cost("ulysses", inner, (), (), 0, refusal)
    within, across, outer = device.link(inner), device.link(work.ranks), work.over_heads(inner)
    to_heads = work.itemsize * (work.queries + outer.keys)
    back = work.itemsize * work.outputs
    # Gradients of key heads that ranks share travel in float32.
    of_keys = 4 if math.lcm(work.kv_heads, inner) > work.kv_heads else work.itemsize
    gradients = work.itemsize * work.queries + of_keys * outer.keys

    def exchange(name: str, count: int) -> Step:
        sent = count * (inner - 1) // inner
        return Step(name, 0.0, sent, within.exchange(count, inner), overlaps=False)

    return Cost(
        strategy="ulysses",
        inner=inner,
        forward=_nonempty(
            exchange("q,k,v to heads", to_heads), *_forward(outer, device, across, across), exchange("out back", back)
        ),
        backward=_nonempty(
            exchange("dout to heads", back),
            *_backward(outer, device, across, across),
            exchange("dq,dk,dv back", gradients),
        ),
        memory=_call_bytes(work) + to_heads + back + _engine_bytes(outer),
    )


@dataclasses.dataclass(frozen=True)
class _Kernels:
    """The seconds of kernels and of the elementwise programs beside them, on the busiest rank."""

    work: Work
    device: Device

    def forward(self, pairs: np.ndarray, partial: bool = True) -> float:
        """The seconds of a forward kernel. If it continues a `partial` result, it reads and writes that in float32."""
        work, rate = self.work, self._rates[0]
        moved = 8 * work.outputs * partial
        return self.device.launch + float(pairs.max()) * work.operations[0] / rate + moved / self.device.copy

    def backward(self, pairs: np.ndarray) -> float:
        """The seconds of a hop's backward kernel, of dq that it reads and writes in float32, and of adding up dk,dv."""
        work, rate = self.work, self._rates[1]
        moved = 8 * work.queries + 12 * work.keys if work.ranks > 1 else 0
        return self.device.launch + float(pairs.max()) * work.operations[1] / rate + moved / self.device.copy

    @property
    def _rates(self) -> tuple[float, float]:
        return self.device.rate(self.work.itemsize, max(self.work.head_dim, self.work.value_dim))


def _forward(work: Work, device: Device, near: Link, far: Link) -> tuple[Step, ...]:
    """The steps of a ring's forward pass: during every hop but the last, the keys of the next hop arrive.

    A ring of one rank has one step, its kernel.

    `near` connects the ranks of an inner ring, and `far` those of the outer ring.
    """
    kernels = _Kernels(work, device)
    if work.ranks == 1:
        return (Step("kernel", kernels.forward(work.of_hops[0], partial=False)),)
    steps = [
        _step(f"hop {number}", kernels.forward(pairs), sends, work, near)
        for number, (pairs, (_, sends)) in enumerate(zip(work.of_hops, work.plan.forward_hops, strict=True))
    ]
    return _with_outer_sends(steps, work.plan.forward_hops, work, far)


def _backward(work: Work, device: Device, near: Link, far: Link) -> tuple[Step, ...]:
    """The hops with the keys of other ranks, then the hop with own keys, which hides the return of the last dk,dv.

    If the plan `halves` the heads of its own keys, the first half hides the first send of keys.
    """
    kernels, hops = _Kernels(work, device), work.plan.backward_hops
    own = kernels.backward(work.of_hops[0])
    if len(work.of_hops) == 1:
        return (Step("kernel", own),)
    halves, pairs = work.plan.halves(work.kv_heads), dict(zip(work.plan.offsets, work.of_hops, strict=True))
    seconds = [own / 2 * halves, *(kernels.backward(pairs[offset]) for offset, _ in hops[1:-1]), own / (1 + halves)]
    names = ["half of own keys" if halves else "first keys", *(f"hop {n}" for n in range(1, len(hops) - 1))]
    names.append("rest of own keys" if halves else "own keys")
    steps = [
        _step(name, computes, sends, work, near)
        for name, computes, (_, sends) in zip(names, seconds, hops, strict=True)
    ]
    # A round ends with a hop that sends on the keys which have arrived along the outer ring.
    rest = _with_outer_sends(steps[1:], hops[1:], work, far, early=1)
    return (_first_round(steps[0], hops[0][1], work, far), *rest)


def _first_round(step: Step, sends: Sequence[Send], work: Work, far: Link) -> Step:
    """Adds the send along the outer ring to the first step: the send along the inner ring waits for it."""
    outer = _step("", 0.0, sends, work, far, outer=True)
    return dataclasses.replace(step, sent=step.sent + outer.sent, sends=step.sends + outer.sends)


def _with_outer_sends(
    steps: Sequence[Step], hops: Sequence[Hop], work: Work, far: Link, early: int = 0
) -> tuple[Step, ...]:
    """The steps, with one more step before each round for its sends along the outer ring.

    All hops of the round but the last `early` ones hide these sends.
    """
    inner, found = work.plan.inner, []
    for first in range(0, len(steps), inner):
        ahead = [send for _, sends in hops[first : first + inner] for send in sends if send.outer]
        if ahead:
            made = _step(f"round {first // inner}", 0.0, ahead, work, far, outer=True)
            found.append(dataclasses.replace(made, beside=total(steps[first : first + inner - early])))
        found += steps[first : first + inner]
    return tuple(found)


def _step(name: str, computes: float, sends: Sequence[Send], work: Work, link: Link, outer: bool = False) -> Step:
    """A step with the messages of `sends` that travel along the inner ring or, if `outer`, along the outer ring.

    They leave together. In a torus a message passes through the ranks between sender and receiver, and each direction
    has its own links.
    """
    sent = [send for send in sends if send.outer == outer]
    counts = [send.bytes(work.keys, work.itemsize) for send in sent]
    if not link.torus:
        return Step(name, computes, sum(counts), link.send(sum(counts)))
    ranks = work.plan.outer if outer else work.plan.inner
    far = [min(abs(send.shift), ranks - abs(send.shift)) for send in sent]
    passed = sum(count * distance for count, distance in zip(counts, far, strict=True))
    return Step(name, computes, sum(counts), link.send(passed / len(work.plan.signs)))


def _call_bytes(work: Work) -> int:
    """The bytes of the inputs and of the output of one rank."""
    return work.itemsize * (work.queries + work.keys + work.outputs) + work.others


def engine_arrays(work: Work) -> dict[str, dict[str, int]]:
    """The bytes of each array that the ring engine holds at its busiest hop, for each pass, by a description of it.

    The gradient of a bias is not counted, and neither are copies or reuse of memory by XLA.
    """
    plan, keys, gradients = work.plan, work.itemsize * work.keys, 4 * work.keys

    def most_sent(outer: bool) -> int:
        """The most bytes that a rank sends during a hop of the backward pass, along the inner or the outer ring."""
        leaving = ([send for send in sends if send.outer == outer] for _, sends in plan.backward_hops)
        return max(sum(send.bytes(work.keys, work.itemsize) for send in sends) for sends in leaving)

    sent, ahead = most_sent(outer=False), most_sent(outer=True)
    return {
        "forward": {
            **({"K,V in use, and K,V arriving": 2 * keys} if sent else {"K,V": keys}),
            **({ALONG_OUTER: 2 * keys} if plan.outer > 1 else {}),
            "partial output and lse, float32": 4 * (work.outputs + work.rows),
        },
        "backward": {
            **({"messages being sent and received": 2 * sent} if sent else {"K,V": keys}),
            **({ALONG_OUTER: 2 * ahead} if ahead else {}),
            "dk, dv of the hop, float32": gradients,
            "dk, dv of half of the own heads": plan.halves(work.kv_heads) * gradients // 2,
            "dq, float32": 4 * work.queries,
            "output, lse, delta kept": work.itemsize * work.outputs + 8 * work.rows,
        },
    }


def _engine_bytes(work: Work) -> int:
    return max(sum(arrays.values()) for arrays in engine_arrays(work).values())


def _nonempty(*steps: Step) -> tuple[Step, ...]:
    """The steps that take time: a group of one rank exchanges nothing, and has no step for it."""
    return tuple(step for step in steps if step.seconds)
