# SPDX-License-Identifier: Apache-2.0
"""Makes kernels that are broken in one way: a method is wrong, or it computes another block than it got."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from ringattn_testing.conformance.numpy_ring import Block, Dense

Condition = Callable[[Block], bool]


@dataclasses.dataclass(frozen=True)
class Break:
    """A kernel with a fault, and whether the core tier catches it; the full tier must.

    `rarer` has pairs of a dtype and a kernel with the fault in this dtype only, some of them only on one rank or with
    longer shards. The full tier must catch each of them.
    """

    kernel: Dense
    core: bool = True
    rarer: tuple[tuple[str, Dense], ...] = ()


def always(block: Block) -> bool:
    return True


def dtype(*names: str) -> Condition:
    return lambda block: block.case.dtype in names


half, bfloat16, float16 = dtype("bfloat16", "float16"), dtype("bfloat16"), dtype("float16")


def in_dtype(name: str, when: Condition) -> Condition:
    return lambda block: block.case.dtype == name and when(block)


def has(*fields: str, and_also: Condition = always) -> Condition:
    """The condition that a call has all of these options."""
    return lambda block: all(_given(getattr(block, name)) for name in fields) and and_also(block)


def _given(option: Any) -> bool:
    return option is not None and option is not False


def wrong_in(method: str, wrong: Callable[..., Any]) -> Dense:
    """A kernel one of whose methods is `wrong(right, block, ...)`, where `right` is the correct method."""
    right = getattr(Dense, method)
    return type("Broken", (Dense,), {method: lambda self, *given: wrong(functools.partial(right, self), *given)})()


def masked(name: str, wrong: Callable[[Block, Any], Any], when: Condition = always) -> Dense:
    """A kernel that has another mask of this name, `wrong(block, right)`, under a condition."""

    def masks(right: Any, block: Block) -> Any:
        found = right(block)
        if name in found and when(block):
            found[name] = wrong(block, found[name])
        return found

    return wrong_in("masks", masks)


class Changed(Dense):
    """A kernel that computes another block than the one it gets, in both passes or in one."""

    def __init__(self, change: Callable[[Block], Block], passes: tuple[str, ...]) -> None:
        self.change, self.passes = change, passes

    def forward(self, block: Block, partial: Any) -> Any:
        return super().forward(self.change(block) if "forward" in self.passes else block, partial)

    def backward(self, block: Block, *arrays: Any) -> Any:
        return super().backward(self.change(block) if "backward" in self.passes else block, *arrays)


def changed(
    when: Condition = always, passes: tuple[str, ...] = ("forward", "backward"), **fields: Callable[[Block], Any]
) -> Dense:
    """A kernel that computes with other fields of the block, each a function of the block, under a condition."""

    def change(block: Block) -> Block:
        return block.but(**{name: field(block) for name, field in fields.items()}) if when(block) else block

    return Changed(change, passes)
