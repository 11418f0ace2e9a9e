# SPDX-License-Identifier: Apache-2.0
"""Workarounds for Triton and the assembler: each function says what the compiler would do without it.

`benchmarks/upstream/hopper_assembler.py` compiles the kernels with and without it, and says what may go. The functions
at the end work around no fault: some versions of Triton lack them, or have them under another name.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait
from triton.language.core import float32, inline_asm_elementwise

from ..availability import triton_version
from .hardware_barriers import assembly, read_number

_DESCRIPTORS_COME_EARLY = gl.constexpr(triton_version() > (3, 6))
"""Whether this Triton computes the descriptors of all products of a step as soon as their addresses are known."""
_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
"""Whether `reinterpret` is public, as in Triton 3.9; in earlier versions it is private."""


@builtin
def opaque_zero(_semantic=None):
    """Zero at run time, but the compiler cannot know that, nor that it is the same in every step.

    Added to the index of a place that is the same in every step, it keeps the compiler from computing the descriptors
    of a product before the loop: 24 of parts of K and V in the backward pass, which would take 48 registers.
    """
    result = _semantic.builder.get_int32_ty()
    zero = _semantic.builder.create_inline_asm("mov.u32 $0, 0;", "=r", [], [result], False, 1)
    return gl.tensor(zero.get_result(0), gl.int32)


@gluon.jit
def readdress(place, stages, stage):
    """Stage `stage` of `stages`: `place` itself, or with Triton after 3.6 the same place by a new address.

    Triton 3.9 computes the descriptors of all products of a step as soon as their addresses are known, and holds the
    descriptors in registers until they are used: a step then spills up to 264 more bytes to the stack. An address that
    is computed anew becomes known only here. Triton 3.6 computes each descriptor where it is used.
    """
    if _DESCRIPTORS_COME_EARLY:
        return stages[0].index(stage + opaque_zero())
    else:
        return place


@builtin
def arrive_at_constant(NAME, stage, PLAN, FROM=0, _semantic=None):
    """`arrive_at` for stage `FROM + stage`, where `stage` is 0 or 1, by two instructions with constant numbers.

    If the number were in a register, the warp would wait until the barrier has read the register, which happens only
    after all earlier stores of the warp.
    """
    name, plan, start = (_unwrap_if_constexpr(x) for x in (NAME, PLAN, FROM))
    first, threads = plan.hardware_barriers[name]
    text = (
        f"{{.reg .pred first; setp.eq.s32 first, $1, 0; @first bar.arrive {first + start}, {threads}; "
        f"@!first bar.arrive {first + start + 1}, {threads};}}"
    )
    assembly(text, _semantic, _semantic.to_tensor(stage).handle)


@builtin
def softmax_first(step, _semantic=None):
    """Keeps the assembler from placing the wait for the last tile's weighted values before the exponentials.

    The assembler places that wait as early as it may, but not before a preceding barrier instruction, and it places
    barrier instructions late. So this function adds a barrier arrival that is never executed, because no `step` is
    negative.
    """
    text = "{ .reg .pred p; setp.lt.s32 p, $1, 0; @p bar.arrive 15, 288; }"
    assembly(text, _semantic, _semantic.to_tensor(step).handle)


@gluon.jit
def after_barriers(x, tiles):
    """Returns `x`, and keeps the assembler from using it before the preceding barrier instructions.

    The assembler moves barrier instructions down past arithmetic, but moves no read of shared memory up past a barrier.
    So the result depends on such a read: of the number of a key tile, which is never negative.
    """
    return gl.where(read_number(tiles.index(0), 4) >= 0, x, 0.0)


@gluon.jit
def after_arrival(product, IN_FLIGHT: gl.constexpr):
    """Returns a product whose wait, which leaves `IN_FLIGHT` products, lies before an arrival at a barrier.

    This second wait has nothing to wait for, but keeps the assembler from delaying the arrival.
    """
    return warpgroup_mma_wait(IN_FLIGHT, deps=[product])


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
    text = f"{{ .reg .pred a, b; {needed} {products} done: }}"
    constraints = ["=f"] * count + [str(i) for i in range(count)] + ["f"] * count
    return inline_asm_elementwise(text, ",".join(constraints), [acc, factor], float32, True, count, _semantic=_semantic)


@gluon.jit
def hidden_unless_equal(s, x, y):
    """`s` where `x == y`, else -inf, by inline assembly.

    Otherwise LLVM joins this comparison with that of positions, and the assembler packs the 64 results into registers
    and unpacks them again, in 200 more instructions.
    """
    SELECT: gl.constexpr = "{ .reg .pred p; setp.eq.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }"
    return gl.inline_asm_elementwise(SELECT, "=f,f,r,r", [s, x, y], dtype=gl.float32, is_pure=True, pack=1)


@builtin
def async_atomic_add(tensor_desc, coord, src, _semantic=None):
    """Begins to add a tile in shared memory to global memory by TMA, for which Triton 3.6 has no own function."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@builtin
def wait_for_additions(_semantic=None):
    """Waits until all additions and stores that this warp has begun are complete, as PTX defines it.

    `tma.store_wait` does not suffice: it waits only until the tiles have been read from shared memory. Nor does this
    wait in the machine code: only the fence of the counter's release waits until the sums are in global memory.
    """
    assembly("cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff;", _semantic)


fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""The function that fetches a tile to shared memory: its name from Triton 3.9 on, or its earlier name."""
store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
"""The function that writes a tile to global memory: its name from Triton 3.9 on, or its earlier name."""


@gluon.jit
def place_as(place, TYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """A place in shared memory, read or written as numbers of another type in another shape."""
    return place.reinterpret(TYPE, SHAPE, LAYOUT) if _REINTERPRET else place._reinterpret(TYPE, SHAPE, LAYOUT)
