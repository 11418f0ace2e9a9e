# SPDX-License-Identifier: Apache-2.0
"""How fast a device computes attention and sends: from benchmarks, from tuning, or from the command line."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Final

import jax.numpy as jnp
from ringattn_core.backends.discovery import on_clear
from ringattn_core.tuning.problem import machine

from . import stored, tuned_files
from .policy import policy
from .work import operations

Rates = tuple[float, float]
"""`(forward, backward)`: the floating-point operations a second of the forward and of the backward kernels."""


@dataclasses.dataclass(frozen=True)
class Link:
    """What connects the ranks of a ring. A message of `n` bytes takes `latency + n / bandwidth` seconds.

    `bandwidth` is in bytes a second, out of one device in one direction; `latency` and `step` are in seconds. A
    collective of several steps pays `latency` once, and `step` for each step after the first.
    """

    name: str
    bandwidth: float
    latency: float = 0.0
    step: float = 5e-6

    def send(self, count: float) -> float:
        """The seconds of a permute, in which every rank sends `count` bytes to another rank; 0 for 0 bytes."""
        return self.latency + count / self.bandwidth if count else 0.0

    def gather(self, count: float, ranks: int) -> float:
        """The seconds of an all-gather or a reduce-scatter; each of `ranks` ranks has a share of `count` bytes."""
        return self._collective((ranks - 1) * count, ranks)

    def exchange(self, count: float, ranks: int) -> float:
        """The seconds of an all-to-all, in which every rank holds `count` bytes and keeps `1 / ranks` of them."""
        return self._collective(count * (ranks - 1) / ranks, ranks)

    def _collective(self, through: float, ranks: int) -> float:
        """The seconds of a collective of `ranks - 1` steps, in which each rank sends `through` bytes in all."""
        return self.latency + (ranks - 2) * self.step + through / self.bandwidth if ranks > 1 else 0.0


@dataclasses.dataclass(frozen=True)
class Device:
    """A device and its links, for calls of one dtype and head size.

    `launch` is the fixed time of a kernel in seconds, and `copy` the bytes a second that elementwise programs read and
    write. `near` connects groups of up to `host` ranks, `far` larger groups. `source` says where `rates` come from.
    """

    name: str
    rates: Rates
    near: Link
    far: Link
    host: int
    source: str
    launch: float = 0.0
    copy: float = math.inf

    def link(self, ranks: int) -> Link:
        """The slowest link in a group of `ranks` consecutive ranks: `near` for up to `host` ranks, else `far`."""
        return self.near if ranks <= self.host else self.far


@dataclasses.dataclass(frozen=True)
class Measured:
    """The constants of a kind of device, as benchmarks measured them.

    `rates` are those of float16 and bfloat16, by head size; `float32` serves all head sizes. The other fields are as in
    `Device`; `link` connects up to `host` ranks.
    """

    platform: str
    rates: Mapping[int, Rates]
    float32: Rates
    launch: float
    copy: float
    link: Link
    host: int


NVLINK: Final = Link("nvlink", bandwidth=350e9, latency=200e-6)
"""One permute through XLA and NCCL between H200s of one host took 172 us for 8 MiB, 513 us for 64 MiB and 1619 us for
512 MiB. This link predicts each within 35%."""
MEASURED: Final = {
    "h200": Measured(
        platform="cuda",
        rates={64: (436e12, 456e12), 96: (516e12, 405e12), 128: (580e12, 528e12), 256: (630e12, 330e12)},
        float32=(39e12, 30e12),
        launch=8e-6,
        copy=3.2e12,
        link=NVLINK,
        host=8,
    )
}
"""By name. JAX's `device_kind` of such a device has the name in it."""


def rates_of(
    name: str, backend: str | None, itemsize: int, head_dim: int, here: str | None
) -> tuple[Rates, str] | None:
    """The rates of kernels for a dtype of `itemsize` bytes and this head size, with a phrase that says their source.

    `name` is the name of a device. `here` is JAX's `device_kind` if this machine has such a device, else `None`. Rates
    that tuning measured on this machine go before those in `MEASURED`, of the next larger head size there, or of the
    largest. Returns `None` if there are neither.
    """
    if here is not None and backend is not None and policy() != "off":
        tuned = _tuned(machine(here), backend).get((itemsize, head_dim))
        if tuned is not None:
            return tuned, "Kernel rates that tuning measured on this machine"
    if name not in MEASURED:
        return None
    measured = MEASURED[name]
    size = min((size for size in measured.rates if size >= head_dim), default=max(measured.rates))
    return measured.float32 if itemsize == 4 else measured.rates[size], f"Kernel rates measured on {name}"


def parsed_rate(text: str) -> Rates:
    """Parses `FORWARD,BACKWARD`, two positive rates in 10^12 operations a second. Other text raises `ValueError`."""
    forward, backward = (1e12 * float(part) for part in text.split(","))
    if not (0 < forward < math.inf and 0 < backward < math.inf):
        raise ValueError(text)
    return forward, backward


def parsed_links(text: str) -> tuple[Link, ...]:
    """Parses `LINK` or `NEAR,FAR`: a link is `nvlink`, `GB/s` or `GB/s@MICROSECONDS`; else raises `ValueError`."""
    links = tuple(_parsed_link(part) for part in text.split(","))
    if len(links) > 2:
        raise ValueError(text)
    return links


def _parsed_link(text: str) -> Link:
    if text == NVLINK.name:
        return NVLINK
    bandwidth, _, latency = text.partition("@")
    link = Link(f"{text} of the command line", 1e9 * float(bandwidth), 1e-6 * float(latency or 0))
    if not (0 < link.bandwidth < math.inf and 0 <= link.latency < math.inf):
        raise ValueError(text)
    return link


def measured_name(kind: str) -> str | None:
    """The key in `MEASURED` of the device with JAX's `device_kind` `kind`; `None` if benchmarks did not measure it."""
    return next((name for name in MEASURED if name in kind.lower()), None)


_COUNTABLE: Final = {
    "backend", "batch", "q_length", "kv_length", "heads", "kv_heads", "head_dim", "value_dim", "dtype", "platform",
    "device", "versions", "ranks", "causal", "layout",
}  # fmt: skip
"""A stored tuning result gives rates only if its problem has no other fields. Other options mask out an unknown number
of keys, or add work to the kernels."""


@functools.cache
def _tuned(device: str, backend: str) -> dict[tuple[int, int], Rates]:
    """The highest stored rates of `backend` on one such device, by bytes of the dtype and head size.

    A process reads the files of tuning once, so results that it stores itself count only in later processes.
    """
    best: dict[tuple[int, int], Rates] = {}
    for entry in stored.entries():
        told = entry.problem
        here = (told.get("device"), told.get("backend"), told.get("ranks", 1)) == (device, backend, 1)
        rates = _of_entry(entry) if here and set(told) <= _COUNTABLE else None
        if rates is not None:
            key = jnp.dtype(told["dtype"]).itemsize, max(told["head_dim"], told["value_dim"])
            before = best.get(key, rates)
            best[key] = max(before[0], rates[0]), max(before[1], rates[1])
    return best


on_clear.append(_tuned.cache_clear)


def _of_entry(entry: tuned_files.Entry) -> Rates | None:
    """The rates of a stored result with its chosen parameters; `None` if one of the two passes was not timed."""
    chosen = {"forward": entry.config.fwd_params.to_dict(), "backward": entry.config.bwd_params.to_dict()}
    seconds = {
        trial["part"]: trial["seconds"]
        for trial in entry.trials
        if trial.get("seconds") and trial.get("params") == chosen.get(trial.get("part", ""))
    }
    if len(seconds) < 2:
        return None
    told: Mapping[str, Any] = entry.problem
    q, kv = told["q_length"], told["kv_length"]
    below = min(q, kv)  # these queries see the keys up to their own position, the others all keys
    pairs = below * (below + 1) // 2 + (q - below) * kv if told.get("causal") else q * kv
    forward, backward = operations(*(told[name] for name in ("batch", "heads", "head_dim", "value_dim")))
    return pairs * forward / seconds["forward"], pairs * backward / seconds["backward"]
