# SPDX-License-Identifier: Apache-2.0
"""How a model that calls `jax.nn.dot_product_attention` trains over a ring: one import and the ring's options."""

from typing import Any

import jax
import jax.numpy as jnp
from ringattn_adapters.jax_nn import dot_product_attention
from training import BLOCKS, HEADS, LENGTH, VOCABULARY, WIDTH, Batch, Loss, cross_entropy, main

KEY_HEADS = 2


def parameters() -> dict[str, Any]:
    """Embeddings and the matrices of each block."""
    size = WIDTH // HEADS
    shapes = {
        "query": (WIDTH, HEADS, size), "key": (WIDTH, KEY_HEADS, size), "value": (WIDTH, KEY_HEADS, size),
        "out": (HEADS, size, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH),
    }  # fmt: skip
    keys = iter(jax.random.split(jax.random.key(0), 3 + BLOCKS * len(shapes)))

    def normal(shape: tuple[int, ...], inputs: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / inputs**0.5

    def block() -> dict[str, jax.Array]:
        return {name: normal(shape, 4 * WIDTH if name == "down" else WIDTH) for name, shape in shapes.items()}

    return {
        "token": normal((VOCABULARY, WIDTH), 4),
        "position": normal((LENGTH, WIDTH), 4),
        "blocks": [block() for _ in range(BLOCKS)],
        "logits": normal((WIDTH, VOCABULARY), WIDTH),
    }


def norm(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def model(ring: dict[str, Any]) -> tuple[Any, Loss]:
    def loss(parameters: dict[str, Any], batch: Batch) -> jax.Array:
        x = parameters["token"][batch.tokens] + parameters["position"][batch.positions]
        for block in parameters["blocks"]:
            query, key, value = (
                jnp.einsum("btc,cnh->btnh", norm(x), block[name]) for name in ("query", "key", "value")
            )
            seen = dot_product_attention(query, key, value, is_causal=True, **ring)
            x = x + jnp.einsum("btnh,nhc->btc", seen, block["out"])
            x = x + jax.nn.gelu(norm(x) @ block["up"]) @ block["down"]
        return cross_entropy(norm(x) @ parameters["logits"], batch.targets)

    return parameters(), loss


if __name__ == "__main__":
    main("jax.nn", model)
