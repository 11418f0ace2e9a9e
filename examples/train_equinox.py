# SPDX-License-Identifier: Apache-2.0
"""How an Equinox model trains over a ring: `RingMultiheadAttention` takes the place of Equinox's own."""

from typing import Any

import equinox as eqx
import jax
from ringattn_adapters.equinox import RingMultiheadAttention
from training import BLOCKS, HEADS, LENGTH, VOCABULARY, WIDTH, Batch, Loss, cross_entropy, main


def each(function: Any, x: jax.Array) -> jax.Array:
    """Applies a function of one token to all tokens of all examples."""
    return jax.vmap(jax.vmap(function))(x)


class Block(eqx.Module):
    """Attention and a perceptron, each on a normalised residual."""

    norms: list[eqx.nn.LayerNorm]
    attention: RingMultiheadAttention
    perceptron: eqx.nn.MLP

    def __init__(self, ring: dict[str, Any], key: jax.Array):
        one, two = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(2)]
        self.attention = RingMultiheadAttention(HEADS, WIDTH, num_key_heads=2, key=one, causal=True, **ring)
        self.perceptron = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=two)

    def __call__(self, x: jax.Array) -> jax.Array:
        normal = each(self.norms[0], x)
        x = x + self.attention(normal, normal, normal)
        return x + each(self.perceptron, each(self.norms[1], x))


class Transformer(eqx.Module):
    """A small causal language model."""

    token: eqx.nn.Embedding
    position: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    logits: eqx.nn.Linear

    def __init__(self, ring: dict[str, Any], key: jax.Array):
        keys = jax.random.split(key, 3 + BLOCKS)
        self.token = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.position = eqx.nn.Embedding(LENGTH, WIDTH, key=keys[1])
        self.blocks = [Block(ring, key) for key in keys[3:]]
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.logits = eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[2])

    def __call__(self, batch: Batch) -> jax.Array:
        x = each(self.token, batch.tokens) + each(self.position, batch.positions)
        for block in self.blocks:
            x = block(x)
        return each(self.logits, each(self.norm, x))


def model(ring: dict[str, Any]) -> tuple[Any, Loss]:
    parameters, structure = eqx.partition(Transformer(ring, jax.random.key(0)), eqx.is_inexact_array)

    def loss(parameters: Any, batch: Batch) -> jax.Array:
        return cross_entropy(eqx.combine(parameters, structure)(batch), batch.targets)

    return parameters, loss


if __name__ == "__main__":
    main("Equinox", model)
