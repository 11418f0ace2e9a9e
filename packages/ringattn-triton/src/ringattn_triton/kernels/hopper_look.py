# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false
"""How programs on Hopper find out, beside their work, whether K and V hold anything that is no finite number.

Two warps that would be idle take shares of K and V from a common counter, fetch them by TMA through a few places of
their own, and multiply all by zero: the sum of that is zero too, unless something is no number.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..hopper import FOUND_AT, SHARES_AT
from .hopper_pipeline import fetch

LOOKERS: gl.constexpr = gl.constexpr(2)
"""How many warps look."""
LOOK_PLACES: gl.constexpr = gl.constexpr(3)
LOOK_ROWS: gl.constexpr = gl.constexpr(64)
"""How many rows a place holds, half of K and half of V."""
LOOK_WIDTH: gl.constexpr = gl.constexpr(64)
"""How many numbers are a row here, whatever the heads: as many as a pattern of the swizzle is wide."""
_AT_ONCE: gl.constexpr = gl.constexpr(8)
"""How many rows are held in registers at a time: as many as that pattern is high."""
_ROUNDS: gl.constexpr = gl.constexpr(4)
"""How often a share fills all places: an even number, after which the barriers are as they were."""
_SHARE: gl.constexpr = gl.constexpr(_ROUNDS.value * LOOK_PLACES.value * LOOK_ROWS.value // 2)
"""How many rows of K, and of V, are taken at a time."""


def shares(size: int) -> int:
    """In how many shares K and V of this size are looked at."""
    return -(-size // (_SHARE.value * LOOK_WIDTH.value))


@gluon.jit
def look(OWN_K, OWN_V, COUNTS, places, full, SIZE: gl.constexpr):
    """Adds to the count of what was found if the shares of this program hold what is no number.

    The number of each share after the first is taken at the beginning of the one before, and fetches run ahead from
    share to share; past the end they bring zeros. Where there is nothing to look at, `SIZE` is zero.
    """
    if SIZE > 0:
        TYPE: gl.constexpr = OWN_K.dtype.element_ty
        HALF: gl.constexpr = LOOK_ROWS // 2
        ALL_ROWS: gl.constexpr = SIZE // LOOK_WIDTH
        ALL_SHARES: gl.constexpr = (ALL_ROWS + _SHARE - 1) // _SHARE
        TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, LOOK_WIDTH], TYPE)
        HELD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [LOOKERS, 1], [1, 0])
        k_rows = tma.make_tensor_descriptor(OWN_K, [ALL_ROWS, LOOK_WIDTH], [LOOK_WIDTH, 1], [HALF, LOOK_WIDTH], TILE)
        v_rows = tma.make_tensor_descriptor(OWN_V, [ALL_ROWS, LOOK_WIDTH], [LOOK_WIDTH, 1], [HALF, LOOK_WIDTH], TILE)
        nothing = gl.zeros([_AT_ONCE, LOOK_WIDTH], TYPE, HELD)
        share = gl.atomic_add(COUNTS + SHARES_AT, 1, sem="relaxed")
        for place in gl.static_range(LOOK_PLACES):
            _fetched(k_rows, v_rows, share * _SHARE + place * HALF, places, full, place)
        while share < ALL_SHARES:
            following = gl.atomic_add(COUNTS + SHARES_AT, 1, sem="relaxed")
            for step in range(_ROUNDS):
                ahead = share * _SHARE + (step + 1) * (LOOK_PLACES * HALF)
                ahead = gl.where(step + 1 < _ROUNDS, ahead, following * _SHARE)
                for place in gl.static_range(LOOK_PLACES):
                    mbarrier.wait(full.index(place), step & 1)
                    for part in gl.static_range(LOOK_ROWS // _AT_ONCE):
                        held = places.index(place).slice(part * _AT_ONCE, _AT_ONCE).load(HELD)
                        nothing = nothing + held * 0.0
                    _fetched(k_rows, v_rows, ahead + place * HALF, places, full, place)
            share = following
        for place in gl.static_range(LOOK_PLACES):
            mbarrier.wait(full.index(place), 0)
        bad = gl.sum(nothing, 1) != 0.0
        one = gl.full([_AT_ONCE], 1, gl.int32, gl.SliceLayout(1, HELD))
        gl.atomic_add(COUNTS + FOUND_AT + (one - one), one, mask=bad, sem="relaxed")


@gluon.jit
def _fetched(k_rows, v_rows, row, places, full, PLACE: gl.constexpr):
    """Rows of K and of V from this one on, into a place."""
    HALF: gl.constexpr = LOOK_ROWS // 2
    mbarrier.expect(full.index(PLACE), LOOK_ROWS * LOOK_WIDTH * 2)
    fetch(k_rows, [row, 0], full.index(PLACE), places.index(PLACE).slice(0, HALF))
    fetch(v_rows, [row, 0], full.index(PLACE), places.index(PLACE).slice(HALF, HALF))
