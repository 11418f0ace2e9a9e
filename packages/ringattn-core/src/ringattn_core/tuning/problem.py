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
from typing import Any, Final, Protocol

import jax

from ..backends.discovery import Registration
from ..config import RingAttentionConfig
from ..contract.call import REACH, Call, Placement, is_off
from ..masks import Reach
from ..masks.builder import Built
from ..placement.platforms import device_of, platform_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What decides the speed of one rank's share of a call. Calls with equal problems share a tuning result.

    Args:
        backend: The name of the backend.
        batch: The number of batch rows of a shard.
        q_length: The number of queries of a shard.
        kv_length: The number of keys of a shard.
        heads: The number of query heads of a shard.
        kv_heads: The number of key heads of a shard.
        head_dim: The size of a query or key head.
        value_dim: The size of a value head.
        dtype: The dtype of the queries, as text.
        platform: "cpu", "cuda", "rocm" or "tpu".
        device: The kind of device, as JAX names it; for a CPU, its architecture and number of cores.
        versions: The versions of JAX, of core and of the backend.
        ranks: The number of ranks of the ring.
        causal: Whether the call is causal.
        sliding_window: The window of the call, `(left, right)`.
        chunk_size: The chunk size of the call.
        options: The other options that the call uses: an array by its dtype and shape, and masks as text.
        call: One rank's call with shapes in place of arrays, from which the tuner makes arrays to time. Not compared.
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
    causal: bool = False
    sliding_window: tuple[int | None, int | None] | None = None
    chunk_size: int | None = None
    options: tuple[tuple[str, Any], ...] = ()
    call: Call | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def reach(self) -> Reach:
        """What causality, window and chunk let a query see by position."""
        return Reach(self.causal, *(self.sliding_window or (None, None)), self.chunk_size)

    @property
    def told(self) -> dict[str, Any]:
        """The problem as a dict of plain data, without options that the call does not use."""
        fields = [field.name for field in dataclasses.fields(self) if field.compare and field.name != "options"]
        told = {name: getattr(self, name) for name in fields} | dict(self.options)
        return {name: value for name, value in told.items() if not is_off(value)}

    @property
    def key(self) -> str:
        """The problem as text, which is the same for equal problems in every process."""
        return json.dumps(self.told, sort_keys=True)

    @property
    def digest(self) -> str:
        """A short hash of the problem, used as a file name."""
        return hashlib.sha256(self.key.encode()).hexdigest()[:32]


class Tunable(Protocol):
    """Two optional functions of a kernel, by which core chooses its parameters."""

    def default_config(self, problem: Problem) -> RingAttentionConfig:
        """The configuration for a `problem` that is not tuned. Without this function every tile size is `None`."""
        ...

    def candidate_configs(self, problem: Problem) -> Sequence[RingAttentionConfig]:
        """The configurations to time for `problem`. The best forward and backward parameters are chosen separately."""
        ...


def tunable(registration: Registration) -> bool:
    """Whether core can tune the backend: its kernel has `candidate_configs`."""
    return hasattr(registration.implementation(), "candidate_configs")


def of_call(registration: Registration, call: Call, ranks: int) -> Problem:
    """The problem of one rank's share of a call: `call` has the arrays of one shard, on a ring of `ranks` ranks.

    Of its arrays, only the shapes, the devices and the dtypes that kernels get (`Call.narrowed`) are read.
    """
    given = (None, (call.query, call.key, call.value))
    call = _seen_by_kernels(call.narrowed())
    batch, q_length, heads, head_dim = call.query.shape
    used = {name: x for name, x in call.options.items() if name not in _FIXED and not is_off(x)}
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
        causal=call.reach.causal,
        sliding_window=call.options["sliding_window"],
        chunk_size=call.reach.chunk,
        options=tuple((name, _described(x)) for name, x in used.items()),
        call=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), call),
    )


_FIXED: Final = ("softmax_scale", "fwd_params", "bwd_params", "strategy", "max_distance", *REACH)
"""Options that `Problem.options` leaves out: other fields have them, or they cannot change the choice."""


def _seen_by_kernels(call: Call) -> Call:
    """The call without what never reaches a kernel, or cannot change which tile sizes are best."""
    without = dataclasses.replace(call, placement=Placement(layout=call.placement.layout), softmax_aux=None)
    other = {"dropout_seed": None, "check_positions": None, "check": None, "return_lse": False, "wide": ()}
    return dataclasses.replace(without, **other, expand=None, latents=None, expand_params=None)


@functools.cache
def machine(kind: str) -> str:
    """The kind of a device; for a CPU with its architecture and number of cores, because its kind is just "cpu"."""
    return f"cpu, {platform.machine()}, {os.cpu_count()} cores" if kind == "cpu" else kind


@functools.cache
def versions(registration: Registration) -> tuple[tuple[str, str], ...]:
    """The versions of the packages that may change the compiled program: JAX, core and the backend."""
    core = ("ringattn-core", importlib.metadata.version("ringattn-core"))
    return (("jax", jax.__version__), core, (registration.distribution, registration.version))


_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


def _described(option: Any) -> Any:
    """An option as plain data. A float, such as a soft cap, becomes `True`: its value does not change the speed."""
    if isinstance(option, tuple):  # the two ends of ranges
        return tuple(_described(x) for x in option)
    if isinstance(option, Built):
        return tuple(_ADDRESS.sub("", repr(mask)) for mask in option.masks)
    if hasattr(option, "dtype"):
        return f"{option.dtype.name}{list(option.shape)}"
    return True if isinstance(option, float) else option
