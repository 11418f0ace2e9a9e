# SPDX-License-Identifier: Apache-2.0
"""How kernels run as one operation of a JAX program: compiled on their own platform, interpreted on a CPU.

For backends whose kernels JAX does not know. The choice is made when a program is lowered, so one traced program serves
both.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
from jax.extend.core import Primitive
from jax.interpreters import mlir


def launch_primitive(
    name: str,
    outputs: Callable[..., Sequence[Any]],
    lowerings: Mapping[str, Callable[..., Sequence[jax.Array]]],
) -> Primitive:
    """A primitive with several results, the same under `jit` and without.

    `outputs(*operands, **parameters)` gives arrays or structs with the shapes and dtypes of the results.
    `lowerings[platform](*operands, **parameters)` computes the results there. It sees no mesh: its arrays vary over no
    mesh axis, and neither do the results of `bind`, which the caller aligns with its operands (`varying.align`).
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def shapes(*operands: Any, **parameters: Any) -> list[jax.core.ShapedArray]:
        return _over_no_mesh(outputs(*operands, **parameters))

    def eager(*arrays: jax.Array, **parameters: Any) -> Sequence[jax.Array]:
        return jax.jit(functools.partial(primitive.bind, **parameters))(*arrays)

    primitive.def_abstract_eval(shapes)
    primitive.def_impl(eager)
    for platform, compute in lowerings.items():
        mlir.register_lowering(primitive, _lowering(compute), platform=platform)
    return primitive


def _lowering(compute: Callable[..., Sequence[jax.Array]]) -> Callable[..., Any]:
    lower = mlir.lower_fun(compute, multiple_results=True)

    def lowering(context: Any, *operands: Any, **parameters: Any) -> Any:
        plain = {name: _over_no_mesh(getattr(context, name)) for name in ("avals_in", "avals_out")}
        return lower(context.replace(**plain), *operands, **parameters)

    return lowering


def _over_no_mesh(arrays: Sequence[Any]) -> list[jax.core.ShapedArray]:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in arrays]


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """Runs a backend's kernels on a CPU if the environment has one of `values` in `variable`.

    `compiler` and `accelerator` say in errors what compiles the kernels otherwise, and for what.
    """

    variable: str
    compiler: str
    accelerator: str
    values: tuple[str, ...] = ("1",)

    @property
    def allowed(self) -> bool:
        """Whether the environment asks for it. Programs that are lowered for an accelerator are compiled all the
        same."""
        return os.environ.get(self.variable, "") in self.values

    @property
    def advice(self) -> str:
        """How to turn it on, to follow "or" in an error."""
        return f"set {self.variable}=1 to interpret the kernels on a CPU, which is slow and meant for tests"

    def check(self, kernel: str) -> None:
        """Raises if a kernel is lowered for a CPU and the environment does not allow it."""
        if not self.allowed:
            raise RuntimeError(
                f"kernel {kernel} was launched on a CPU, and {self.compiler} compiles for {self.accelerator}s. Choose "
                f"the backend 'xla', or {self.advice}"
            )
