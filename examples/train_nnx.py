# SPDX-License-Identifier: Apache-2.0
"""How a Flax NNX model trains over a ring: `attention_fn` is the only line that says so."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from ringattn_adapters.flax import ring_attention_fn
from training import BLOCKS, HEADS, LENGTH, VOCABULARY, WIDTH, Batch, Loss, cross_entropy, main


class Block(nnx.Module):
    """Attention and a perceptron, each on a normalised residual."""

    def __init__(self, attention_fn: Callable[..., jax.Array], rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, attention_fn=attention_fn, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Transformer(nnx.Module):
    """A small causal language model."""

    def __init__(self, attention_fn: Callable[..., jax.Array], rngs: nnx.Rngs):
        self.token = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.position = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(attention_fn, rngs) for _ in range(BLOCKS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.logits = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, batch: Batch) -> jax.Array:
        x = self.token(batch.tokens) + self.position(batch.positions)
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


def model(ring: dict[str, Any]) -> tuple[Any, Loss]:
    structure, parameters = nnx.split(Transformer(ring_attention_fn(causal=True, **ring), nnx.Rngs(0)))

    def loss(parameters: Any, batch: Batch) -> jax.Array:
        return cross_entropy(nnx.merge(structure, parameters)(batch), batch.targets)

    return parameters, loss


if __name__ == "__main__":
    main("Flax NNX", model)
