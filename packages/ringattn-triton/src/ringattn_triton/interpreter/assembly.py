# SPDX-License-Identifier: Apache-2.0
"""Interprets inline PTX: the few instructions that the kernels use."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

_LOW: Final = np.uint64(2**32 - 1)
_INSTRUCTIONS: Final[dict[str, Callable[..., tuple[Any, ...]]]] = {
    "tanh.approx.f32": lambda x: (np.tanh(x),),
    "mul.wide.u32": lambda a, b: (a.astype(np.uint64) * b.astype(np.uint64),),
    "cvt.rn.bf16x2.f32": lambda upper, lower: (_halves(upper, lower, jnp.bfloat16),),
    "cvt.rn.f16x2.f32": lambda upper, lower: (_halves(upper, lower, np.float16),),
    "mov.b32": lambda x: (x,),
    "setp.eq.s32": lambda a, b: (a == b,),
    "selp.f32": lambda a, b, predicate: (np.where(predicate, a, b),),
    "st.global.b32": lambda pointer, word: pointer.write(word),
    "mov.b64": lambda x: ((x & _LOW).astype(np.uint32), (x >> np.uint64(32)).astype(np.uint32)),
}
"""For each instruction, a function from its source operands to a tuple of its results, in the order of PTX. A pointer
is an object with a method `write`."""


def _halves(upper: np.ndarray, lower: np.ndarray, dtype: Any) -> np.ndarray:
    """Rounds two float32 numbers to a 16-bit `dtype` and packs them in one 32-bit word, `lower` in the low half."""
    high, low = (x.astype(dtype).view(np.uint16).astype(np.uint32) for x in (upper, lower))
    return (high << np.uint32(16) | low).view(np.int32)


def _float(literal: str) -> np.float32:
    """The value of a float32 literal of PTX, such as `0fFF800000`."""
    return np.uint32(int(literal[2:], 16)).view(np.float32)


def computed(assembly: str, inputs: Sequence[Any], outputs: int) -> list[Any]:
    """Runs PTX instructions on each element of `inputs`, and returns as many results as `outputs`.

    In `assembly` the outputs are `$0` and so on; the inputs have the numbers after those of the outputs.
    """
    registers = {f"${outputs + number}": x for number, x in enumerate(inputs)}
    body = re.sub(r"^\s*\{(.*)\}\s*$", r"\1", assembly, flags=re.DOTALL)
    for statement in filter(None, map(str.strip, body.split(";"))):
        name, operands = statement.split(None, 1)
        if name == ".reg":
            continue
        if name not in _INSTRUCTIONS:
            raise NotImplementedError(f"the instruction {name} of inline assembly is not interpreted")
        named = re.findall(r"[$%\w]+", operands)
        registers.update((x, _float(x)) for x in named if x.startswith("0f"))
        arity = _INSTRUCTIONS[name].__code__.co_argcount
        results = _INSTRUCTIONS[name](*(registers[source] for source in named[-arity:]))
        registers.update(zip(named[:-arity], results, strict=True))
    return [registers[f"${number}"] for number in range(outputs)]
