# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
"""How the consumers of a program on Hopper take turns with the tensor cores.

A consumer begins both products of a step when the one before it has begun both of its own. Its softmax then falls under
the others' products. The order changes no result. A barrier of shared memory would do the same, and wakes later.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hardware_barriers import hardware_barrier

FIRST_BARRIER: gl.constexpr = gl.constexpr(8)
"""The number of the first consumer's hardware barrier. Triton's own begin at 0, and there are 16."""


@gluon.jit
def wait_for_order(NUMBER: gl.constexpr):
    """Waits until it is this consumer's time to multiply."""
    hardware_barrier("sync", FIRST_BARRIER + NUMBER, 256)


@gluon.jit
def pass_order(NUMBER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Lets the next consumer multiply."""
    hardware_barrier("arrive", FIRST_BARRIER + (NUMBER + 1) % CONSUMERS, 256)
