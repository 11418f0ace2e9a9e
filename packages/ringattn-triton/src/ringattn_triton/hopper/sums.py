# SPDX-License-Identifier: Apache-2.0
"""Accumulators of a consumer on Hopper: a tuple of one or two `[64, width]`.

In the forward pass they sum weighted values; in the backward pass of heads of more than 128, dk or dv
(`backward_wide_products`). A head whose size is a power of two has one. A head of 96 has two, of 64 and 32; a head of
192, of 128 and 64.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import float32, inline_asm_elementwise

from .forward_softmax import unpack
from .hardware_barriers import phase_of, wait_until_full
from .head_tiles import dims_of, in_two_pieces, left_layout, piece, product_count, product_layout, row_layout
from .plans import CONSUMER_ROWS
from .workarounds import opaque_zero


@gluon.constexpr_function
def accumulators(dim):
    """The number of accumulators for a head of `dim` dimensions, one or two: more would be too narrow to be fast."""
    return 2 if in_two_pieces(dim) or product_count(dim) == 2 else 1


@gluon.constexpr_function
def first_of(dim, number):
    """The first dimension in accumulator `number` of a head of `dim` dimensions."""
    return piece(dim, number)[0]


@gluon.constexpr_function
def width_of(dim, number):
    """How many dimensions, with padding, accumulator `number` of a head of `dim` dimensions has."""
    if in_two_pieces(dim) and number == 1:
        return max(32, 1 << (dim - 128 - 1).bit_length())
    return piece(dim, number)[1] if accumulators(dim) == 2 else 1 << (dim - 1).bit_length()


@gluon.jit
def no_sums(DIM: gl.constexpr):
    """New accumulators of zeros for a head of `DIM` dimensions."""
    sums = ()
    for number in gl.static_range(accumulators(DIM)):
        sums += (gl.zeros([CONSUMER_ROWS, width_of(DIM, number)], gl.float32, product_layout(width_of(DIM, number))),)
    return sums


@gluon.jit
def add_values(sums, weights, shared, place, last, there, DIM: gl.constexpr, PLAN: gl.constexpr):
    """Begins to add the weighted values of key tile number `last` to the accumulators, one product for each.

    If `there`, it first waits until the values have arrived in `place`. Otherwise no such tile exists, and it
    multiplies what lies in the place; the caller drops the result. Of two pieces, the second has only one
    place. Its product comes first, so that the place is empty sooner.
    """
    if in_two_pieces(DIM):
        if there:
            wait_until_full(shared.rest_full, last, 1)
        rest = _add_to(sums[1], weights, (shared.v[1].index(opaque_zero()),), 0)
        if there:
            mbarrier.wait(shared.v_full.index(place), phase_of(last, PLAN.stages))
        return _add_to(sums[0], weights, (shared.v[0].index(place),), 0), rest
    else:
        if there:
            mbarrier.wait(shared.v_full.index(place), phase_of(last, PLAN.stages))
        return add_product(sums, weights, (shared.v[0].index(place),), DIM)


@gluon.jit
def add_product(sums, left, right, DIM: gl.constexpr):
    """Begins to add `left right` to the accumulators.

    `left` is in registers, `pack` or not; `right` is a tile in shared memory.
    """
    found = ()
    for number in gl.static_range(accumulators(DIM)):
        found += (_add_to(sums[number], left, right, first_of(DIM, number)),)
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


@builtin
def product_where_needed(acc, factor, _semantic=None):
    """Multiplies the rows of an accumulator by their factors, unless all factors in the warp are 1.

    A thread holds numbers of two rows, in pairs of neighbours. All threads of a warp vote, so that they take the same
    branch; otherwise the assembler would make the products of the tensor cores wait for each other.
    """
    count = _unwrap_if_constexpr(acc.shape[1]) // 2
    first, second = f"${2 * count}", f"${2 * count + 2}"
    needed = (
        f"setp.neu.f32 a, {first}, 0f3F800000; setp.neu.or.f32 b, {second}, 0f3F800000, a; "
        "vote.sync.any.pred a, b, 0xffffffff; @!a bra done;"
    )
    products = " ".join(f"mul.f32 ${i}, ${i}, {second if i & 2 else first};" for i in range(count))
    assembly = f"{{ .reg .pred a, b; {needed} {products} done: }}"
    constraints = ["=f"] * count + [str(i) for i in range(count)] + ["f"] * count
    return inline_asm_elementwise(
        assembly, ",".join(constraints), [acc, factor], float32, True, count, _semantic=_semantic
    )


@gluon.jit
def as_column(rows, WIDTH: gl.constexpr):
    """Converts one number for each row to a column that can be multiplied with an accumulator of `WIDTH` dimensions."""
    return gl.convert_layout(rows, row_layout(WIDTH))[:, None]
