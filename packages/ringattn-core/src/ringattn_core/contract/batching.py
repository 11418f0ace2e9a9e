# SPDX-License-Identifier: Apache-2.0
"""Folds the axes of `jax.vmap` into the batch axis, so that no kernel needs a batching rule."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..placement.arrays import axes_with
from . import checks
from .protocol import Block, BlockKernel, Gradients, Partial

_PER_EXAMPLE, _BROADCAST = axes_with(Block, "B"), axes_with(Block, "b")
_MAY_BE_SHARED = [name.removeprefix("d") for name in axes_with(Gradients, "b")]
"""The differentiable arrays whose batch axis may be 1: all rows of the batch then share them."""


def forward(kernel: BlockKernel) -> Callable[..., Partial]:
    """`kernel.forward`, with vmapped axes folded into the batch."""
    return _folding(functools.partial(checks.forward, kernel))


def backward(kernel: BlockKernel) -> Callable[..., Gradients]:
    """`kernel.backward`, with vmapped axes folded into the batch."""
    return _folding(functools.partial(checks.backward, kernel), _MAY_BE_SHARED)


def _folding(method: Callable[..., Any], differentiated: Sequence[str] = ()) -> Any:
    """Wraps `method(block, *arrays)`: vmapped axes become part of the batch.

    An array in `differentiated` that all rows of a batch share is repeated for every row, and the rows' gradients are
    added up.
    """
    call = jax.custom_batching.custom_vmap(method)

    @call.def_vmap
    def rule(size: int, batched: Any, block: Block, *arrays: Any) -> tuple[Any, Any]:
        if batched[0].head_index:
            return _one_by_one(call, size, batched, block, *arrays)
        # Every array gets the vmapped axis in front; one without it is repeated. XLA drops copies that nothing reads.
        each: Any = jax.tree.map(
            lambda is_batched, x: x if is_batched else jnp.broadcast_to(x, (size, *x.shape)),
            list(batched),
            [block, *arrays],
        )
        shared = [name for name in differentiated if (x := getattr(each[0], name)) is not None and x.shape[1] == 1]
        folded = dataclasses.replace(block, **_folded_arrays(each[0], batched[0], differentiated))
        if "bias" in shared:
            # The gradient of a shared bias is summed below: it stays float32 until then, and is rounded once.
            folded = dataclasses.replace(folded, final=False)
        result = call(folded, *jax.tree.map(_fold, each[1:]))
        result = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), result)
        if differentiated:
            found = {f"d{name}": getattr(result, f"d{name}") for name in shared}
            sums = {name: x.sum(1, keepdims=True) for name, x in found.items() if x is not None}
            result = checks.in_input_dtypes(block, dataclasses.replace(result, **sums))
        return _all_batched(result)

    return call


def _folded_arrays(each: Any, batched: Any, expand: Sequence[str]) -> dict[str, Any]:
    """The block's arrays with the vmapped axis folded into the batch. An array with batch size 1 keeps it.

    Unless the array is vmapped itself, or `expand` names it: then it is repeated for every row.
    """
    examples = each.q.shape[1]
    changes = {name: _fold(x) for name in _PER_EXAMPLE if (x := getattr(each, name)) is not None}
    for name in _BROADCAST:
        x = getattr(each, name)
        if x is not None and (x.shape[1] != 1 or getattr(batched, name) or name in expand):
            changes[name] = _fold(jnp.broadcast_to(x, (x.shape[0], examples, *x.shape[2:])))
    # In packed K,V, `[2 B S K H]`, the batch is the second axis.
    changes["kv"] = jax.tree.map(lambda x: _fold(jnp.moveaxis(x, 0, x.ndim - 5), x.ndim - 5), each.kv)
    return changes


def _fold(x: jax.Array, axis: int = 0) -> jax.Array:
    """`x` with `axis` and the axis after it merged to one axis."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _one_by_one(call: Callable[..., Any], size: int, batched: Any, *args: Any) -> tuple[Any, Any]:
    """Runs the vmapped examples one after another: their `head_index` differs, and a `Block` has only one."""
    axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, tuple(batched))
    sequential = jax.custom_batching.sequential_vmap(lambda *args: call(*args))
    return _all_batched(jax.vmap(sequential, axes, axis_size=size)(*args))


def _all_batched(result: Any) -> tuple[Any, Any]:
    return result, jax.tree.map(lambda _: True, result)
