# SPDX-License-Identifier: Apache-2.0
"""What a ring of 8 adds to one device with one shard: temporary memory, and rounding error in bfloat16."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from interleaved import Attention, Claim, ours, report, temporary_bytes, with_gradients
from jax.sharding import Mesh, NamedSharding, PartitionSpec

RING = 8
MIB = 2**20
NAMES = ("out", "dq", "dk", "dv")


def attention(mesh: Mesh | None) -> Attention:
    return ours(causal=True) if mesh is None else ours(causal=True, mesh=mesh, axis_name="sp")


def temporary(mesh: Mesh | None, tokens: int, heads: int, head_size: int, dtype: str) -> tuple[float, float]:
    """The temporary bytes of one device, forward and with gradients. Compiles the programs only."""
    place = None if mesh is None else NamedSharding(mesh, PartitionSpec(None, "sp"))
    array = jax.ShapeDtypeStruct((1, tokens, heads, head_size), dtype, sharding=place)
    forward = jax.jit(attention(mesh)).lower(array, array, array).compile()
    both = jax.jit(with_gradients(attention(mesh))).lower(array, array, array, array).compile()
    return temporary_bytes(forward), temporary_bytes(both)


def rounding(mesh: Mesh, tokens: int, heads: int, head_size: int) -> dict[str, tuple[float, float]]:
    """The RMS error in bfloat16 of each result, on the ring and on one device, against float32 on the same inputs."""
    shape = (1, tokens, heads, head_size)
    seeds = jax.random.split(jax.random.key(1), 4)
    inputs = tuple(jax.random.normal(seed, shape).astype(jnp.bfloat16) for seed in seeds)
    exact = jax.jit(with_gradients(attention(None)))(*(x.astype(jnp.float32) for x in inputs))
    one = jax.jit(with_gradients(attention(None)))(*inputs)
    split = NamedSharding(mesh, PartitionSpec(None, "sp"))
    ring = jax.jit(with_gradients(attention(mesh)))(*(jax.device_put(x, split) for x in inputs))

    def error(got: jax.Array, want: jax.Array) -> float:
        return float(np.sqrt(np.mean((np.asarray(got, np.float64) - np.asarray(want, np.float64)) ** 2)))

    results = zip(NAMES, ring, one, exact, strict=True)
    return {name: (error(on_ring, want), error(alone, want)) for name, on_ring, alone, want in results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounding-tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=64)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", RING)
    mesh = Mesh(np.array(jax.devices()), ("sp",))
    size = (arguments.heads, arguments.head_size)
    shard = arguments.tokens // RING

    claims, raw = [], {}
    for dtype in ("float32", "bfloat16"):
        packed = 2 * shard * arguments.heads * arguments.head_size * jnp.dtype(dtype).itemsize
        behind = packed + 2 * shard * arguments.heads * arguments.head_size * 4
        one, ring = temporary(None, shard, *size, dtype), temporary(mesh, arguments.tokens, *size, dtype)
        raw |= {
            f"{dtype}: packed K,V of a shard, MiB": packed / MIB,
            f"{dtype}: K,V of a shard and their float32 gradients, MiB": behind / MIB,
            f"{dtype}: one device, {shard} tokens, forward, MiB": one[0] / MIB,
            f"{dtype}: ring of {RING}, {arguments.tokens} tokens, forward, MiB": ring[0] / MIB,
            f"{dtype}: one device, {shard} tokens, forward+backward, MiB": one[1] / MIB,
            f"{dtype}: ring of {RING}, {arguments.tokens} tokens, forward+backward, MiB": ring[1] / MIB,
        }
        claims += [
            Claim(f"{dtype} forward: what the ring adds", (ring[0] - one[0]) / packed, "<=", 2.5, "K,V"),
            Claim(
                f"{dtype} forward+backward: what the ring adds",
                (ring[1] - one[1]) / behind,
                "<=",
                2.5,
                "K,V,dK,dV",
            ),
        ]
    for name, (on_ring, alone) in rounding(mesh, arguments.rounding_tokens, *size).items():
        raw |= {f"bfloat16 RMS error of {name}, ring of {RING}": on_ring, f"bfloat16 RMS error of {name}, one": alone}
        claims.append(Claim(f"bfloat16 RMS error of {name}, ring over one", on_ring / alone, "<=", 1.1, "x"))
    report("ring_memory.py", claims, raw)


if __name__ == "__main__":
    main()
