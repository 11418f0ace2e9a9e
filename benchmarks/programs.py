# SPDX-License-Identifier: Apache-2.0
"""The programs that the benchmarks compile, and the temporary memory that XLA plans for them."""

from collections.abc import Callable
from typing import Any

import jax
from ringattn_core import ring_attention

Attention = Callable[..., Any]
"""A function of query, key and value, and optionally of sinks and bias."""


def ours(**options: Any) -> Attention:
    """`ring_attention` with these options, as a function of its arrays."""
    return lambda *arrays: ring_attention(*arrays, **options)


def with_gradients(attend: Attention) -> Callable[..., tuple[Any, ...]]:
    """A function of the inputs and the cotangent of the output, which returns the output and each input's gradient.

    As in training, the cotangent waits for the output: otherwise XLA could begin the first send of the
    backward pass before the forward pass.
    """

    def step(*arrays: Any) -> tuple[Any, ...]:
        out, pullback = jax.vjp(attend, *arrays[:-1])
        dout, _ = jax.lax.optimization_barrier((arrays[-1], out))
        return out, *pullback(dout)

    return step


def temporary_bytes(program: jax.stages.Compiled) -> int:
    """The temporary memory of one device, as XLA plans it."""
    memory = program.memory_analysis()
    assert memory is not None, "XLA tells the memory of every program that it compiles for a CPU"
    return memory.temp_size_in_bytes
