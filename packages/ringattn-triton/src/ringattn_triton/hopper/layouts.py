# SPDX-License-Identifier: Apache-2.0
"""The layouts of tiles in registers, and of plain arrays in shared memory."""

from typing import Final

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

CONSUMER_ROWS: Final = tl.constexpr(64)
"""The rows of a product of one warpgroup: queries in the forward kernel, keys in the backward kernel."""


@gluon.constexpr_function
def product_layout(columns):
    """A product of one warpgroup: 64 rows by `columns` columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def row_layout(columns):
    """One number for each row of a product with the layout `product_layout(columns)`."""
    return gl.SliceLayout(1, product_layout(columns))


@gluon.constexpr_function
def left_layout(columns):
    """The left operand of a product with the layout `product_layout(columns)`."""
    return gl.DotOperandLayout(operand_index=0, parent=product_layout(columns), k_width=2)


@gluon.constexpr_function
def quad_layout(columns):
    """An array `[64, columns]`: each of the four threads that share a row of a product has every fourth column.

    Packed weights have this layout, and so do partial sums of rows, with four columns.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0], *([0, 1 << bit] for bit in range(2, columns.bit_length() - 1))],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.constexpr_function
def store_layout(columns):
    """The layout in which results in half precision are stored: each thread has eight contiguous bytes of a row.

    The four threads that share a row so write 32 bytes, a sector of memory. A product leaves them four bytes each. The
    exchange for sixteen bytes each would need shared memory.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64], [0, 128]][: columns.bit_length() - 2],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.constexpr_function
def draws_layout(columns):
    """The dropout draws of a tile of scores, `[32, columns / 2]`: each thread has the draws of the scores it holds."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], *([0, 1 << bit] for bit in range(3, columns.bit_length() - 2))],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[32, columns // 2],
    )


@gluon.constexpr_function
def bits_layout(columns):
    """Unpacked mask bits `[4, 16, columns]`, four groups of 16 keys: each thread has the bits of the scores it
    holds."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 8, 0], *([0, 0, 1 << bit] for bit in range(3, columns.bit_length() - 1))],
        lane_bases=[[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[4, 16, columns],
    )


@gluon.constexpr_function
def register_layout():
    """The results `[16, 256]` of `dq_order.in_register_order`."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [2, 0], [4, 0], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]],
        warp_bases=[[0, 128], [1, 0]],
        block_bases=[],
        shape=[16, 256],
    )


@gluon.constexpr_function
def plain_layout():
    """Rows of float32 numbers in shared memory, without swizzling."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.constexpr_function
def single_layout():
    """Numbers in shared memory that are read and written one at a time, or in a row."""
    return gl.SwizzledSharedLayout(1, 1, 1, order=[0])
