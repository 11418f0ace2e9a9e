# SPDX-License-Identifier: Apache-2.0
"""One process of a ring over several: `test_many_processes.py` starts it, or computes the same in its own process.

    python -m ringattn_testing.ring_process compute PORT PROCESSES PROCESS OUTPUT
    python -m ringattn_testing.ring_process wait PORT PROCESSES PROCESS HEARTBEAT

`compute` saves the shards of this process to the file OUTPUT. `wait` computes one ring, writes "ready" to stderr, and
waits without an end; HEARTBEAT is the timeout of JAX's heartbeats in seconds.
"""

import faulthandler
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ringattn_core import decode_attention, ring_attention, ring_mesh, to_layout

DEVICES_EACH, RING = 2, 4
# A process ends itself after this many seconds, so that no child outlives the tests, even if it waits for others.
LONGEST_LIFE = 240
BATCH, TOKENS, HEADS, KEY_HEADS, SIZE = 2, 32, 4, 2, 8


def drawn() -> dict[str, np.ndarray]:
    """The whole arrays, in natural order: the same in every process."""
    draw = np.random.default_rng(0)
    heads = {"query": HEADS, "key": KEY_HEADS, "value": KEY_HEADS, "dout": HEADS}
    arrays = {name: draw.standard_normal((BATCH, TOKENS, n, SIZE), np.float32) for name, n in heads.items()}
    return arrays | {"segments": (np.arange(TOKENS) // 11 * np.ones((BATCH, 1))).astype(np.int32)}


def placed(x: np.ndarray, layout: str, sharding: NamedSharding) -> jax.Array:
    """A global array in layout order. Each process makes only the tokens of its own devices."""
    order = to_layout(np.arange(TOKENS), layout, RING, axis=0)

    def of_device(index: tuple[slice, ...]) -> np.ndarray:
        rows, tokens, *rest = index
        return x[(rows, order[tokens], *rest)]

    return jax.make_array_from_callback(x.shape, sharding, of_device)


def computed(devices: Sequence[Any]) -> dict[str, jax.Array]:
    """Results and gradients of rings of 4 over these devices; the other mesh axis splits the batch."""
    sizes = {"data": len(devices) // RING, "sp": RING}
    mesh = ring_mesh(devices, axis_sizes=sizes)
    split = NamedSharding(mesh, P("data", "sp"))
    arrays = drawn()
    found = {}

    def gradients(layout: str, options: dict[str, Any], over: Any, ids: bool) -> tuple[jax.Array, ...]:
        local = {name: placed(x, layout, NamedSharding(over, P("data", "sp"))) for name, x in arrays.items()}

        @jax.jit
        def step(local: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
            def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
                segments = {"q_segment_ids": local["segments"]} if ids else {}
                return ring_attention(query, key, value, layout=layout, axis_name="sp", **options, **segments)

            out, pull = jax.vjp(attend, local["query"], local["key"], local["value"])
            return out, *pull(local["dout"])

        return step(local)

    documents = gradients("zigzag", {"causal": True, "mesh": mesh}, mesh, ids=True)
    found |= {f"documents {name}": x for name, x in zip(("out", "dq", "dk", "dv"), documents, strict=True)}
    explicit = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
        window = gradients("contiguous", {"causal": True, "sliding_window": (9, 0)}, explicit, ids=False)
    found |= {f"window {name}": x for name, x in zip(("out", "dq", "dk", "dv"), window, strict=True)}

    for layout in ("zigzag", "striped"):
        # Processes that read whole runs of a sequence place them in natural order; to_layout sends them to their ranks.
        natural = placed(arrays["key"], "contiguous", split)
        found[f"moved {layout}"] = to_layout(natural, layout, RING)
        found[f"placed {layout}"] = placed(arrays["key"], layout, split)
    cache = {name: placed(arrays[name], "striped", split) for name in ("key", "value")}
    query = jax.device_put(arrays["query"][:, :1], NamedSharding(mesh, P("data")))
    lengths = jax.device_put(jnp.array([TOKENS, 5], jnp.int32), NamedSharding(mesh, P("data")))
    found["decoded"] = decode_attention(
        query, cache["key"], cache["value"], lengths, mesh=mesh, axis_name="sp", layout="striped"
    )
    return found


def shards(results: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """The shards that this process holds, by the name of the array and the place of the shard in it."""
    found = {}
    for name, x in results.items():
        for shard in x.addressable_shards:
            starts = [part.start or 0 for part in shard.index]
            found[f"{name} from {starts}"] = np.asarray(shard.data)
    return found


def main(job: str, port: str, processes: str, process: str, last: str) -> None:
    faulthandler.dump_traceback_later(LONGEST_LIFE, exit=True)
    jax.config.update("jax_num_cpu_devices", DEVICES_EACH)
    heartbeat = {"heartbeat_timeout_seconds": int(last)} if job == "wait" else {}
    jax.distributed.initialize(
        f"127.0.0.1:{port}", int(processes), int(process), initialization_timeout=120, shutdown_timeout_seconds=60,
        **heartbeat,
    )  # fmt: skip
    assert len(jax.devices()) == DEVICES_EACH * int(processes)
    if job == "compute":
        np.savez(last, **shards(computed(jax.devices())))
        return
    process_allgather(np.zeros(1))
    print("ready", file=sys.stderr, flush=True)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
