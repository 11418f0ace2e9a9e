# SPDX-License-Identifier: Apache-2.0
"""Moves the tokens of an array from natural order to the order of a layout, and back."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ..errors import InputError
from . import axes
from .arrays import as_array
from .layout import Shards, canonical, refuse_indivisible


def to_layout(x: Any, layout: str, ring_size: int, axis: int = 1) -> Any:
    """Reorders an axis from natural order, so that an even split over the ring gives each rank its tokens.

    `from_layout` is the inverse. If the axis is split over `ring_size` devices, each token moves once, to its device.

    Args:
        x: An array of NumPy or JAX with an axis of tokens: queries, keys, ids, positions, labels.
        layout: "zigzag" (or its other name "dual_chunk_swap"), "striped", or "contiguous", which changes nothing.
        ring_size: The number of ranks of the ring.
        axis: The axis of tokens.
    """
    return _reorder(x, layout, ring_size, axis, inverse=False)


def from_layout(x: Any, layout: str, ring_size: int, axis: int = 1) -> Any:
    """Reorders an axis back to natural order; the inverse of `to_layout`.

    Args:
        x: An array in the order of the layout.
        layout: As in `to_layout`.
        ring_size: The number of ranks of the ring.
        axis: The axis of tokens.
    """
    return _reorder(x, layout, ring_size, axis, inverse=True)


def _reorder(x: Any, layout: str, ring_size: Any, axis: Any, inverse: bool) -> Any:
    layout = canonical(layout)
    x = x if isinstance(x, np.ndarray) else as_array("x", x)
    if not _is_integer(ring_size) or ring_size < 1:
        raise InputError("ring_size", f"got {ring_size!r}", "Pass the number of ranks, 1 or more")
    if not _is_integer(axis) or not -x.ndim <= axis < x.ndim:
        raise InputError("axis", f"got {axis!r} for an array of {x.ndim} axes", "Pass the axis of the sequence")
    if layout == "contiguous":
        return x
    refuse_indivisible("x", x.shape[axis], layout, ring_size)
    index = Shards(layout, ring_size).order(x.shape[axis])
    index = np.argsort(index, kind="stable") if inverse else index
    if isinstance(x, np.ndarray):
        return np.take(x, index, axis)
    return _of_shards(x, layout, ring_size, axis % x.ndim, inverse, index)


def _is_integer(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def _of_shards(x: jax.Array, layout: str, ranks: int, axis: int, inverse: bool, index: np.ndarray) -> jax.Array:
    """The tokens in the order of `index`. If the axis is split over the ring, its devices exchange them."""
    mesh, spec = _sharding_of(x)
    over = axes.names(spec[axis])
    length = x.shape[axis] // ranks
    if not over or np.prod([mesh.shape[name] for name in over]) != ranks or (layout == "striped" and length % ranks):
        return _taken(x, index, axis, mesh, spec)
    exchange = _zigzag if layout == "zigzag" else _striped

    def local(x: jax.Array) -> jax.Array:
        return exchange(x, over, ranks, axis, inverse)

    free = set(mesh.axis_names) - axes.manual()
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(*spec), out_specs=P(*spec), axis_names=free))(x)


def _sharding_of(x: jax.Array) -> tuple[Any, tuple[Any, ...]]:
    """The mesh and the spec of an array. Under `jax.jit`, JAX knows the explicit axes only."""
    known = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else x.sharding
    spec = tuple(known.spec) if isinstance(known, NamedSharding) else ()
    return getattr(known, "mesh", None), (*spec, *[None] * (x.ndim - len(spec)))


def _taken(x: jax.Array, index: np.ndarray, axis: int, mesh: Any, spec: tuple[Any, ...]) -> jax.Array:
    """The tokens of `x` in the order of `index`, sharded like `x`. All-gathers tokens that explicit axes split."""
    tokens = (*[slice(None)] * axis, index)
    if mesh is None or mesh.empty:
        return x[tokens]
    if AxisType.Explicit not in mesh.axis_types:
        return x[tokens] if isinstance(x, jax.core.Tracer) else jax.device_put(x[tokens], x.sharding)
    whole, split = NamedSharding(mesh, P(*spec[:axis], None, *spec[axis + 1 :])), NamedSharding(mesh, P(*spec))
    return jax.sharding.reshard(jax.sharding.reshard(x, whole).at[tokens].get(out_sharding=whole), split)


def _zigzag(x: jax.Array, over: tuple[str, ...], ranks: int, axis: int, inverse: bool) -> jax.Array:
    """Each rank sends both halves of its shard. Rank r has halves 2r and 2r+1 in natural order, r and 2R-1-r in zigzag.

    One permute sends the half with the even number of every rank, another the half with the odd number. In zigzag
    order, an odd rank holds the half with the odd number first.
    """
    halves = jnp.split(x, 2, axis)
    odd_first = axes.coordinate(over) % 2 == 1

    def swapped(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.where(odd_first, b, a), jnp.where(odd_first, a, b)

    if inverse:
        halves = swapped(*halves)
    moved = []
    for parity, half in enumerate(halves):
        pairs = [(rank, min(2 * rank + parity, 2 * ranks - 1 - 2 * rank - parity)) for rank in range(ranks)]
        moved.append(axes.permuted(half, over, [(b, a) for a, b in pairs] if inverse else pairs))
    return jnp.concatenate(moved if inverse else swapped(*moved), axis)


def _striped(x: jax.Array, over: tuple[str, ...], ranks: int, axis: int, inverse: bool) -> jax.Array:
    """Each rank sends token i of its natural shard to rank i % R, which is right only if R divides the shard length."""
    shape = (*x.shape[:axis], *((x.shape[axis], 1) if inverse else (-1, ranks)), *x.shape[axis + 1 :])
    split, joined = (axis, axis + 1) if inverse else (axis + 1, axis)
    return jax.lax.all_to_all(x.reshape(shape), over, split, joined, tiled=True).reshape(x.shape)
