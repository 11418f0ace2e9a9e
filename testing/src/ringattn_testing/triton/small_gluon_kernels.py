# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false
"""Kernels of a few lines in Gluon, each of which shows one thing that the kernels for Hopper rely on."""

from typing import Any, NamedTuple

from ringattn_triton.hopper.backward_turns import Turns, rank_of, steps_of, take_turn, tile_at
from ringattn_triton.hopper.hardware_barriers import hardware_barrier
from ringattn_triton.hopper.workarounds import async_atomic_add
from ringattn_triton.kernels.tile_loop import owned
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

ROWS: gl.constexpr = gl.constexpr(64)
TILE: gl.constexpr = gl.constexpr(32)
DIM: gl.constexpr = gl.constexpr(64)
ONE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
"""One number, which all threads of a warpgroup hold."""
ALONE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
"""The same for a single warp."""


class Ring(NamedTuple):
    """A tile that stays, and places through which others pass, each with a barrier that says full and one, empty."""

    left: Any
    left_full: Any
    right: Any
    full: Any
    empty: Any


@gluon.jit
def products(A, B, OUT, B_ROWS: gl.constexpr, TILES: gl.constexpr, PLACES: gl.constexpr, FAULT: gl.constexpr):
    """The products of one tile with many that pass through few places; breaks one rule, whichever is named."""
    TYPE: gl.constexpr = A.dtype.element_ty
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, DIM], TYPE)
    STRIDE: gl.constexpr = DIM - 4 if FAULT == "stride" else DIM
    FIRST: gl.constexpr = 4 if FAULT == "base" else 0
    left = tma.make_tensor_descriptor(A + FIRST, [ROWS, DIM], [STRIDE, 1], [ROWS, DIM], LAYOUT)
    right = tma.make_tensor_descriptor(B, [B_ROWS, DIM], [DIM, 1], [TILE, DIM], LAYOUT)
    ring = Ring(
        gl.allocate_shared_memory(TYPE, [ROWS, DIM], LAYOUT),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(TYPE, [PLACES, TILE, DIM], LAYOUT),
        gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout()),
    )
    mbarrier.init(ring.left_full, count=1)
    never_initialised = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    if FAULT == "waits anywhere":
        mbarrier.wait(never_initialised, 1)
    for place in gl.static_range(PLACES):
        mbarrier.init(ring.full.index(place), count=1)
        mbarrier.init(ring.empty.index(place), count=1)
    gl.warp_specialize(
        [(_multiply, (ring, OUT, TILES, PLACES, FAULT)), (_fetch, (ring, left, right, TILES, PLACES, FAULT))], [1], [24]
    )


@gluon.jit
def _fetch(ring, left, right, TILES: gl.constexpr, PLACES: gl.constexpr, FAULT: gl.constexpr):
    BYTES: gl.constexpr = TILE * DIM * 2
    if FAULT == "never fetches":
        return
    mbarrier.expect(ring.left_full, ROWS * DIM * 2)
    fetch(left, [0, 0], ring.left_full, ring.left)
    for i in range(TILES + 1 if FAULT == "a fetch too many" else TILES):
        full = ring.full.index(i if FAULT == "place" else i % PLACES)
        mbarrier.wait(ring.empty.index(i % PLACES), (i // PLACES if FAULT == "parity" else (i // PLACES) & 1) ^ 1)
        if FAULT != "never announces":
            mbarrier.expect(full, BYTES // 2 if FAULT == "too few bytes" else BYTES)
        if FAULT == "never announces" or FAULT == "arrives twice":
            mbarrier.arrive(full, count=1)
        fetch(right, [i * TILE, 0], full, ring.right.index(i % PLACES))


@gluon.jit
def _multiply(ring, OUT, TILES: gl.constexpr, PLACES: gl.constexpr, FAULT: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    HELD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    at = rows[:, None] * TILE + gl.arange(0, TILE, gl.SliceLayout(0, LAYOUT))[None, :]
    ignored = gl.full([ROWS, TILE], 1.0, gl.float32, LAYOUT)
    mbarrier.wait(ring.left_full, 0)
    for i in range(TILES):
        place = i % PLACES
        phase = (i // PLACES) & 1
        right = ring.right.index(place).permute((1, 0))
        if FAULT != "read too early" and FAULT != "never waits":
            mbarrier.wait(ring.full.index(place), phase)
        if FAULT == "no fence":
            ring.right.index(place).store(ring.right.index(place).load(HELD))
        out = warpgroup_mma(ring.left, right, ignored, use_acc=False, is_async=True)
        if FAULT == "given up too early":
            mbarrier.arrive(ring.empty.index(place), count=1)
            if i + 1 < TILES:
                mbarrier.wait(ring.full.index((i + 1) % PLACES), ((i + 1) // PLACES) & 1)
        if FAULT == "stored unfinished":
            gl.store(OUT + at, out)
        elif FAULT == "scaled unfinished":
            out = ignored + out
        elif FAULT == "younger product":
            younger = warpgroup_mma(ring.left, right, ignored, use_acc=False, is_async=True)
            out = warpgroup_mma_wait(1, deps=[younger])
        elif FAULT == "ends unfinished":
            mbarrier.arrive(ring.empty.index(place), count=1)
        else:
            out = warpgroup_mma_wait(0, deps=[out])
            if FAULT == "read too early":
                mbarrier.wait(ring.full.index(place), phase)
            if FAULT != "given up too early" and FAULT != "never gives up":
                mbarrier.arrive(ring.empty.index(place), count=1)
            gl.store(OUT + i * (ROWS * TILE) + at, out)


@gluon.jit
def unwritten(FLOATS, INTEGERS):
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    i = gl.arange(0, TILE, ONE)
    gl.store(FLOATS + i, gl.allocate_shared_memory(gl.float32, [TILE], LAYOUT).load(ONE))
    gl.store(INTEGERS + i, gl.allocate_shared_memory(gl.int32, [TILE], LAYOUT).load(ONE))


@gluon.jit
def added(OUT_BEFORE, OUT, ROW: gl.constexpr, FAULT: gl.constexpr):
    """Each program adds two tiles, of ones and of twos, to a matrix of 32 rows of 64, from this row on."""
    PLAIN: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    rows = tma.make_tensor_descriptor(OUT, [TILE, DIM], [DIM, 1], [TILE, DIM], PLAIN)
    place = gl.allocate_shared_memory(gl.float32, [TILE, DIM], PLAIN)
    for number in range(1, 3):
        place.store(gl.full([TILE, DIM], 1.0, gl.float32, LAYOUT) * number)
        fence_async_shared()
        async_atomic_add(rows, [ROW, 0], place)
        if FAULT is None:
            tma.store_wait(0)
    if FAULT != "ends unread":
        tma.store_wait(0)


@gluon.jit
def passed_on(OUT, COUNT: gl.constexpr, FAULT: gl.constexpr):
    """Four warps hand `COUNT` numbers to one warp, which writes them out, by two hardware barriers of 160 threads."""
    place = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    gl.warp_specialize(
        [(_hand_numbers, (place, COUNT, FAULT)), (_write_numbers, (place, OUT, COUNT, FAULT))],
        [1],
        [24],
    )


@gluon.jit
def _hand_numbers(place, COUNT: gl.constexpr, FAULT: gl.constexpr):
    for number in range(COUNT):
        if FAULT != "never waits":
            number_of_barrier = 16 if FAULT == "a seventeenth barrier" else 7
            hardware_barrier("sync", number_of_barrier, 160 if FAULT != "other threads" else 192)
        place.store(gl.full([1], number, gl.int32, ONE))
        hardware_barrier("arrive", 5 + number // COUNT, 160)


@gluon.jit
def _write_numbers(place, OUT, COUNT: gl.constexpr, FAULT: gl.constexpr):
    for number in range(COUNT):
        if FAULT != "never empties":
            hardware_barrier("arrive", 7, 160)
        hardware_barrier("sync", 5, 160)
        gl.store(OUT + number + gl.arange(0, 1, ALONE), place.load(ALONE))


@gluon.jit
def in_turn(TURNS, BEFORE, COUNT, PARTITIONS: gl.constexpr):
    """Each partition waits until `COUNT` has reached its program's entry of `TURNS`, and adds 1 to it."""
    if PARTITIONS == 1:
        _wait_and_add(TURNS, COUNT)
    else:
        gl.warp_specialize([(_wait_and_add, (TURNS, COUNT)), (_wait_and_add, (TURNS, COUNT))], [4], [24])


@gluon.jit
def _wait_and_add(TURNS, COUNT):
    turn = gl.load(TURNS + gl.program_id(0))
    count = turn * 0
    while count < turn:
        count = gl.load(COUNT, volatile=True)
    gl.atomic_add(COUNT, 1)


@gluon.jit
def turns_taken(
    BEFORE, COUNTERS, TURNS, SEEN, COUNT: gl.constexpr, T: gl.constexpr, PLAN: gl.constexpr, ALONE: gl.constexpr
):
    """Two partitions, or one `ALONE`, take turns until none of `COUNT` is left, as programs do.

    For each turn, they write its number, and how many turns were taken when it was given out.
    """
    if ALONE:
        _take_turns(COUNTERS, TURNS, SEEN, COUNT, T, PLAN, ALONE)
    else:
        gl.warp_specialize(
            [
                (_take_turns, (COUNTERS, TURNS, SEEN, COUNT, T, PLAN, ALONE)),
                (_take_turns, (COUNTERS, TURNS, SEEN, COUNT, T, PLAN, ALONE)),
            ],
            [4],
            [24],
        )


@gluon.jit
def _take_turns(COUNTERS, TURNS, SEEN, COUNT: gl.constexpr, T: gl.constexpr, PLAN: gl.constexpr, ALONE: gl.constexpr):
    turns = Turns(0, 0, 0, COUNTERS, COUNT, 0)
    if not ALONE:
        hardware_barrier("sync", 9, 256)
    turn = take_turn(turns, T, PLAN)
    while turn < turns.count:
        gl.store(TURNS + turn, turn)
        gl.store(SEEN + turn, gl.load(COUNTERS, volatile=True))
        turn = take_turn(turns, T, PLAN)


@gluon.jit
def tiles_visited(
    BOUNDS, TILES, RANKS, BEFORE, COUNTERS, TAKEN, VISITS, COUNT: gl.constexpr, HEADS: gl.constexpr, T: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Takes all `COUNT` turns. Writes the key head and the number of steps of each, and of each step tile and rank."""
    turns = Turns(BOUNDS, TILES, RANKS, COUNTERS, COUNT, 0)
    for number in range(COUNT):
        turn = take_turn(turns, T, PLAN)
        owner = owned(turn, T, HEADS)
        steps = steps_of(turn, owner, turns, T, PLAN)
        count = steps.masked_before + steps.whole + steps.masked_after
        gl.store(TAKEN + number * 2, owner[2])
        gl.store(TAKEN + number * 2 + 1, count)
        for step in range(count):
            tile = tile_at(steps, step, T, PLAN)
            at = VISITS + (number * T.columns + step) * 2
            gl.store(at, tile)
            gl.store(at + 1, rank_of(tile, turn, owner, turns, T, PLAN))
