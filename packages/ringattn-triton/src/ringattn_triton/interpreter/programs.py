# SPDX-License-Identifier: Apache-2.0
"""Runs a kernel's own Python code with other globals, in which the interpreter replaces `triton.language`."""

import builtins
import inspect
import sys
import types
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from triton import language as tl
from triton.runtime.jit import JITFunction

from ..kernels.parameters import by_parameter, labels
from . import gluon, language, mathematics
from .language import current
from .memory import Buffer, Storage
from .types import OF_ARRAY
from .values import Pointer, constant


class Launch:
    """The state of one launch: its grid, and which program runs, by number (`program`) and by grid index (`where`)."""

    def __init__(self, call: Any) -> None:
        self.name = call.name
        self.warps = call.warps
        self.grid = (*call.grid, *(1,) * (3 - len(call.grid)))
        self.where = (0, 0, 0)
        self.program = 0


def run(call: Any, operands: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
    """Runs every program of a `launch.kernel_call.KernelCall`, one after the other, and fills the outputs."""
    launch, aliases, constants = Launch(call), dict(call.aliases), dict(call.constants)
    names = [name for name in inspect.signature(call.kernel.fn).parameters if name not in constants]
    given = len(operands) + len(outputs)
    function = interpreted(call.kernel)
    storages = [Storage.of_output(output) for output in outputs]
    for operand, output in aliases.items():
        storages[output] = Storage.of_alias(operands[operand])
    read = [storages[aliases[i]] if i in aliases else Storage.of_operand(x) for i, x in enumerate(operands)]
    arrays = [*zip(operands, read, [False] * len(read), strict=True)]
    arrays += zip(outputs, storages, [True] * len(storages), strict=True)
    pointers = [
        Pointer(Buffer(label, storage, OF_ARRAY[array.dtype.name], writable, launch), np.int64(0))
        for label, (array, storage, writable) in zip(labels(names)[:given], arrays, strict=True)
    ]
    arguments = by_parameter(names, pointers)
    before = getattr(current, "launch", None)
    current.launch = launch
    try:
        with np.errstate(all="ignore"):
            for program, where in enumerate(np.ndindex(*launch.grid[::-1])):
                launch.program, launch.where = program, where[::-1]
                gluon.run_program(function, (), arguments | constants)
            for output, storage in zip(outputs, storages, strict=True):
                output[...] = storage.flat.reshape(output.shape).astype(output.dtype)
    finally:
        current.launch = before


_GLUON: Final = "triton.experimental.gluon.language"
_functions: dict[Any, Any] = {}
_globals: dict[int, tuple[Any, dict[str, Any]]] = {}


class _Language:
    """The object that kernels get as `triton.language`: the interpreter's functions, and types from Triton itself."""

    def __init__(self) -> None:
        for module in (language, mathematics):
            own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
            vars(self).update({k: v for k, v in own.items() if getattr(v, "__module__", None) == module.__name__})
        self.range = language.range_
        self.cdiv = lambda x, div: (x + (div - 1)) // div

    def __getattr__(self, name: str) -> Any:
        value = getattr(tl, name)
        if isinstance(value, JITFunction) or tl.core.is_builtin(value):
            raise NotImplementedError(f"triton.language.{name} is not interpreted")
        return value


class _Gluon:
    """Stands for a module of Gluon: functions of `interpreter.gluon`, Gluon's layouts, and all else of `_Language`."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        own = vars(gluon).get(name)
        if getattr(own, "__module__", None) == gluon.__name__:
            return own
        return getattr(self._module if name.endswith("Layout") else LANGUAGE, name)


def interpreted(kernel: JITFunction) -> Any:
    """The Python function of a kernel or device function, with the interpreter's globals: a call interprets it."""
    function = kernel.fn
    if function not in _functions:
        defaults = function.__defaults__ and tuple(constant(value) for value in function.__defaults__)
        _functions[function] = types.FunctionType(
            function.__code__, _environment(function), function.__name__, defaults
        )
    return _functions[function]


def _environment(function: Any) -> dict[str, Any]:
    original = function.__globals__
    key = id(original)
    if key not in _globals:
        _globals[key] = (original, {})
    replaced = _globals[key][1]
    for name, value in list(original.items()):
        replaced[name] = _replaced(value)
    replaced["__builtins__"] = _BUILTINS
    return replaced


def _replaced(value: Any) -> Any:
    """What an interpreted kernel gets instead of `value`, a global of its module."""
    if isinstance(value, JITFunction):
        own = value.fn.__module__.startswith("triton.language")
        return getattr(LANGUAGE, value.__name__) if own else _Function(value)
    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, types.ModuleType):
        return LANGUAGE if value is tl else _Gluon(value) if value.__name__.startswith(_GLUON) else value
    if callable(value) and tl.core.is_builtin(value):
        of = LANGUAGE if value.__module__.startswith("triton.language") else _Gluon(sys.modules[value.__module__])
        return getattr(of, value.__name__)
    if type(value).__name__ == "ConstexprFunction":  # a function that Triton calls at compile time
        return getattr(value, "fn")  # noqa: B009
    return value


class _Function:
    """A device function that kernels call: made interpretable at its first call, when all modules are imported."""

    def __init__(self, kernel: JITFunction) -> None:
        self._kernel = kernel
        self._run: Any = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._run is None:
            self._run = interpreted(self._kernel)
        return self._run(*args, **options)


_BUILTINS = {**vars(builtins), "range": language.range_}
LANGUAGE = _Language()
