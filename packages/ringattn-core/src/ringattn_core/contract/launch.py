# SPDX-License-Identifier: Apache-2.0
"""Makes the launch of a kernel a JAX primitive: compiled on its own platform, interpreted on a CPU.

For backends whose kernels JAX cannot lower itself. JAX chooses between compiler and interpreter when it lowers a
program, so that one traced program serves both platforms.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
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
    """Makes a JAX primitive `name` that returns a list of results. Outside `jax.jit` it compiles itself with `jax.jit`.

    `outputs(*operands, **parameters)` gives arrays or structs with the shapes and dtypes of the results.
    `lowerings[platform](*operands, **parameters)` computes the results on that platform. Inside
    `shard_map(check_vma=True)`, JAX assumes that the results of `bind` are replicated. So the caller must mark them as
    varying over the mesh axes of its operands (`varying.align`). In a lowering all arrays are marked as replicated.
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
    """Decides whether a backend's kernels may be interpreted on a CPU: if environment `variable` is one of `values`.

    Its errors name the `compiler` that is used otherwise, the `accelerator` for which that compiles, and the pip
    `package` with which JAX can use the accelerator.
    """

    variable: str
    compiler: str
    accelerator: str
    package: str
    values: tuple[str, ...] = ("1",)

    @property
    def allowed(self) -> bool:
        """Whether kernels may be interpreted on a CPU. On an accelerator they are compiled in any case."""
        return os.environ.get(self.variable, "") in self.values

    @property
    def advice(self) -> str:
        """How to allow interpretation, as the end of an error message after "or"."""
        return f"set {self.variable}=1 to interpret the kernels on a CPU, which is slow and meant for tests"

    def why_no_device(self, devices: Sequence[Any], platforms: Collection[str]) -> str | None:
        """Why kernels cannot run: some of `devices` are not of `platforms`, and interpreting is off. Else `None`."""
        others = sorted({device.platform for device in devices} - set(platforms))
        if not others or self.allowed:
            return None
        return (
            f"JAX sees no {self.accelerator} in this process, but {', '.join(others)}. Install the JAX of your "
            f"{self.accelerator} (pip install '{self.package}'), or {self.advice}"
        )

    def check(self, kernel: str) -> None:
        """Raises unless kernels may be interpreted; called when `kernel` is lowered for a CPU."""
        if not self.allowed:
            raise RuntimeError(
                f"kernel {kernel} was launched on a CPU, and {self.compiler} compiles for {self.accelerator}s. Choose "
                f"the backend 'xla', or {self.advice}"
            )
