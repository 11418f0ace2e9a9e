# SPDX-License-Identifier: Apache-2.0
"""The least time of a workload on a device: its operations, its bytes of memory, and what it sends, at peak rates."""

import dataclasses
import functools
from typing import Final

import jax
import jax.numpy as jnp
from interleaved import seconds_of
from workloads import Workload


@dataclasses.dataclass(frozen=True)
class Rates:
    """What one device does in a second: operations, bytes of memory, and bytes sent in one direction."""

    operations: float
    memory: float
    link: float | None
    """`None` where it is not known: then no floor follows from what is sent."""
    source: str = "its maker"


KNOWN: Final = {
    "H200": Rates(989e12, 4.8e12, 450e9),
    "H100": Rates(989e12, 3.35e12, 450e9),
    "A100": Rates(312e12, 2.04e12, 300e9),
    "v5 lite": Rates(197e12, 0.82e12, 45e9),
    "v5e": Rates(197e12, 0.82e12, 45e9),
    "v5p": Rates(459e12, 2.77e12, 90e9),
    "v5": Rates(459e12, 2.77e12, 90e9),
    "v6": Rates(918e12, 1.64e12, 90e9),
    "7x": Rates(1153.5e12, 3.69e12, None),
}
"""The peak rates by a part of JAX's `device_kind`: operations in bfloat16, SXM GPUs. A chip of 7x is two devices."""


def rates(size: int = 2048) -> Rates:
    """The peak rates of this process's devices.

    Those of a CPU are measured, because its name does not tell them: on a square matrix of this size, and a copy of 8
    times its elements.
    """
    kind = jax.devices()[0].device_kind
    for name, known in KNOWN.items():
        if name in kind:
            return known
    if jax.default_backend() != "cpu":
        raise SystemExit(f"the peak rates of a {kind} are not known: add them to KNOWN in benchmarks/floors.py")
    square = jnp.ones((size, size))
    product = jax.jit(jnp.dot).lower(square, square).compile()
    long = jnp.ones(8 * size**2)
    copy = jax.jit(lambda x: x + 1).lower(long).compile()
    best = [
        min(seconds_of(run, 1) for _ in range(5))
        for run in (functools.partial(product, square, square), functools.partial(copy, long))
    ]
    memory = 2 * long.nbytes / best[1]
    # Devices of one CPU send by copying, which reads and writes every byte.
    return Rates(2 * size**3 / best[0], memory, memory / 2, "a matrix product and a copy, measured in this run")


def seconds(workload: Workload, part: str, ring: int, rates: Rates) -> dict[str, float]:
    """The least seconds for the operations, for the memory, and for the link, of one device of the ring.

    On a CPU the devices of a ring share the rates, so pass the rates of one of them.
    """
    shape, size = workload.shape, jnp.dtype(workload.shape.dtype).itemsize
    operations = 1e12 * shape.tera(part, workload.share) / ring
    both = shape.head_size + shape.values
    keys = shape.batch * shape.tokens * shape.kv_heads * both // ring
    queries = shape.batch * (1 if workload.decode else shape.tokens // ring) * shape.heads * both
    moved = (keys + queries) * size
    sent = (ring - 1) * keys * size
    if part == "forward+backward":
        # Reads q, k, v, out and dout, and writes dq, dk and dv. dk and dv travel in float32, one hop more than keys.
        moved += (2 * keys + 2 * queries) * size
        sent += (ring - 1) * keys * size + (ring * keys * 4 if ring > 1 else 0)
    found = {"operations": operations / rates.operations, "memory": moved / rates.memory}
    return found | ({"link": sent / rates.link} if rates.link and ring > 1 else {})


def best(found: Rates, known: Rates | None) -> Rates:
    """The higher of two measurements of each rate: a busy moment makes a CPU seem slower than it is."""
    if known is None:
        return found
    link = None if found.link is None or known.link is None else max(found.link, known.link)
    operations, memory = max(found.operations, known.operations), max(found.memory, known.memory)
    return Rates(operations, memory, link, found.source)


def shared(rates: Rates, devices: int) -> Rates:
    """The rates of one of the devices that share a processor."""
    link = None if rates.link is None else rates.link / devices
    return dataclasses.replace(rates, operations=rates.operations / devices, memory=rates.memory / devices, link=link)
