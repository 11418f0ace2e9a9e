# SPDX-License-Identifier: Apache-2.0
"""Makes the query heads of a key head rows of one head where queries choose blocks, so that a tile has few queries.

A tile visits every block that one of its queries has chosen. A tile of 128 queries of one head visits most blocks. With
16 heads in a group, the same 128 rows are 8 queries in all of these heads, which choose fewer blocks. Row `i` is query
`i // group`, and all rows of a query share its row of `bits`. Reordering copies queries, outputs and gradients, which
costs little beside the tiles that are skipped.
"""

import dataclasses
from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32
from ringattn_core import BwdParams, FwdParams
from ringattn_core.contract.protocol import Block, Gradients, Partial

GROUPS: Final = (8, 16, 32, 64)
"""The numbers of query heads of a key head that become rows. They divide the rows of every tile."""


def grouped(block: Block) -> bool:
    """Whether query heads become rows: queries choose blocks, no option but `selected` depends on the head, and the
    caller sets no tile sizes.
    """
    ranges = any(x is not None and x.shape[1] > 1 for x in (block.first, block.last))
    by_head = ranges or block.bits_of_head is not None or block.slopes is not None or bool(block.rule.dropout_prob)
    chosen = block.bits is not None and block.grain > 1 and block.bits.shape[1] <= block.kv_heads
    fixed = block.rule.fwd_params != FwdParams() or block.rule.bwd_params != BwdParams()
    return chosen and block.group in GROUPS and block.bias is None and not by_head and not fixed


def as_rows(block: Block) -> Block:
    """The block with the query heads of each key head as rows of one head. Its `bits` keep a row for each query."""
    assert block.bits is not None
    others = dataclasses.replace(block, bits=None).map_queries(lambda x, axis: jnp.repeat(x, block.group, axis))
    heads = block.head_index[: block.kv_heads]
    return dataclasses.replace(others, q=rows(block.q, block.group), bits=block.bits, head_index=heads, out=None)


def rows(x: Float[Array, "B T N H"], group: int) -> Float[Array, "B rows K H"]:
    batch, length, heads, size = x.shape
    return x.reshape(batch, length, heads // group, group, size).swapaxes(2, 3).reshape(batch, length * group, -1, size)


def heads(x: Float[Array, "B rows K H"], group: int) -> Float[Array, "B T N H"]:
    """The inverse of `rows`."""
    batch, length, kv_heads, size = x.shape
    split = x.reshape(batch, length // group, group, kv_heads, size).swapaxes(2, 3)
    return split.reshape(batch, length // group, -1, size)


def numbers_of_rows(x: Float32[Array, "B N T"], group: int) -> Float32[Array, "B K rows"]:
    batch, heads, length = x.shape
    return x.reshape(batch, heads // group, group, length).swapaxes(2, 3).reshape(batch, -1, length * group)


def numbers_of_heads(x: Float32[Array, "B K rows"], group: int) -> Float32[Array, "B N T"]:
    """The inverse of `numbers_of_rows`."""
    batch, kv_heads, length = x.shape
    return x.reshape(batch, kv_heads, -1, group).swapaxes(2, 3).reshape(batch, -1, length // group)


def partial_of_rows(partial: Partial | None, group: int) -> Partial | None:
    return None if partial is None else _map(partial, rows, numbers_of_rows, group)


def partial_of_heads(partial: Partial, group: int) -> Partial:
    """The inverse of `partial_of_rows`."""
    return _map(partial, heads, numbers_of_heads, group)


def _map(
    partial: Partial,
    of_vectors: Callable[[jax.Array, int], jax.Array],
    of_numbers: Callable[[jax.Array, int], jax.Array],
    group: int,
) -> Partial:
    """Applies `of_vectors` to the output of `partial`, and `of_numbers` to its other arrays."""
    out, largest = partial.out, partial.max_logits
    return Partial(
        None if out is None else of_vectors(out, group),
        of_numbers(partial.lse, group),
        None if largest is None else of_numbers(largest, group),
    )


def gradients_of_heads(gradients: Gradients, group: int) -> Gradients:
    return dataclasses.replace(gradients, dq=heads(gradients.dq, group))


def query_of_each_row(block: Block) -> tuple[Block, int]:
    """The block with one query for each row of `bits`, for lists of tiles; and how many rows of `block` share one."""
    share = 1 if block.bits is None else block.q_length // block.bits.shape[2]
    if share > 1:
        block = block.map_queries(lambda x, axis: jax.lax.slice_in_dim(x, 0, None, share, axis))
    return block, share
