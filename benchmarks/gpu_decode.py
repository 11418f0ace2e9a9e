# SPDX-License-Identifier: Apache-2.0
"""How close decoding of one token comes to the memory bandwidth: its time beside that of a sum over the same cache."""

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from interleaved import ON_A_DEVICE, Claim, medians, report
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ringattn_core import decode_attention

STEPS = 32
"""Decoding steps of one measured program, so that the host's share of a step does not count."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default=None)
    parser.add_argument("--tokens", type=int, nargs="*", default=[32768, 131072], help="that the cache has")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    mesh = Mesh(np.array(jax.devices()), ("sp",))
    split = NamedSharding(mesh, PartitionSpec(None, "sp"))
    claims, raw = [], {}
    for tokens in arguments.tokens:
        cache_shape = (arguments.batch, tokens, arguments.key_heads, arguments.head_size)
        query_shape = (arguments.batch, 1, arguments.heads, arguments.head_size)
        make = jax.jit(lambda key, shape=cache_shape: jax.random.normal(key, shape, jnp.bfloat16), out_shardings=split)
        key, value = (make(jax.random.key(seed)) for seed in (1, 2))
        query = jax.random.normal(jax.random.key(0), query_shape, jnp.bfloat16)

        def decode(query: jax.Array, key: jax.Array, value: jax.Array, tokens: int = tokens) -> jax.Array:
            options = {"mesh": mesh, "axis_name": "sp", "backend": arguments.backend}
            return decode_attention(query, key, value, tokens, **options)

        def read(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            # Depends on the step before, so that XLA cannot sum once for all steps.
            first = query[0, 0, 0, 0]
            of_key, of_value = (jnp.sum(jnp.maximum(x, first), dtype=jnp.float32) for x in (key, value))
            return query + (0 * (of_key + of_value)).astype(query.dtype)

        times = medians(
            {name: _steps(step, query, key, value) for name, step in (("decode", decode), ("sum", read))},
            arguments.rounds,
            ON_A_DEVICE if jax.default_backend() != "cpu" else 0.0,
        )
        seconds = {name: taken / STEPS for name, taken in times.items()}
        moved = (key.nbytes + value.nbytes) / mesh.size
        raw |= {f"{tokens} tokens: {name}, us": 1e6 * taken for name, taken in seconds.items()}
        raw[f"{tokens} tokens: decode reads, GB/s of a device"] = moved / seconds["decode"] / 1e9
        share = seconds["sum"] / seconds["decode"]
        claims.append(Claim(f"{tokens} tokens: the rate of a sum over the cache", share, ">=", 0.7, "x"))
    report("gpu_decode.py", claims, raw)


def _steps(step: Callable[..., jax.Array], *arrays: jax.Array) -> Callable[[], jax.Array]:
    """Compiles a program of `STEPS` steps. Each step reads the result of the step before."""

    def run(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, STEPS, lambda _, query: step(query, key, value), query)

    program = jax.jit(run).lower(*arrays).compile()
    return lambda: program(*arrays)


if __name__ == "__main__":
    main()
