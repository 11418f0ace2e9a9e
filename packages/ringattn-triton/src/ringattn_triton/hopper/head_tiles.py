# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false
"""How heads of sizes that are multiples of 8 are stored in shared memory: TMA pads them with zeros to a power of two.

Global memory has no padding. A descriptor has an axis for heads, so that TMA sees where a head ends.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma

fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""The function that fetches a tile, by its name in Triton 3.9 or the name before."""
store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
"""The function that writes a tile to memory, by its name in Triton 3.9 or the name before."""


@gluon.constexpr_function
def product_count(dim):
    """Into how many pieces `dim` dimensions in shared memory are cut: powers of two from 16 on, the largest first.

    `product_of_heads` computes one product for each piece.
    """
    return (-(-dim // 16)).bit_count()


@gluon.constexpr_function
def piece(dim, number):
    """The first dimension and the width of a piece."""
    first, rest = 0, -(-dim // 16) * 16
    for _ in range(number):
        width = 1 << (rest.bit_length() - 1)
        first, rest = first + width, rest - width
    return first, 1 << (rest.bit_length() - 1)


@gluon.jit
def tiles_of_heads(
    base, HEADS: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr, HEAD: gl.constexpr, TOKEN: gl.constexpr,
    TILE: gl.constexpr, PADDED: gl.constexpr,
):  # fmt: skip
    """A descriptor of `[heads, tokens, dims]` with strides `HEAD` and `TOKEN`; a tile is `[1, TILE, PADDED]`."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, TILE, PADDED], base.dtype.element_ty)
    return tma.make_tensor_descriptor(base, [HEADS, ROWS, DIM], [HEAD, TOKEN, 1], [1, TILE, PADDED], LAYOUT)


@gluon.jit
def product_of_heads(left, right, nought, DIM: gl.constexpr):
    """Begins `left right^T` over `DIM` dimensions of heads in shared memory, as one product for each piece."""
    product = nought
    for number in gl.static_range(product_count(DIM)):
        product = _product_of_piece(left, right, product, piece(DIM, number)[0], piece(DIM, number)[1])
    return product


@gluon.jit
def _product_of_piece(left, right, product, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    if left.shape[1] != WIDTH:
        left = left.slice(FIRST, WIDTH, dim=1)
        right = right.slice(FIRST, WIDTH, dim=1)
    return warpgroup_mma(left, right.permute((1, 0)), product, use_acc=FIRST > 0, is_async=True)
