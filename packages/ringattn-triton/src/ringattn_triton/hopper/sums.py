# SPDX-License-Identifier: Apache-2.0
"""Sums that a consumer on Hopper keeps in registers: accumulators of products, and sums of rows.

Accumulators are a tuple of one or two `[64, width]` (the table in `head_tiles` has their widths). In the forward pass
they sum weighted values; in the backward pass of heads of more than 128, dk or dv (`backward_wide_products`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .hardware_barriers import phase_of, wait_until_full
from .head_tiles import dims_of, in_two_pieces, product_count, product_dims
from .layouts import CONSUMER_ROWS, left_layout, product_layout, quad_layout, row_layout
from .workarounds import opaque_zero, product_where_needed


@gluon.constexpr_function
def accumulators(dim):
    """The number of accumulators for a head of `dim` dimensions, one or two: more would be too narrow to be fast."""
    return 2 if in_two_pieces(dim) or product_count(dim) == 2 else 1


@gluon.constexpr_function
def accumulator(dim, number):
    """The first dimension in accumulator `number` of a head of `dim` dimensions, and its width, with padding."""
    first, width = product_dims(dim, number)
    if in_two_pieces(dim) and number == 1:
        return first, max(32, 1 << (dim - 128 - 1).bit_length())
    return first, width if accumulators(dim) == 2 else 1 << (dim - 1).bit_length()


@gluon.jit
def no_sums(DIM: gl.constexpr):
    """New accumulators of zeros for a head of `DIM` dimensions."""
    sums = ()
    for number in gl.static_range(accumulators(DIM)):
        sums += (_zeros(accumulator(DIM, number)[1]),)
    return sums


@gluon.jit
def _zeros(WIDTH: gl.constexpr):
    return gl.zeros([CONSUMER_ROWS, WIDTH], gl.float32, product_layout(WIDTH))


@gluon.jit
def add_values(sums, weights, shared, stage, step, there, DIM: gl.constexpr, PLAN: gl.constexpr):
    """Begins to add the weighted values of step `step` of the program to the accumulators, one product for each.

    If such a step is `there`, it first waits until the values have arrived in `stage`. Otherwise it multiplies what
    the stage holds, and the caller drops the result. Of two pieces, the second has only one
    stage. Its product comes first, so that the stage is empty sooner.
    """
    if in_two_pieces(DIM):
        if there:
            wait_until_full(shared.rest_full, step, 1)
        rest = _add_to(sums[1], weights, (shared.v[1].index(opaque_zero()),), 0)
        if there:
            mbarrier.wait(shared.v_full.index(stage), phase_of(step, PLAN.kv_stages))
        return _add_to(sums[0], weights, (shared.v[0].index(stage),), 0), rest
    else:
        if there:
            mbarrier.wait(shared.v_full.index(stage), phase_of(step, PLAN.kv_stages))
        return add_product(sums, weights, (shared.v[0].index(stage),), DIM)


@gluon.jit
def add_product(sums, left, right, DIM: gl.constexpr):
    """Begins to add `left right` to the accumulators.

    `left` is in registers, packed (`pack`) or not; `right` is a tile in shared memory.
    """
    found = ()
    for number in gl.static_range(accumulators(DIM)):
        found += (_add_to(sums[number], left, right, accumulator(DIM, number)[0]),)
    return found


@gluon.jit
def _add_to(sums, left, right, FIRST: gl.constexpr):
    """Begins to add to one accumulator the product of `left` and the dimensions of `right` from `FIRST` on."""
    right = dims_of(right, FIRST, sums.shape[1])
    if left.dtype == gl.int32:
        left = unpack(left, right.dtype)
    return warpgroup_mma(gl.convert_layout(left, left_layout(sums.shape[1])), right, sums, is_async=True)


@gluon.jit
def wait_for_sums(sums):
    """Waits for all products in flight, and returns the accumulators with their results."""
    found = ()
    for number in gl.static_range(len(sums)):
        found += (warpgroup_mma_wait(0, deps=[sums[number]]),)
    return found


@gluon.jit
def rescale(sums, factor):
    """Multiplies each row of the accumulators by its factor. A warp whose factors are all 1 does not multiply."""
    found = ()
    for number in gl.static_range(len(sums)):
        found += (product_where_needed(sums[number], as_column(factor, sums[number].shape[1])),)
    return found


@gluon.jit
def as_column(rows, WIDTH: gl.constexpr):
    """Converts one number for each row to a column that can be multiplied with an accumulator of `WIDTH` dimensions."""
    return gl.convert_layout(rows, row_layout(WIDTH))[:, None]


@gluon.jit
def quad_sums(p):
    """Sums each row of `p` in four parts, `[64, 4]`: one for each of the four threads that hold the row."""
    own = gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)
    return gl.convert_layout(own, quad_layout(4))


@gluon.jit
def as_quads(total):
    """Turns each row's sum into four parts, as `quad_sums` returns them: the first is the sum, the others 0."""
    first = gl.arange(0, 4, gl.SliceLayout(0, quad_layout(4)))[None, :] == 0
    return gl.where(first, gl.convert_layout(total, gl.SliceLayout(1, quad_layout(4)))[:, None], 0.0)


@gluon.jit
def pack(p, TYPE: gl.constexpr):
    """Rounds the weights `p` to `TYPE` and packs two neighbours of a row in one 32-bit word: `[64, columns / 2]`.

    Carried from step to step as single numbers, the weights would cost an instruction each to unpack and pack them
    again.
    """
    low, high = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    ROUND: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if gl.bfloat16 == TYPE else "cvt.rn.f16x2.f32 $0, $2, $1;"
    words = gl.inline_asm_elementwise(ROUND, "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)
    return gl.convert_layout(words, quad_layout(p.shape[1] // 2))


@gluon.jit
def unpack(weights, TYPE: gl.constexpr):
    """The inverse of `pack`."""
    low = weights.to(gl.int16).to(TYPE, bitcast=True)
    high = (weights >> 16).to(gl.int16).to(TYPE, bitcast=True)
    return gl.reshape(gl.join(low, high), [weights.shape[0], weights.shape[1] * 2])
