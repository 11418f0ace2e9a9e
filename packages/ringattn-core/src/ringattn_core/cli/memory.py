# SPDX-License-Identifier: Apache-2.0
"""How much memory a call takes on one device: the arrays of the call and the engine, and XLA's plan."""

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..contract.features import Feature
from ..errors import InputError
from ..ring.hops import Plan
from .abstract_call import AXIS, AbstractCall
from .shards import Shard


@dataclasses.dataclass(frozen=True)
class HeldArrays:
    """The size of some arrays on one device; `phase` is "call", "forward" or "backward"."""

    phase: str
    what: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class XlaMemory:
    """Temporary memory that XLA plans on one device, in bytes: for the forward pass, and for both passes.

    `None` if the backend has no backward pass, or if XLA gives no figure.
    """

    devices: str
    forward: int | None
    both: int | None


def held(shard: Shard) -> tuple[HeldArrays, ...]:
    """Lists the arrays of a call, each once: without the kernel's workspace, and without copies or reuse by XLA."""
    call, plan = shard.call, shard.ring.plan
    inputs = [x for x in jax.tree.leaves(call) if jnp.issubdtype(x.dtype, jnp.floating)]
    batch, length, heads = call.query.shape[:3]
    itemsize, out, lse = (
        call.query.dtype.itemsize,
        batch * length * heads * call.value.shape[3],
        4 * batch * length * heads,
    )
    keys, gradients = shard.elements * itemsize, 4 * shard.elements
    sent = _most_sent_at_once(plan, shard.elements, itemsize)
    ids = _bytes((call.q_segment_ids, call.q_positions))
    ids += plan.ranks * _bytes((call.kv_segment_ids, call.kv_positions))
    with_lse = Feature.RETURN_LSE in shard.needs
    found = [
        HeldArrays("call", "inputs", _bytes(inputs)),
        HeldArrays("call", "ids and positions, the keys' of all ranks", ids),
        HeldArrays("call", "output and lse" if with_lse else "output", out * itemsize + lse * with_lse),
        HeldArrays("forward", "K,V in use, and K,V arriving", 2 * keys) if sent else HeldArrays("forward", "K,V", keys),
        HeldArrays("forward", "partial output and lse, float32", 4 * out + lse),
        HeldArrays("backward", "messages being sent and received", 2 * sent)
        if sent
        else HeldArrays("backward", "K,V", keys),
        HeldArrays("backward", "dk, dv of the hop, float32", gradients),
        HeldArrays("backward", "dk, dv of half of the own heads", plan.halves(call.key.shape[2]) * gradients // 2),
        HeldArrays("backward", "dq, float32", 4 * call.query.size),
        HeldArrays("backward", "dbias, float32", 0 if call.bias is None else 4 * call.bias.size),
        HeldArrays("backward", "output, lse, delta kept", out * itemsize + 2 * lse),
    ]
    return tuple(entry for entry in found if entry.bytes)


def _most_sent_at_once(plan: Plan, size: int, itemsize: int) -> int:
    """The most bytes that one rank sends during a hop of the backward pass, in both directions together."""
    onward, behind = (*plan.shifts[1:], None), (None, *plan.shifts[1:])
    hops = [plan.parcel(None, plan.homeward), plan.parcel(next(iter(plan.shifts), None), None)]
    hops += [plan.parcel(*moves) for moves in zip(onward, behind, strict=True)]
    return max(sum(send.bytes(size, itemsize) for send in sends) for sends in hops)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def provide_devices(ring: int) -> None:
    """Gives JAX `ring` CPU devices, unless JAX is initialised already or XLA_FLAGS sets a number. Raises if too few."""
    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", ring)
    if len(jax.devices()) < ring:
        fact = f"needs {ring} devices and JAX sees {len(jax.devices())} ({jax.default_backend()})"
        raise InputError("--compile", fact, "Ask for a smaller ring, or set JAX_PLATFORMS=cpu")


def planned_by_xla(call: AbstractCall, shard: Shard, backend: str, gradients: bool) -> XlaMemory:
    """Compiles the forward pass, and with `gradients` both passes, to read XLA's figures; runs nothing."""
    devices = jax.devices()[: call.ring]
    mesh = Mesh(np.array(devices), (AXIS,))
    floating = {name: placed(x, dict(shard.specs)[name], mesh) for name, x in call.floating().items()}
    forward, both = programs(call, mesh, backend)
    alone = jax.jit(forward).lower(floating).compile()
    found = XlaMemory(f"{len(devices)} x {devices[0].device_kind}", _temporary(alone), None)
    if not gradients:
        return found
    cotangents = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), alone.out_info, alone.output_shardings
    )
    return dataclasses.replace(found, both=_temporary(jax.jit(both).lower(floating, cotangents).compile()))


def programs(call: AbstractCall, mesh: Mesh, backend: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Two functions: the call, of its differentiable inputs; and its output with all gradients, of cotangents too."""
    integers = call.integers()

    def forward(floating: dict[str, jax.Array]) -> Any:
        return call.attend(floating, integers, mesh, backend)

    def both(floating: dict[str, jax.Array], cotangents: Any) -> Any:
        out, pull = jax.vjp(forward, floating)
        return out, pull(cotangents)

    return forward, both


def placed(x: jax.ShapeDtypeStruct, spec: PartitionSpec, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """The shape with the sharding of the call. An uneven length is replicated, because the call will pad it."""
    even = all(entry is None or length % mesh.size == 0 for entry, length in zip(spec, x.shape, strict=False))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec if even else PartitionSpec()))


def _temporary(program: jax.stages.Compiled) -> int | None:
    memory = program.memory_analysis()
    return None if memory is None else memory.temp_size_in_bytes
