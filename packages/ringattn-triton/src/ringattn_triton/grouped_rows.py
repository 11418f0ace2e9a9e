# SPDX-License-Identifier: Apache-2.0
"""Makes the query heads of a key head rows of one head where queries choose blocks, so that a tile has few queries.

A tile visits every block that one of its queries has chosen. A tile of 128 queries of one head visits most blocks. With
16 heads in a group, the same 128 rows are 8 queries in all of these heads, which choose fewer blocks. All rows of a
query share its row of `bits`. Reordering copies queries, outputs and gradients (`contract.heads_as_rows` of core),
which costs little beside the tiles that are skipped.
"""

import dataclasses
from typing import Final

import jax
from ringattn_core import BwdParams, FwdParams
from ringattn_core.contract import heads_as_rows
from ringattn_core.contract.protocol import Block

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
    others = heads_as_rows.as_rows(dataclasses.replace(block, bits=None), block.group)
    return dataclasses.replace(others, bits=block.bits)


def rows_of_a_query(block: Block) -> int:
    """How many rows of the block share a row of `bits`: as many as a group has heads after `as_rows`, else 1."""
    return 1 if block.bits is None else block.q_length // block.bits.shape[2]


def query_of_each_row(block: Block) -> tuple[Block, int]:
    """The block with one query for each row of `bits`, for lists of tiles; and how many rows of `block` share one."""
    share = rows_of_a_query(block)
    if share > 1:
        block = block.map_queries(lambda x, axis: jax.lax.slice_in_dim(x, 0, None, share, axis))
    return block, share
