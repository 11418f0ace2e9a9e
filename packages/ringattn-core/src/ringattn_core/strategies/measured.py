# SPDX-License-Identifier: Apache-2.0
"""Kernel rates that tuning has measured on this kind of device: they replace the constants of the cost model."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Final

import jax.numpy as jnp

from ..backends.discovery import on_clear
from ..contract.rule import Rule
from ..ring import hops
from ..tuning import cache
from ..tuning.policy import current
from ..tuning.problem import machine
from ..tuning.trial import HOPS
from .devices import Device
from .work import operations, visible_pairs

_KNOWN: Final = {
    "backend", "batch", "q_length", "kv_length", "heads", "kv_heads", "head_dim", "value_dim", "dtype", "platform",
    "device", "versions", "ranks", "causal", "sliding_window", "chunk_size", "layout",
}  # fmt: skip
"""The fields of a tuned problem whose rates count. Other options mask keys out in a way that cannot be counted, or add
work to the kernels."""


def with_measured(device: Device, kind: str, backend: str | None) -> Device:
    """The device with the rates that this backend reached in tuning on devices of this `kind`, where there are any.

    A process reads the tuning cache once, so what it tunes itself counts only in later processes.
    """
    if backend is None or current() == "off":
        return device
    found = _rates(machine(kind), backend)
    half = {dim: pair for (size, dim), pair in found.items() if size == 2}
    float32 = [pair for (size, _), pair in found.items() if size == 4]
    if not half and not float32:
        return device
    return dataclasses.replace(
        device,
        rates={**device.rates, **half},
        float32=max(float32, default=device.float32),
        source=f"{device.source}; rates that tuning measured here replace {len(found)} of the kernel rates",
    )


@functools.cache
def _rates(device: str, backend: str) -> dict[tuple[int, int], tuple[float, float]]:
    """The best rates, forward and backward, by itemsize and head size."""
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for entry in cache.entries():
        told = entry.problem
        if (told.get("device"), told.get("backend")) != (device, backend) or not set(told) <= _KNOWN:
            continue
        rates = _of_entry(entry)
        if rates is not None:
            key = jnp.dtype(told["dtype"]).itemsize, max(told["head_dim"], told["value_dim"])
            best = found.get(key, (0.0, 0.0))
            found[key] = max(best[0], rates[0]), max(best[1], rates[1])
    return found


on_clear.append(_rates.cache_clear)


def _of_entry(entry: cache.Entry) -> tuple[float, float] | None:
    """The operations a second of the chosen parameters, forward and backward; `None` if either was not timed."""
    chosen = {"forward": entry.config.fwd_params.to_dict(), "backward": entry.config.bwd_params.to_dict()}
    seconds = {
        trial["part"]: trial["seconds"]
        for trial in entry.trials
        if trial.get("seconds") and trial.get("params") == chosen.get(trial.get("part", ""))
    }
    if len(seconds) < 2:
        return None
    told = entry.problem
    pairs = _pairs(told)
    forward, backward = operations(*(told[name] for name in ("batch", "heads", "head_dim", "value_dim")))
    return pairs * forward / seconds["forward"], pairs * backward / seconds["backward"]


def _pairs(told: Mapping[str, Any]) -> float:
    """The pairs of one head and batch row that a trial of tuning computes: the first hops of the last rank."""
    ranks, layout = told.get("ranks", 1), told.get("layout", "contiguous")
    window = told.get("sliding_window")
    rule = Rule(1.0, told.get("causal", False), None if window is None else tuple(window), told.get("chunk_size"))
    lengths = told["q_length"], told["kv_length"]
    plan = hops.plan(rule, layout, ranks, *lengths)
    counted = visible_pairs(rule, layout, ranks, *lengths)[-1]
    return math.fsum(counted[(ranks - 1 - offset) % ranks] for offset in plan.offsets[:HOPS]) / len(plan.signs)
