# SPDX-License-Identifier: Apache-2.0
"""Refuses heads that are too large for the kernels of a backend."""

from ..errors import InputError
from .protocol import Block


def refuse_large_heads(block: Block, largest: int, backend: str) -> None:
    """Raises if a query or value head of `block` has more than `largest` elements, the most that `backend` takes."""
    for name, size in (("query", block.q.shape[-1]), ("value", block.value_dim)):
        if size > largest:
            raise InputError(
                name,
                f"has heads of size {size}",
                f"The backend {backend!r} takes heads of up to {largest}; the backend 'xla' takes any",
            )
