# SPDX-License-Identifier: Apache-2.0
"""How close decoding of one token comes to the memory bandwidth: the attention of several layers, each with its cache.

Beside it a sum over the same caches, and the share of the memory's rate that its maker names.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from floors import rates
from interleaved import ON_A_DEVICE, Claim, medians, report
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ringattn_core import decode_attention

LONG = 131072
"""From this many tokens on, decoding is to reach most of the memory bandwidth. With fewer, its launches take longer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default=None)
    parser.add_argument("--tokens", type=int, nargs="*", default=[32768, 131072], help="that each cache has")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    mesh = Mesh(np.array(jax.devices()), ("sp",))
    split = NamedSharding(mesh, PartitionSpec(None, "sp"))
    options = {"mesh": mesh, "axis_name": "sp", "backend": arguments.backend}

    def decode(query: jax.Array, lengths: jax.Array, caches: Any) -> jax.Array:
        for key, value in caches:
            query = decode_attention(query, key, value, lengths, **options)
        return query

    def read(query: jax.Array, lengths: jax.Array, caches: Any) -> jax.Array:
        # Depends on the layer before, as the layers of a model do.
        for cache in caches:
            first = query[0, 0, 0, 0]
            of_key, of_value = (jnp.sum(jnp.maximum(x, first), dtype=jnp.float32) for x in cache)
            query += (0 * (of_key + of_value)).astype(query.dtype)
        return query

    claims, raw = [], {}
    for tokens in arguments.tokens:
        cache_shape = (arguments.batch, tokens, arguments.key_heads, arguments.head_size)
        query_shape = (arguments.batch, 1, arguments.heads, arguments.head_size)
        make = jax.jit(lambda key, shape=cache_shape: jax.random.normal(key, shape, jnp.bfloat16), out_shardings=split)
        seeds = jax.random.split(jax.random.key(1), (arguments.layers, 2))
        caches = [tuple(make(seed) for seed in of_layer) for of_layer in seeds]
        query = jax.random.normal(jax.random.key(0), query_shape, jnp.bfloat16)
        lengths = jnp.full(arguments.batch, tokens, jnp.int32)
        given = (query, lengths, caches)
        times = medians(
            {name: _program(step, *given) for name, step in (("decode", decode), ("sum", read))},
            arguments.rounds,
            ON_A_DEVICE if jax.default_backend() != "cpu" else 0.0,
        )
        seconds = {name: taken / arguments.layers for name, taken in times.items()}
        moved = sum(x.nbytes for x in caches[0]) / mesh.size
        raw |= {f"{tokens} tokens: {name}, us a layer": 1e6 * taken for name, taken in seconds.items()}
        raw[f"{tokens} tokens: decode reads, GB/s of a device"] = moved / seconds["decode"] / 1e9
        peak = moved / seconds["decode"] / rates().memory
        raw[f"{tokens} tokens: of the memory bandwidth's peak"] = peak
        if tokens >= LONG:
            claims.append(Claim(f"{tokens} tokens: of the memory bandwidth's peak", peak, ">=", 0.7, "x"))
        share = seconds["sum"] / seconds["decode"]
        claims.append(Claim(f"{tokens} tokens: of the rate of a sum over the caches", share, ">=", 0.7, "x"))
    report("gpu_decode.py", claims, raw)


def _program(step: Callable[..., jax.Array], *arrays: Any) -> Callable[[], jax.Array]:
    program = jax.jit(step).lower(*arrays).compile()
    return lambda: program(*arrays)


if __name__ == "__main__":
    main()
