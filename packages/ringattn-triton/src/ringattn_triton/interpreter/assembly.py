# SPDX-License-Identifier: Apache-2.0
"""What inline assembly for NVIDIA computes: the few instructions that kernels say in it."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np

_LOW: Final = np.uint64(2**32 - 1)
_INSTRUCTIONS: Final[dict[str, Callable[..., tuple[Any, ...]]]] = {
    "tanh.approx.f32": lambda x: (np.tanh(x),),
    "mul.wide.u32": lambda a, b: (a.astype(np.uint64) * b.astype(np.uint64),),
    "mov.b32": lambda x: (x,),
    "st.global.b32": lambda pointer, word: pointer.write(word),
    "mov.b64": lambda x: ((x & _LOW).astype(np.uint32), (x >> np.uint64(32)).astype(np.uint32)),
}
"""The results of each, in the order in which PTX writes them. What points into memory is a `Place`."""


class Place(Protocol):
    """Where words of 32 bits can be written; `()` is the result."""

    def write(self, words: Any) -> tuple[()]: ...


def computed(assembly: str, inputs: Sequence[np.ndarray | Place], outputs: int) -> list[Any]:
    """The outputs `$0` and so on of instructions applied element by element; inputs are numbered after them."""
    registers = {f"${outputs + number}": x for number, x in enumerate(inputs)}
    body = re.sub(r"^\s*\{(.*)\}\s*$", r"\1", assembly, flags=re.DOTALL)
    for statement in filter(None, map(str.strip, body.split(";"))):
        name, operands = statement.split(None, 1)
        if name == ".reg":
            continue
        if name not in _INSTRUCTIONS:
            raise NotImplementedError(f"the instruction {name} of inline assembly is not interpreted")
        named = re.findall(r"[$%\w]+", operands)
        arity = _INSTRUCTIONS[name].__code__.co_argcount
        results = _INSTRUCTIONS[name](*(registers[source] for source in named[-arity:]))
        registers.update(zip(named[:-arity], results, strict=True))
    return [registers[f"${number}"] for number in range(outputs)]
