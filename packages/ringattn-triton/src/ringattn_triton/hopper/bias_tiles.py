# SPDX-License-Identifier: Apache-2.0
"""Which biases the kernels for Hopper take, and where the kernels find the tiles of a head's bias."""

from ringattn_core.contract.protocol import Block
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..kernel_inputs import BlockConstants
from .head_tiles import tiles_of_piece


def why_not(block: Block, constants: BlockConstants, kernel: str) -> str | None:
    """Why a Hopper kernel cannot read the bias of `block`, or `None` if it can.

    It takes no bias in a call that also has a soft cap, ALiBi or dropout. For TMA the bias must have the dtype of q,
    one row for each query, and a multiple of eight keys. `kernel` names the kernel in the reason.
    """
    assert block.bias is not None
    if constants.capped or constants.distances or constants.dropout:
        return f"the {kernel} kernel does not combine {constants.options}"
    aligned = constants.bias_query == constants.kv_length and constants.kv_length % 8 == 0
    return None if aligned and block.bias.dtype == block.q.dtype else "the bias cannot be fetched in tiles"


@gluon.jit
def tiles_of_bias(bias, BATCH: gl.constexpr, F: gl.constexpr, Q_TILE: gl.constexpr, KV_TILE: gl.constexpr):
    """A TMA descriptor of the bias as `[groups, queries, keys]`; TMA fills tiles at the end up with zeros.

    A group is the bias of one batch row and head. Batch rows or heads that share a bias share a group.
    """
    GROUPS: gl.constexpr = (BATCH if F.bias_batch else 1) * (F.heads if F.bias_head else 1)
    return tiles_of_piece(bias, GROUPS, F.q_length, F.kv_length, F.q_length * F.kv_length, F.kv_length, Q_TILE, KV_TILE)


@gluon.jit
def bias_group_of(batch, head, F: gl.constexpr):
    """Which group of `tiles_of_bias` is the bias of head `head` in batch row `batch`; 0 without a bias."""
    group = batch * 0
    if F.bias_batch:
        group = batch * (F.heads if F.bias_head else 1)
    if F.bias_head:
        group = group + head
    return group
