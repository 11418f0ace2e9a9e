# SPDX-License-Identifier: Apache-2.0
"""How exact rows are whose every score is large: by a bias, or by ALiBi with queries far after all keys.

Compares a ring of eight CPU devices in float32 with a softmax in JAX of the same float32 scores. Errors of gradients
are those of query, key and value, relative to the largest element. The table is the one of docs/numerics.md.
"""

import argparse
import os
from typing import Any, Final

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ringattn_core import ring_attention

TOKENS, HEADS, HEAD_SIZE = 64, 2, 16
SLOPES: Final = (1.0, 0.5)
ROWS: Final = {
    "ALiBi, queries 10,000 positions after the keys": {"query_offset": 10_000},
    "ALiBi, 1,000,000 positions after": {"query_offset": 1_000_000},
    "a bias of +10,000": {"bias": 1e4},
    "a bias of +1,000,000": {"bias": 1e6},
}


def dense(q: jax.Array, k: jax.Array, v: jax.Array, added: jax.Array) -> jax.Array:
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * HEAD_SIZE**-0.5 + added
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v, precision="highest")


def call(mesh: Mesh, row: dict[str, Any]) -> tuple[dict[str, Any], jax.Array]:
    """The options of `ring_attention` for a row of the table, and what they add to the scores."""
    if "bias" in row:
        added = jnp.full((1, 1, TOKENS, TOKENS), row["bias"], jnp.float32)
        return {"bias": added, "mesh": mesh, "axis_name": "sp"}, added
    slopes, token = jnp.array(SLOPES), jnp.arange(TOKENS)
    distance = jnp.abs(token[:, None] + row["query_offset"] - token[None]).astype(jnp.float32)
    return {"alibi_slopes": slopes, "mesh": mesh, "axis_name": "sp", **row}, -slopes[None, :, None, None] * distance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="xla")
    backend = parser.parse_args().backend
    mesh = Mesh(jax.devices()[:8], ("sp",))
    seeds = jax.random.split(jax.random.key(0), 4)
    *operands, dout = (jax.random.normal(seed, (1, TOKENS, HEADS, HEAD_SIZE)) for seed in seeds)
    print("| every score of a row | output | gradients |\n|---|---|---|")
    for name, row in ROWS.items():
        options, added = call(mesh, row)
        ours = jax.jit(lambda *x, options=options: ring_attention(*x, backend=backend, **options))
        (got, backward), (want, exact) = (
            jax.vjp(f, *operands) for f in (ours, lambda q, k, v, added=added: dense(q, k, v, added))
        )
        relative = [jnp.abs(a - b).max() / jnp.abs(b).max() for a, b in zip(backward(dout), exact(dout), strict=True)]
        print(f"| {name} | {float(jnp.abs(got - want).max()):.0e} | {float(max(relative)):.0e} |")


if __name__ == "__main__":
    main()
