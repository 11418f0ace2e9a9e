# SPDX-License-Identifier: Apache-2.0
"""Makes the query heads of a key head rows of one head, so that a kernel reads each key once for all of them.

Row `i` is query `i // group` in head `i % group` of its group. Reordering copies queries, outputs and gradients.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from .protocol import Block, Partial


def as_rows(block: Block, group: int) -> Block:
    """The block with the `group` query heads of each key head as rows of one head."""
    q, heads = rows(block.q, group), block.head_index[: block.q.shape[2] // group]
    return dataclasses.replace(block.map_queries(lambda x, axis: jnp.repeat(x, group, axis)), q=q, head_index=heads)


def rows(x: Float[Array, "B T N H"], group: int) -> Float[Array, "B rows K H"]:
    """Queries, or an array like them, with the heads of a group as rows."""
    batch, length, heads, size = x.shape
    return x.reshape(batch, length, heads // group, group, size).swapaxes(2, 3).reshape(batch, length * group, -1, size)


def heads(x: Float[Array, "B rows K H"], group: int) -> Float[Array, "B T N H"]:
    """The inverse of `rows`."""
    batch, length, kv_heads, size = x.shape
    split = x.reshape(batch, length // group, group, kv_heads, size).swapaxes(2, 3)
    return split.reshape(batch, length // group, -1, size)


def numbers_of_rows(x: Float32[Array, "B N T"], group: int) -> Float32[Array, "B K rows"]:
    """A number for each query and head, such as `lse`, as a number for each row."""
    batch, heads, length = x.shape
    return x.reshape(batch, heads // group, group, length).swapaxes(2, 3).reshape(batch, -1, length * group)


def numbers_of_heads(x: Float32[Array, "B K rows"], group: int) -> Float32[Array, "B N T"]:
    """The inverse of `numbers_of_rows`."""
    batch, kv_heads, length = x.shape
    return x.reshape(batch, kv_heads, -1, group).swapaxes(2, 3).reshape(batch, -1, length // group)


def partial_of_rows(partial: Partial, group: int) -> Partial:
    """The partial result of a block, for its `as_rows`."""
    return _mapped(partial, lambda x: rows(x, group), lambda x: numbers_of_rows(x, group))


def partial_of_heads(partial: Partial, group: int) -> Partial:
    """The inverse of `partial_of_rows`."""
    return _mapped(partial, lambda x: heads(x, group), lambda x: numbers_of_heads(x, group))


def _mapped(partial: Partial, of_vectors: Any, of_numbers: Any) -> Partial:
    """Applies `of_vectors` to the output of `partial`, and `of_numbers` to its other arrays."""
    out, largest = partial.out, partial.max_logits
    return Partial(
        out if out is None else of_vectors(out),
        of_numbers(partial.lse),
        largest if largest is None else of_numbers(largest),
    )
