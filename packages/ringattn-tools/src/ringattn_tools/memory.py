# SPDX-License-Identifier: Apache-2.0
"""How much memory a call takes on one device: the arrays of the call and the engine, and XLA's plan."""

import contextlib
import os
from typing import Any

import jax
import jax.numpy as jnp
from ringattn_core.errors import InputError

from .abstract_call import AbstractCall
from .output import Bytes, Rows
from .work import Work, data_bytes

TOGETHER = "together: the engine at its busiest hop"


def held(work: Work) -> Rows:
    """A table of the arrays that one device holds for a call, each counted once, with their bytes.

    It leaves out the workspace of the kernel, and copies and reuse of memory by XLA.
    """
    arrays, bias = {"call": call_arrays(work)} | engine_arrays(work), work.call.bias
    arrays["backward"]["dbias, float32"] = 0 if bias is None else 4 * bias.size
    for phase in ("forward", "backward"):
        arrays[phase][TOGETHER] = sum(arrays[phase].values())
    return [
        {"pass": phase, "arrays": name, "bytes": Bytes(count)}
        for phase, counts in arrays.items()
        for name, count in counts.items()
        if count
    ]


def call_arrays(work: Work) -> dict[str, int]:
    """The bytes of the arrays that one rank gets and returns, by description. Each rank gathers the ids of all keys."""
    call = work.call
    ids = data_bytes((call.q_segment_ids, call.q_positions))
    ids += work.ranks * data_bytes((call.kv_segment_ids, call.kv_positions))
    inputs = [x for x in jax.tree.leaves(call) if jnp.issubdtype(x.dtype, jnp.floating)]
    output, lse = work.itemsize * work.outputs, 4 * work.rows
    return {
        "inputs": data_bytes(inputs),
        "ids and positions, the keys' of all ranks": ids,
        **({"output and lse": output + lse} if call.return_lse else {"output": output}),
    }


def engine_arrays(work: Work) -> dict[str, dict[str, int]]:
    """For each pass, the bytes of the arrays that the ring engine holds at its busiest hop, by description.

    Each message is held twice, by its sender and by its receiver. The gradient of a bias is not counted, and neither
    are copies or reuse of memory by XLA.
    """
    keys = work.itemsize * work.keys
    near, far = (
        max(sum(x.bytes for x in step.messages if (x.level > 0) == between) for step in work.hops.backward)
        for between in (False, True)
    )
    levels = len(work.hops.sizes)
    return {
        "forward": {
            **({"K,V in use, and K,V arriving": 2 * keys} if near else {"K,V": keys}),
            "the same between groups": 2 * keys * (levels - 1),
            "partial output and lse, float32": 4 * (work.outputs + work.rows),
        },
        "backward": {
            **({"messages being sent and received": 2 * near} if near else {"K,V": keys}),
            "the same between groups": 2 * far,
            "dk, dv of the hop, float32": 4 * work.keys,
            "dq, float32": 4 * work.queries,
            "output, lse, delta kept": work.itemsize * work.outputs + 8 * work.rows,
        },
    }


def call_bytes(work: Work) -> int:
    """The bytes of all `call_arrays` together."""
    return sum(call_arrays(work).values())


def engine_bytes(work: Work) -> int:
    """The bytes of all `engine_arrays` together, in the pass that needs more."""
    return max(sum(arrays.values()) for arrays in engine_arrays(work).values())


def provide_devices(ring: int) -> None:
    """Asks JAX for `ring` CPU devices, unless JAX is initialised already or XLA_FLAGS sets a number.

    Raises if JAX then has fewer devices than `ring`.
    """
    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", ring)
    if len(jax.devices()) < ring:
        fact = f"needs {ring} devices and JAX sees {len(jax.devices())} ({jax.default_backend()})"
        raise InputError("--compile", fact, "Ask for a smaller ring, or set JAX_PLATFORMS=cpu")


def planned_by_xla(call: AbstractCall, backend: str, gradients: bool) -> dict[str, Any]:
    """The bytes of temporary memory that XLA plans for each device, from programs that are compiled and not run.

    In the result, `devices` describes the devices, `forward` is for the forward pass, and `both` for both passes.
    A figure is `None` if XLA gives none; `both` also if the backend has no `gradients`.
    """
    devices = jax.devices()[: call.ring]
    forward, both = (_temporary(program(call, backend, passes)) if passes else None for passes in (1, 2 * gradients))
    return {"devices": f"{len(devices)} x {devices[0].device_kind}", "forward": forward, "both": both}


def program(call: AbstractCall, backend: str, passes: int) -> jax.stages.Compiled:
    """Compiles the call as a function of its floating-point inputs, for `passes` 1 or 2.

    With 2, the function also takes a cotangent of the output, and also returns all gradients.
    """
    mesh = call.mesh_of(jax.devices())

    def forward(floating: dict[str, jax.Array]) -> Any:
        return call.attend(floating, mesh, backend)

    def both(floating: dict[str, jax.Array], cotangents: Any) -> Any:
        out, pull = jax.vjp(forward, floating)
        return out, pull(cotangents)

    if passes == 1:
        return jax.jit(forward).lower(call.floating).compile()
    return jax.jit(both).lower(call.floating, jax.eval_shape(forward, call.floating)).compile()


def _temporary(program: jax.stages.Compiled) -> int | None:
    memory = program.memory_analysis()
    return None if memory is None else memory.temp_size_in_bytes
