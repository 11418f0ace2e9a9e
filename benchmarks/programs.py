# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks compile, and what XLA says of it."""

from collections.abc import Callable
from typing import Any

import jax
from ringattn_core import ring_attention

Attention = Callable[..., Any]
"""Of query, key, value, and of sinks and bias where those are not `None`."""


def ours(**options: Any) -> Attention:
    """`ring_attention` with these options, of arrays alone."""
    return lambda *arrays: ring_attention(*arrays, **options)


def with_gradients(attend: Attention) -> Callable[..., tuple[Any, ...]]:
    """The output and the gradient of each input, from the inputs and, last, the cotangent of the output."""

    def step(*arrays: Any) -> tuple[Any, ...]:
        out, pullback = jax.vjp(attend, *arrays[:-1])
        return out, *pullback(arrays[-1])

    return step


def temporary_bytes(program: jax.stages.Compiled) -> int:
    """The temporary memory of one device, as XLA planned it."""
    memory = program.memory_analysis()
    assert memory is not None, "XLA tells the memory of every program that it compiles for a CPU"
    return memory.temp_size_in_bytes
