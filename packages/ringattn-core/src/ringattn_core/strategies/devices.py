# SPDX-License-Identifier: Apache-2.0
"""How fast each kind of device computes attention and sends to its neighbours: constants, each with its source."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Final


@dataclasses.dataclass(frozen=True)
class Link:
    """What connects the ranks of a ring. A message of `n` bytes takes `latency + n / bandwidth` seconds.

    `bandwidth` is in bytes a second, out of one device in one direction. A collective of several steps pays `latency`
    once and `step` seconds for each further step. In a `torus`, messages pass through the devices between sender and
    receiver, and the two directions of a ring have links of their own.
    """

    name: str
    bandwidth: float
    latency: float
    step: float = 5e-6
    torus: bool = False

    def send(self, count: float) -> float:
        """The seconds in which every rank sends `count` bytes to its neighbour."""
        return self.latency + count / self.bandwidth if count else 0.0

    def gather(self, count: float, ranks: int) -> float:
        """The seconds of an all-gather or a reduce-scatter; the share of each rank has `count` bytes."""
        return self._collective((ranks - 1) * count / (2 if self.torus and ranks > 2 else 1), ranks)

    def exchange(self, count: float, ranks: int) -> float:
        """The seconds of an all-to-all in which every rank holds `count` bytes, and keeps its own part of them.

        In a torus the ranks are a ring, and a part travels a quarter of the ring on average, in either direction.
        """
        return self._collective(count * (ranks - 1) / ranks * (max(1.0, ranks / 8) if self.torus else 1), ranks)

    def _collective(self, through: float, ranks: int) -> float:
        """The seconds of a collective of `ranks - 1` steps, in which `through` bytes pass through each link."""
        return self.latency + (ranks - 2) * self.step + through / self.bandwidth if ranks > 1 else 0.0


@dataclasses.dataclass(frozen=True)
class Device:
    """One kind of device.

    `rates` are the floating-point operations a second of the forward and of the backward kernels in bfloat16 or
    float16, by head size; `float32` is the same pair for float32. `launch` is the fixed time of a kernel. `copy` is the
    bytes a second that elementwise programs read and write, `memory` the bytes of one device. `near` connects
    groups of up to `host` ranks, `far` larger ones.
    """

    name: str
    platform: str
    rates: Mapping[int, tuple[float, float]]
    float32: tuple[float, float]
    launch: float
    copy: float
    memory: int
    near: Link
    far: Link
    host: int
    source: str

    def rate(self, itemsize: int, head_dim: int) -> tuple[float, float]:
        """The rates, forward and backward, of kernels for this size of dtype and head."""
        if itemsize == 4:
            return self.float32
        sizes = sorted(self.rates)
        return self.rates[next((size for size in sizes if size >= head_dim), sizes[-1])]

    def link(self, ranks: int) -> Link:
        """What connects a group of this many consecutive ranks: its slowest link."""
        return self.near if ranks <= self.host else self.far

    def linked_by(self, link: Link) -> "Device":
        return dataclasses.replace(self, near=link, far=link)


_NVLINK: Final = Link("nvlink", bandwidth=350e9, latency=200e-6)
"""One permute through XLA and NCCL between H200s of one host took 172 us for 8 MiB, 513 us for 64 MiB and 1619 us for
512 MiB. This line is within 35% of each."""
LINKS: Final = {
    "nvlink": _NVLINK,
    # One adapter of 400 Gbit/s for each GPU, 80% of its rate.
    "network": Link("network", bandwidth=40e9, latency=250e-6, step=10e-6),
    # One link of a v5p, one direction: 90 GB/s of the 1,200 Gbit/s that Google's page gives for two.
    "ici": Link("ici", bandwidth=90e9, latency=5e-6, step=1e-6, torus=True),
}

_H200: Final = {64: (436e12, 456e12), 96: (516e12, 405e12), 128: (580e12, 528e12), 256: (630e12, 330e12)}


def _of_peak(peak: float, forward: float, backward: float) -> dict[int, tuple[float, float]]:
    """Rates as shares of the peak at heads of 128; heads of 64 reach three quarters of that."""
    return {64: (0.75 * forward * peak, 0.75 * backward * peak), 128: (forward * peak, backward * peak)}


def _tpu(name: str, peak: float, copy: float, memory: int, bandwidth: float) -> Device:
    """A TPU: its kernels have not run on one, so their rates are guesses; the rest are Google's figures."""
    link = dataclasses.replace(LINKS["ici"], bandwidth=bandwidth)
    return Device(
        name=name,
        platform="tpu",
        rates=_of_peak(peak, 0.6, 0.5),
        float32=(0.1 * peak, 0.08 * peak),
        launch=3e-6,
        copy=copy,
        memory=memory,
        near=link,
        far=link,
        host=2**30,
        source=f"{name}: guessed kernel rates, 60% and 50% of the peak; links and memory by Google's pages",
    )


def _gpu(
    name: str, rates: Mapping[int, tuple[float, float]], scale: float, copy: float, memory: int, source: str
) -> Device:
    """A GPU: eight share NVLink in one host."""
    return Device(
        name=name,
        platform="cuda",
        rates=rates,
        float32=(39e12 * scale, 30e12 * scale),
        launch=8e-6,
        copy=copy,
        memory=memory,
        near=_NVLINK,
        far=LINKS["network"],
        host=8,
        source=f"{name}: {source}",
    )


_GIB: Final = 2**30
_ALL: Final = (
    _gpu("h200", _H200, 1.0, 3.2e12, 141 * 10**9, "kernel rates and NVLink measured, network by the data sheet"),
    _gpu("h100", _H200, 1.0, 2.4e12, 80 * 10**9, "the measured rates of an H200, memory by the data sheet"),
    _gpu(
        "b200", _of_peak(2250e12, 0.35, 0.25), 1.2, 5.5e12, 180 * 10**9,
        "guessed kernel rates, 35% and 25% of the peak; memory by the data sheet; NVLink as measured on an H200",
    ),
    _gpu(
        "a100", _of_peak(312e12, 0.6, 0.45), 0.3, 1.4e12, 80 * 10**9,
        "guessed kernel rates, 60% and 45% of the peak; memory by the data sheet; NVLink as measured on an H200",
    ),
    _tpu("v5e", 197e12, 0.7e12, 16 * _GIB, 45e9),
    _tpu("v5p", 459e12, 2.4e12, 95 * _GIB, 90e9),
    _tpu("v6e", 918e12, 1.4e12, 32 * _GIB, 90e9),
    Device(
        name="cpu",
        platform="cpu",
        rates={64: (5e10, 5e10)},
        float32=(8e10, 8e10),
        launch=20e-6,
        copy=10e9,
        memory=16 * _GIB,
        near=Link("memory", bandwidth=5e9, latency=50e-6),
        far=Link("memory", bandwidth=5e9, latency=50e-6),
        host=2**30,
        source="cpu: guesses for two cores that several devices share",
    ),
)  # fmt: skip
DEVICES: Final = {device.name: device for device in _ALL}
TYPICAL: Final = {"cuda": "h200", "tpu": "v5p", "cpu": "cpu"}
"""The device to assume for a platform that this machine does not have."""
_KINDS: Final = {
    "h200": r"h200", "h100": r"h100", "b200": r"b200", "a100": r"a100", "cpu": r"cpu",
    "v5e": r"tpu v5 ?(lite|e)", "v5p": r"tpu v5p?$", "v6e": r"tpu v6",
}  # fmt: skip


def of_kind(kind: str) -> Device | None:
    """The constants for JAX's `device_kind`, or `None` if there are none for it."""
    found = [name for name, pattern in _KINDS.items() if re.search(pattern, kind.lower())]
    return DEVICES[found[0]] if found else None
