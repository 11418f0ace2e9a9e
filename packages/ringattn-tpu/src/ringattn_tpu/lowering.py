# SPDX-License-Identifier: Apache-2.0
"""How a primitive becomes a program in which no value varies over a mesh axis: inside a kernel there is no mesh."""

from collections.abc import Callable
from typing import Any

import jax.core
from jax.interpreters import mlir


def over_no_mesh(rule: Callable[..., Any], multiple_results: bool) -> Callable[..., Any]:
    """The lowering that `rule` says, a function of arrays and of the primitive's parameters."""
    lower = mlir.lower_fun(rule, multiple_results=multiple_results)

    def plain(avals: Any) -> list[jax.core.ShapedArray]:
        return [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals]

    def lowering(ctx: Any, *arrays: Any, **parameters: Any) -> Any:
        ctx = ctx.replace(avals_in=plain(ctx.avals_in), avals_out=plain(ctx.avals_out))
        return lower(ctx, *arrays, **parameters)

    return lowering
