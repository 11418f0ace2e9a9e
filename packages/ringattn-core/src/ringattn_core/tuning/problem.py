# SPDX-License-Identifier: Apache-2.0
"""The key of a tuning result: everything about a call that can change which configuration is fastest."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Sequence
from typing import Any, Final, Protocol, runtime_checkable

import jax

from ..backends.discovery import Registration
from ..config import RingAttentionConfig
from ..contract.call import Call
from ..placement.platforms import device_of, platform_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What decides the speed of one rank's share of a call. Calls with equal problems share a tuning result.

    Lengths are those of a shard. `positions`, `bias` and `attention_mask` are shapes, `None` where the call has no such
    array. `masks` are the distinct masks of the heads, as text. `device` is the kind of device; `versions` are the
    versions of JAX, core and the backend.
    """

    backend: str
    batch: int
    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    platform: str
    device: str
    versions: tuple[tuple[str, str], ...]
    ranks: int = 1
    layout: str = "contiguous"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    chunk: int | None = None
    soft_cap: bool = False
    dropout: bool = False
    segments: bool = False
    slopes: bool = False
    positions: tuple[int, ...] | None = None
    masks: tuple[str, ...] = ()
    bias: tuple[int, ...] | None = None
    attention_mask: tuple[int, ...] | None = None
    precision: str | None = None
    fused_backward: bool = False
    two_way: bool = False

    @property
    def key(self) -> str:
        """The problem as text: the same for equal problems in every process."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @property
    def digest(self) -> str:
        """A short hash of the problem, used as a file name."""
        return hashlib.sha256(self.key.encode()).hexdigest()[:32]


@runtime_checkable
class Tunable(Protocol):
    """Two optional functions of a kernel, by which core chooses its parameters."""

    def default_config(self, problem: Problem) -> RingAttentionConfig:
        """The configuration of an untuned problem. A kernel without this function gets `None` for every size."""
        ...

    def candidate_configs(self, problem: Problem) -> Sequence[RingAttentionConfig]:
        """The configurations to time. The best forward and the best backward parameters are chosen separately."""
        ...


def tunable(registration: Registration) -> bool:
    """Whether core can tune the backend: it is a block kernel with `candidate_configs`."""
    return registration.descriptor().kernel is not None and hasattr(registration.implementation(), "candidate_configs")


def of_call(registration: Registration, call: Call, ranks: int, mesh: Any = None) -> Problem:
    """The problem of a call on one shard. Only the shapes and dtypes of arrays are read."""
    batch, q_length, heads, head_dim = call.query.shape
    given = (mesh, (call.query, call.key, call.value))
    return Problem(
        backend=registration.name,
        batch=batch,
        q_length=q_length,
        kv_length=call.key.shape[1],
        heads=heads,
        kv_heads=call.key.shape[2],
        head_dim=head_dim,
        value_dim=call.value.shape[3],
        dtype=call.query.dtype.name,
        platform=platform_of(*given),
        device=machine(device_of(*given).device_kind),
        versions=versions(registration),
        ranks=ranks,
        layout=call.layout,
        causal=call.causal,
        window=call.sliding_window,
        chunk=call.chunk_size,
        soft_cap=call.logits_soft_cap is not None,
        dropout=call.dropout_prob > 0,
        segments=call.q_segment_ids is not None,
        slopes=call.alibi_slopes is not None,
        positions=_shape(call.q_positions),
        masks=() if call.mask_builder is None else tuple(map(_described, call.mask_builder.masks)),
        bias=_shape(call.bias),
        attention_mask=_shape(call.attention_mask),
        precision=call.precision,
        fused_backward=call.fused_backward,
        two_way=call.two_way,
    )


@functools.cache
def machine(kind: str) -> str:
    """The kind of a device; for a CPU with its architecture and number of cores, because its kind is just "cpu"."""
    return f"cpu, {platform.machine()}, {os.cpu_count()} cores" if kind == "cpu" else kind


@functools.cache
def versions(registration: Registration) -> tuple[tuple[str, str], ...]:
    """The versions that may change the compiled program."""
    core = importlib.metadata.version("ringattn-core")
    return (("jax", jax.__version__), ("ringattn-core", core), (registration.distribution, registration.version))


_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


def _described(mask: Any) -> str:
    return _ADDRESS.sub("", repr(mask))


def _shape(x: Any) -> tuple[int, ...] | None:
    return None if x is None else tuple(x.shape)
