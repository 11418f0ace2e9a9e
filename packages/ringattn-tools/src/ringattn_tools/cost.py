# SPDX-License-Identifier: Apache-2.0
"""What each strategy costs: seconds and bytes of its steps, which sends hide behind kernels, and memory.

The costs are computed from the rates and links of a device; nothing runs. The model assumes that all ranks run in
lockstep, so each step takes as long as on its busiest rank.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from . import engine
from .devices import Device
from .memory import call_bytes, engine_bytes
from .work import Work


@dataclasses.dataclass(frozen=True)
class Step:
    """A kernel that runs for `computes` seconds, and a message of `sent` bytes that takes `sends` seconds; 0 is none.

    If `overlaps`, the message travels while the kernel runs, and while kernels of other steps run for `beside` seconds.
    Else the kernel waits for the message.
    """

    name: str
    computes: float
    sent: int = 0
    sends: float = 0.0
    overlaps: bool = True
    beside: float = 0.0

    @property
    def hides(self) -> bool | None:
        """Whether the message arrives before the kernels beside it end, and so costs no time; `None` without one."""
        return self.overlaps and self.sends <= self.computes + self.beside if self.sent else None

    @property
    def waits(self) -> float:
        """The seconds for which no kernel runs, because the next one waits for the message."""
        return max(0.0, self.sends - self.computes - self.beside) if self.overlaps else self.sends

    @property
    def seconds(self) -> float:
        return self.computes + self.waits


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one strategy. With "ulysses", groups of `inner` consecutive ranks exchange heads for tokens.

    `memory` is the peak of one device in bytes, over both passes. `refusal` says why the call cannot use the strategy,
    which then has no steps; else it is `None`.
    """

    strategy: str
    inner: int = 1
    forward: tuple[Step, ...] = ()
    backward: tuple[Step, ...] = ()
    memory: int = 0
    refusal: str | None = None

    @property
    def name(self) -> str:
        """The name of the strategy; for "ulysses" with the size of its groups, such as "ulysses of 4"."""
        return f"ulysses of {self.inner}" if self.strategy == "ulysses" else self.strategy

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.forward + self.backward

    @property
    def seconds(self) -> float:
        """The seconds of a forward and a backward pass together."""
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


def of_strategies(work: Work, device: Device, inner: int, refusals: Mapping[str, str]) -> tuple[Cost, ...]:
    """The cost of each strategy on `device`, or its reason in `refusals`; on one rank the cost of "ring" only.

    `inner` is the number of ranks along the last mesh axis of the ring.
    """
    if work.ranks == 1:
        return (ring(work, device),)
    reckoned = {
        "ring": lambda: ring(work, device),
        "all_gather": lambda: all_gather(work, device),
        "ulysses": lambda: ulysses(work, device, inner),
    }
    return tuple(
        Cost(name, inner, refusal=refusals[name]) if name in refusals else cost() for name, cost in reckoned.items()
    )


def ring(work: Work, device: Device) -> Cost:
    """The cost of "ring": a hop's sends overlap with its kernel; sends between groups, with all hops in a group."""
    return Cost(
        strategy="ring",
        forward=tuple(_steps(work, device, work.hops.forward, _forward_seconds)),
        backward=tuple(_steps(work, device, work.hops.backward, _backward_seconds)),
        memory=call_bytes(work) + engine_bytes(work),
    )


def all_gather(work: Work, device: Device) -> Cost:
    """The cost of "all_gather": every rank gathers all keys and runs one kernel.

    The backward pass gathers the keys again, and reduce-scatters `dk` and `dv`.
    """
    link, ranks = device.link(work.ranks), work.ranks
    keys, pairs = work.itemsize * work.keys, work.pairs.sum(1)
    gather = Step("gather K,V", 0.0, (ranks - 1) * keys, link.gather(keys, ranks), overlaps=False)
    scattered = link.gather(4 * work.keys, ranks)
    scatter = Step("reduce-scatter dk,dv", 0.0, (ranks - 1) * 4 * work.keys, scattered, overlaps=False)
    gathered = ranks * work.keys * (work.itemsize + 4)
    return Cost(
        strategy="all_gather",
        forward=(gather, Step("kernel", _forward_seconds(work, device, pairs, partial=False))),
        backward=(gather, Step("kernel", _backward_seconds(work, device, pairs)), scatter),
        memory=call_bytes(work) + gathered + 4 * work.queries + work.itemsize * work.outputs + 8 * work.rows,
    )


def ulysses(work: Work, device: Device, inner: int) -> Cost:
    """The cost of "ulysses": groups of `inner` consecutive ranks exchange heads for tokens, and then run rings.

    Such a ring has one rank of each group.
    """
    within, outer = device.link(inner), work.over_heads(inner)
    to_heads = work.itemsize * (work.queries + outer.keys)
    back = work.itemsize * work.outputs
    # Gradients of key heads that ranks share travel in float32.
    of_keys = 4 if work.call.key.shape[2] % inner else work.itemsize
    gradients = work.itemsize * work.queries + of_keys * outer.keys
    # Neighbours of the outer ring are in different groups.
    across = ring(outer, dataclasses.replace(device, near=device.link(work.ranks), far=device.link(work.ranks)))

    def exchange(name: str, count: int) -> Step:
        return Step(name, 0.0, count * (inner - 1) // inner, within.exchange(count, inner), overlaps=False)

    return Cost(
        strategy="ulysses",
        inner=inner,
        forward=(exchange("q,k,v to heads", to_heads), *across.forward, exchange("out back", back)),
        backward=(exchange("dout to heads", back), *across.backward, exchange("dq,dk,dv back", gradients)),
        memory=call_bytes(work) + to_heads + back + engine_bytes(outer),
    )


def _forward_seconds(work: Work, device: Device, pairs: np.ndarray, partial: bool = True) -> float:
    """The seconds of a forward kernel on `pairs[rank]` pairs of each rank. If `partial`, it continues a float32 out."""
    moved = 8 * work.outputs if partial and work.ranks > 1 else 0
    return _kernel_seconds(pairs, work.operations[0], device.rates[0], moved, device)


def _backward_seconds(work: Work, device: Device, pairs: np.ndarray) -> float:
    """The seconds of a backward kernel on `pairs[rank]` pairs, with float32 dq in and out, and of adding dk, dv."""
    moved = 8 * work.queries + 12 * work.keys if work.ranks > 1 else 0
    return _kernel_seconds(pairs, work.operations[1], device.rates[1], moved, device)


def _kernel_seconds(pairs: np.ndarray, operations: int, rate: float, moved: int, device: Device) -> float:
    """The seconds of a kernel, and of the elementwise programs that move bytes beside it, on the busiest rank."""
    return device.launch + float(pairs.max()) * operations / rate + moved / device.copy


def _steps(
    work: Work, device: Device, steps: Sequence[engine.Step], seconds_of: Callable[..., float]
) -> Iterator[Step]:
    """Turns the engine's `steps` of one pass into steps with times and bytes.

    `seconds_of(work, device, pairs)` is the time of a kernel on `pairs[rank]` (query, key) pairs of each rank. A
    message between groups becomes a step of its own, without a kernel.
    """
    pairs = dict(zip(work.hops.distances, work.of_hops, strict=True))
    computes = [seconds_of(work, device, pairs[step.distance]) if step.computed else 0.0 for step in steps]
    reach = [math.prod(work.hops.sizes[: level + 1]) for level in range(len(work.hops.sizes))]
    for number, step in enumerate(steps):
        for message in step.messages:
            if message.level:
                sends = device.link(reach[message.level]).send(message.bytes)
                beside = sum(computes[number : number + message.during])
                yield Step("between groups", 0.0, message.bytes, sends, beside=beside)
        sent = sum(message.bytes for message in step.messages if not message.level)
        # The messages of one step share a link and leave together.
        yield Step(_name(work, step), computes[number], sent, device.link(reach[0]).send(sent))


def _name(work: Work, step: engine.Step) -> str:
    if not step.computed:
        return "first keys"
    return "kernel" if work.ranks == 1 else f"hop {work.hops.distances.index(step.distance)}"
