# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
"""How one warp on Hopper hands a number to others, by a place in shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def write_number(place, number):
    """Writes one number to a place, by a partition of one warp."""
    place.store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def read_number(place, WARPS: gl.constexpr):
    """Reads the number from shared memory; every thread of a partition of `WARPS` warps gets it."""
    return gl.max(place.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
