# SPDX-License-Identifier: Apache-2.0
"""How vmapped axes become part of the batch, so that no kernel needs a batching rule."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..contract import checks
from ..contract.protocol import Block, BlockKernel, Gradients, Partial
from ..placement.arrays import axes_with

_PER_EXAMPLE, _BROADCAST = axes_with(Block, "B"), axes_with(Block, "b")
_MAY_BE_SHARED = [name.removeprefix("d") for name in axes_with(Gradients, "b")]
"""The differentiable arrays whose batch axis may be 1: all rows of the batch then share them."""


def forward(kernel: BlockKernel) -> Callable[[Block, Partial | None], Partial]:
    """`kernel.forward`, with vmapped axes folded into the batch."""
    call = jax.custom_batching.custom_vmap(functools.partial(checks.forward, kernel))

    @call.def_vmap
    def rule(size: int, batched: Any, block: Block, partial: Partial | None) -> tuple[Partial, Partial]:
        block_batched, partial_batched = batched
        if block_batched.head_index:
            return _one_by_one(call, size, batched, block, partial)
        folded = _fold_block(size, block_batched, block, expand=())
        given = jax.tree.map(lambda is_batched, x: _fold(size, is_batched, x), partial_batched, partial)
        return _unfolded(size, call(folded, given))

    return call


def backward(kernel: BlockKernel) -> Callable[..., Gradients]:
    """`kernel.backward`, with vmapped axes folded into the batch."""
    call = jax.custom_batching.custom_vmap(functools.partial(checks.backward, kernel))

    @call.def_vmap
    def rule(size: int, batched: Any, block: Block, *arrays: jax.Array | None) -> tuple[Gradients, Gradients]:
        block_batched, *arrays_batched = batched
        if block_batched.head_index:
            return _one_by_one(call, size, batched, block, *arrays)
        folded = _fold_block(size, block_batched, block, expand=_MAY_BE_SHARED)
        if _shared(block, block_batched, "bias"):
            # `_reduce_like` sums the gradient of a shared bias: it stays float32 until then, and is rounded once.
            folded = dataclasses.replace(folded, final=False)
        given = [_fold(size, is_batched, x) for is_batched, x in zip(arrays_batched, arrays, strict=True)]
        result, every = _unfolded(size, call(folded, *given))
        return checks.in_input_dtypes(block, _reduce_like(result, block, block_batched)), every

    return call


def _fold_block(size: int, batched: Any, block: Block, expand: Sequence[str]) -> Block:
    """The block with the vmapped axis folded into the batch. Arrays with batch 1 keep it unless `expand` names them."""
    examples = block.q.shape[1 if batched.q else 0]
    changes: dict[str, Any] = {name: _fold(size, getattr(batched, name), getattr(block, name)) for name in _PER_EXAMPLE}
    for name in _BROADCAST:
        x, is_batched = getattr(block, name), getattr(batched, name)
        if x is None or (x.shape[0] == 1 and not is_batched and name not in expand):
            continue
        axis = 1 if is_batched else 0
        x = jnp.broadcast_to(x, (*x.shape[:axis], examples, *x.shape[axis + 1 :]))
        changes[name] = _fold(size, is_batched, x)
    changes["kv"] = jax.tree.map(lambda is_batched, x: _fold_before(size, is_batched, x), batched.kv, block.kv)
    return dataclasses.replace(block, **changes)


def _fold_before(size: int, batched: bool, x: jax.Array) -> jax.Array:
    """Folds the vmapped axis into the batch of K,V; in `[2 B S K H]` the batch is the second axis."""
    axis = x.ndim - batched - 4
    x = jnp.moveaxis(x, axis + 1, 1) if batched else jnp.moveaxis(x, axis, 0)
    return jnp.moveaxis(_fold(size, batched, x), 0, axis)


def _fold(size: int, batched: bool, x: jax.Array | None) -> Any:
    if x is None:
        return None
    x = x if batched else jnp.broadcast_to(x, (size, *x.shape))
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _unfolded(size: int, result: Any) -> tuple[Any, Any]:
    """The result with the vmapped axis split off as its first axis, and `True` for every array: all are batched."""
    return _all_batched(jax.tree.map(lambda x: x.reshape(size, x.shape[0] // size, *x.shape[1:]), result))


def _reduce_like(result: Gradients, block: Block, batched: Any) -> Gradients:
    """Sums the gradient of a shared input over the batch of each example."""
    changes = {}
    for name in _MAY_BE_SHARED:
        if _shared(block, batched, name) and getattr(result, f"d{name}") is not None:
            changes[f"d{name}"] = getattr(result, f"d{name}").sum(1, keepdims=True)
    return dataclasses.replace(result, **changes)


def _shared(block: Block, batched: Any, name: str) -> bool:
    """Whether the batch axis of this array is 1, so that all rows of an example's batch share it."""
    x = getattr(block, name)
    return x is not None and x.shape[1 if getattr(batched, name) else 0] == 1


def _one_by_one(call: Callable[..., Any], size: int, batched: Any, *args: Any) -> tuple[Any, Any]:
    """Runs the examples one after another. `head_index` differs between them, and a batch has only one."""
    axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, tuple(batched))
    sequential = jax.custom_batching.sequential_vmap(lambda *args: call(*args))
    return _all_batched(jax.vmap(sequential, axes, axis_size=size)(*args))


def _all_batched(result: Any) -> tuple[Any, Any]:
    return result, jax.tree.map(lambda _: True, result)
