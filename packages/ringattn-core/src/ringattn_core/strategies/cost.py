# SPDX-License-Identifier: Apache-2.0
"""What each plan of a call costs: seconds and bytes of its steps, which sends hide behind kernels, and memory.

The costs follow from the constants of a device; nothing is measured. The model assumes that all ranks run in lockstep,
so each step takes as long as on its busiest rank.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ..ring.hops import Send
from .devices import Device, Link
from .ulysses import misfit
from .work import Work


@dataclasses.dataclass(frozen=True)
class Step:
    """A kernel that runs for `computes` seconds, beside a message of `sent` bytes that takes `sends` seconds.

    Where the message `overlaps`, it travels while the kernel runs; else the kernel waits for it.
    """

    name: str
    computes: float
    sent: int = 0
    sends: float = 0.0
    overlaps: bool = True

    @property
    def hides(self) -> bool | None:
        """Whether the kernel hides the message, so that it costs no time; `None` without a message."""
        return self.overlaps and self.sends <= self.computes if self.sent else None

    @property
    def waits(self) -> float:
        """The seconds in which no kernel runs because of the message."""
        return max(0.0, self.sends - self.computes) if self.overlaps else self.sends

    @property
    def seconds(self) -> float:
        return self.computes + self.waits


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one plan. Groups of `inner` consecutive ranks exchange heads for tokens; a ring connects the groups.

    `inner` is 1 if no heads are exchanged. `memory` is the peak of one device in bytes, over both passes. `refusal`
    says why the call cannot use the plan.
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
    """Keys travel round the ring; the send of each hop hides behind the kernel of that hop."""
    return Cost(
        strategy="ring",
        inner=1,
        forward=_forward(work, device, device.link(work.ranks)),
        backward=_backward(work, device, device.link(work.ranks)),
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
    refusal = refused(work, inner)
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
            exchange("q,k,v to heads", to_heads), *_forward(outer, device, across), exchange("out back", back)
        ),
        backward=_nonempty(
            exchange("dout to heads", back), *_backward(outer, device, across), exchange("dq,dk,dv back", gradients)
        ),
        memory=_call_bytes(work) + to_heads + back + _engine_bytes(outer),
    )


def refused(work: Work, inner: int) -> str | None:
    """Why groups of `inner` ranks cannot split the heads of the call."""
    if work.ranks % inner:
        return f"{work.ranks} ranks do not divide into groups of {inner}"
    return misfit(work.heads, work.kv_heads, inner, work.ranks // inner, work.two_way)


@dataclasses.dataclass(frozen=True)
class _Kernels:
    """The seconds of kernels and of the elementwise programs beside them, on the busiest rank."""

    work: Work
    device: Device

    def forward(self, pairs: np.ndarray, partial: bool = True) -> float:
        """A kernel that continues a `partial` result also reads and writes it in float32."""
        work, rate = self.work, self._rates[0]
        moved = 8 * work.outputs * partial
        return self.device.launch + float(pairs.max()) * work.operations[0] / rate + moved / self.device.copy

    def backward(self, pairs: np.ndarray) -> float:
        """Each hop reads and writes dq in float32, and adds dk,dv to those that arrive."""
        work, rate = self.work, self._rates[1]
        moved = 8 * work.queries + 12 * work.keys if work.ranks > 1 else 0
        return self.device.launch + float(pairs.max()) * work.operations[1] / rate + moved / self.device.copy

    @property
    def _rates(self) -> tuple[float, float]:
        return self.device.rate(self.work.itemsize, max(self.work.head_dim, self.work.value_dim))


def _forward(work: Work, device: Device, link: Link) -> tuple[Step, ...]:
    """The hops of a ring: during each but the last, the keys of the next hop arrive. One rank runs one kernel."""
    kernels, sends = _Kernels(work, device), work.plan.forward
    ways, own = len(work.plan.signs), work.of_hops[0]
    if work.ranks == 1:
        return (Step("kernel", kernels.forward(own, partial=False)),)
    return tuple(
        _step(f"hop {number}", kernels.forward(pairs), sends[ways * number : ways * (number + 1)], work, link)
        for number, pairs in enumerate(work.of_hops)
    )


def _backward(work: Work, device: Device, link: Link) -> tuple[Step, ...]:
    """The hops with the keys of other ranks, then the hop with own keys, which hides the return of the last dk,dv.

    In a ring that computes half of the own keys first, that half hides the first send.
    """
    kernels, plan, (own, *visitors) = _Kernels(work, device), work.plan, work.of_hops
    if not visitors:
        return (Step("kernel", kernels.backward(own)),)
    halves, ways = plan.halves(work.kv_heads), len(plan.signs)
    own_seconds = kernels.backward(own) / (1 + halves)
    rest, steps = list(plan.backward), []

    def step(name: str, seconds: float, count: int) -> None:
        sent = [rest.pop(0) for _ in range(ways * count)]
        steps.append(_step(name, seconds, sent, work, link))

    step("half of own keys" if halves else "first keys", own_seconds if halves else 0.0, 1)
    moves = zip((*plan.shifts[1:], None), (None, *plan.shifts[1:]), visitors, strict=True)
    for number, (onward, behind, pairs) in enumerate(moves, 1):
        step(f"hop {number}", kernels.backward(pairs), len(plan.parcel(onward, behind)))
    step("rest of own keys" if halves else "own keys", own_seconds, 1)
    return tuple(steps)


def _step(name: str, computes: float, sent: Sequence[Send], work: Work, link: Link) -> Step:
    """A step with messages that leave together.

    In a torus a message passes through the ranks between sender and receiver, and each direction has its own links.
    """
    counts = [send.bytes(work.keys, work.itemsize) for send in sent]
    if not link.torus:
        return Step(name, computes, sum(counts), link.send(sum(counts)))
    far = [min(abs(send.shift), work.ranks - abs(send.shift)) for send in sent]
    passed = sum(count * distance for count, distance in zip(counts, far, strict=True))
    return Step(name, computes, sum(counts), link.send(passed / len(work.plan.signs)))


def _call_bytes(work: Work) -> int:
    """The bytes of the inputs and of the output of one rank."""
    return work.itemsize * (work.queries + work.keys + work.outputs) + work.others


def engine_arrays(work: Work) -> dict[str, dict[str, int]]:
    """The bytes of the arrays that the ring engine holds at its busiest hop, for each pass, by what they are.

    Without the gradient of a bias, and without copies or reuse by XLA.
    """
    plan, keys, gradients = work.plan, work.itemsize * work.keys, 4 * work.keys
    sent = plan.most_sent(work.keys, work.itemsize)
    return {
        "forward": {
            **({"K,V in use, and K,V arriving": 2 * keys} if sent else {"K,V": keys}),
            "partial output and lse, float32": 4 * (work.outputs + work.rows),
        },
        "backward": {
            **({"messages being sent and received": 2 * sent} if sent else {"K,V": keys}),
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
