# SPDX-License-Identifier: Apache-2.0
"""How a Flax Linen model trains over a ring: `attention_fn` is the only line that says so."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from ringattn_adapters.flax import ring_attention_fn
from training import BLOCKS, HEADS, LENGTH, VOCABULARY, WIDTH, Batch, Loss, batches, cross_entropy, main


class Transformer(nn.Module):
    """A small causal language model."""

    attention_fn: Callable[..., jax.Array]

    @nn.compact
    def __call__(self, batch: Batch) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH)(batch.tokens) + nn.Embed(LENGTH, WIDTH)(batch.positions)
        for _ in range(BLOCKS):
            x = x + nn.MultiHeadDotProductAttention(HEADS, attention_fn=self.attention_fn)(nn.LayerNorm()(x))
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def model(ring: dict[str, Any]) -> tuple[Any, Loss]:
    transformer = Transformer(ring_attention_fn(causal=True, **ring))

    def loss(parameters: Any, batch: Batch) -> jax.Array:
        return cross_entropy(transformer.apply(parameters, batch), batch.targets)  # pyright: ignore[reportArgumentType]

    return transformer.init(jax.random.key(0), next(batches())), loss


if __name__ == "__main__":
    main("Flax Linen", model)
