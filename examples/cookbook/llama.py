# SPDX-License-Identifier: Apache-2.0
"""Attention of Llama 2 and 3: grouped query heads, RoPE and a causal mask."""

import jax
import jax.numpy as jnp
from one_device import WIDTH, compare
from ringattn_core import ring_attention

HEADS, KEY_HEADS, SIZE = 8, 4, 16  # Llama 3 8B: 32, 8, 128
SHAPES = {"query": (WIDTH, HEADS, SIZE), "out": (HEADS, SIZE, WIDTH)}
SHAPES |= {"key": (WIDTH, KEY_HEADS, SIZE), "value": (WIDTH, KEY_HEADS, SIZE)}


def unit(x: jax.Array) -> jax.Array:
    """The RMS norm, without a scale."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def project(weights: dict[str, jax.Array], x: jax.Array, *names: str) -> list[jax.Array]:
    return [jnp.einsum("btc,cnh->btnh", unit(x), weights[name]) for name in names]


def rope(x: jax.Array, positions: jax.Array, base: float = 500_000.0, turning: float = 1.0) -> jax.Array:
    """Rotates this share of the pairs of `[B, T, N, H]` by the positions of its tokens, `[b, T]`, in float32."""
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half) / half) * (jnp.arange(half) < turning * half)
    angles = positions[..., None, None] * frequencies
    cos, sin, first, second = jnp.cos(angles), jnp.sin(angles), x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def layer(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array, **ring) -> jax.Array:
    query, key, value = project(weights, x, "query", "key", "value")
    out = ring_attention(rope(query, positions), rope(key, positions), value, causal=True, **ring)
    return x + jnp.einsum("btnh,nhc->btc", out, weights["out"])


if __name__ == "__main__":
    # `tp` splits the heads. Tokens and their positions are in zigzag order.
    compare(layer, SHAPES, {"dp": 2, "tp": 2, "sp": 2}, layout="zigzag")
