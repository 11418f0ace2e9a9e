# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks compile, and what XLA says of it."""

from collections.abc import Callable
from typing import Any

import jax
from ringattn_core import ring_attention

Attention = Callable[[jax.Array, jax.Array, jax.Array], Any]


def ours(**options: Any) -> Attention:
    """`ring_attention` with these options, of query, key and value alone."""
    return lambda query, key, value: ring_attention(query, key, value, **options)


def with_gradients(attend: Attention) -> Callable[..., tuple[Any, ...]]:
    """The output, dq, dk and dv, from query, key, value and the cotangent of the output."""

    def step(query: jax.Array, key: jax.Array, value: jax.Array, dout: jax.Array) -> tuple[Any, ...]:
        out, pullback = jax.vjp(attend, query, key, value)
        return out, *pullback(dout)

    return step


def temporary_bytes(program: jax.stages.Compiled) -> int:
    """The temporary memory of one device, as XLA planned it."""
    memory = program.memory_analysis()
    assert memory is not None, "XLA tells the memory of every program that it compiles for a CPU"
    return memory.temp_size_in_bytes
