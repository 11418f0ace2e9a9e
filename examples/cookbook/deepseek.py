# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention of DeepSeek V2 and V3: a latent and one rotated key travel round the ring."""

import jax
import jax.numpy as jnp
from llama import project, rope, unit
from one_device import WIDTH, compare
from ringattn_core import ring_attention

HEADS, SIZE, ROTATED, LATENT = 8, 16, 8, 12  # DeepSeek V3: 128, 128, 64, 512
SHAPES = {"query": (WIDTH, HEADS, SIZE + ROTATED), "down": (WIDTH, LATENT + ROTATED)}
SHAPES |= {"key": (LATENT, HEADS, SIZE), "value": (LATENT, HEADS, SIZE), "out": (HEADS, SIZE, WIDTH)}


def key_and_value(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Keys and values of all heads, of the tokens that are on this rank."""
    key, value = project(weights, x[..., :LATENT], "key", "value")
    # All heads share the rotated part of their keys.
    rotated = jnp.broadcast_to(x[:, :, None, LATENT:], (*key.shape[:3], ROTATED))
    return jnp.concatenate([key, rotated], -1), value


def layer(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array, **ring) -> jax.Array:
    (query,) = project(weights, x, "query")
    query = jnp.concatenate([query[..., :SIZE], rope(query[..., SIZE:], positions, 10_000.0)], -1)
    down = unit(x) @ weights["down"]
    rotated = rope(down[:, :, None, LATENT:], positions, 10_000.0)[:, :, 0]
    # One array: XLA on GPUs sends two at a lower rate.
    latent = jnp.concatenate([down[..., :LATENT], rotated], -1)
    params = {name: weights[name] for name in ("key", "value")}
    out = ring_attention(query, latent, causal=True, expand=key_and_value, expand_params=params, **ring)
    return x + jnp.einsum("btnh,nhc->btc", out, weights["out"])


if __name__ == "__main__":
    compare(layer, SHAPES, {"dp": 2, "sp": 4}, layout="zigzag")
