# SPDX-License-Identifier: Apache-2.0
"""Moves the tokens of an array from natural order to the order of a layout, and back."""

import functools
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..errors import InputError, MeshError
from ..integers import whole
from . import axes
from .arrays import as_array
from .layout import Shards, canonical, of_neighbours, refuse_indivisible, to_neighbours
from .mesh import explicit_spec, over_shards, ranks_of, sharding_of
from .split import Split, split_of


def to_layout(
    x: Any,
    layout: str,
    ring_size: int | None = None,
    axis: int = 1,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    axis_name: axes.AxisName = None,
) -> Any:
    """Reorders an axis from natural order, so that an even split over the ring gives each rank its tokens.

    `from_layout` is the inverse. If the axis is split over `ring_size` devices, each token moves once, to its device.
    For global arrays, not in your own `jax.shard_map`, where a rank has only its shard. Differentiable.

    Args:
        x: An array of NumPy or JAX with an axis of tokens: queries, keys, ids, positions, labels.
        layout: "zigzag" (or its other name "dual_chunk_swap"), "striped", or "contiguous", which changes nothing.
        ring_size: The number of ranks of the ring; by default that of `axis_name`.
        axis: The axis of tokens.
        mesh: The mesh of `axis_name`, by default that of `jax.set_mesh`.
        axis_name: The mesh axis, or axes, that split the axis of tokens: the ring. Name it under `jax.jit` with
            automatic mesh axes: JAX does not tell how they split an array, and XLA may gather the whole sequence.
            (In striped order, XLA still gathers what other automatic axes split.) `()` means none, which a call in a
            `jax.shard_map` over other axes says.
    """
    return _reorder(x, layout, ring_size, axis, (mesh, axis_name), inverse=False)


def from_layout(
    x: Any,
    layout: str,
    ring_size: int | None = None,
    axis: int = 1,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    axis_name: axes.AxisName = None,
) -> Any:
    """Reorders an axis back to natural order; the inverse of `to_layout`, and differentiable like it.

    Args:
        x: An array in the order of the layout.
        layout: As in `to_layout`.
        ring_size: The number of ranks of the ring; by default that of `axis_name`.
        axis: The axis of tokens.
        mesh: As in `to_layout`.
        axis_name: As in `to_layout`.
    """
    return _reorder(x, layout, ring_size, axis, (mesh, axis_name), inverse=True)


def _reorder(x: Any, layout: str, ring_size: Any, axis: Any, ring: tuple[Any, axes.AxisName], inverse: bool) -> Any:
    layout, (mesh, axis_name) = canonical(layout), ring
    x = x if isinstance(x, np.ndarray) else as_array("x", x)
    axis = whole("axis", axis, -x.ndim, x.ndim - 1, f"Pass the axis of the sequence, below {x.ndim}") % x.ndim
    known = explicit_spec(x)[axis : axis + 1] if axis_name is None else ()
    given = {"axis_name": axis_name if not known or known[0] is None else known[0]}
    split = split_of(mesh, given, {"x": x}, axis=axis, only_global="from_layout" if inverse else "to_layout")
    if mesh is not None and not split.ring:
        raise MeshError("axis_name is missing. Say which axis of the mesh splits the sequence")
    ranks, remedy = ring_size, "Pass the number of ranks, 1 or more"
    if axes.names(axis_name):
        ranks, remedy = split.ranks, f"Pass {split.ranks}, the ranks of axis_name={split.ring}"
    ring_size = whole("ring_size", ranks if ring_size is None else ring_size, 1, remedy=remedy)
    if ring_size != ranks:
        raise InputError("ring_size", f"got {ring_size!r}", remedy)
    if layout == "contiguous":
        return x
    refuse_indivisible("x", x.shape[axis], layout, ring_size)
    if isinstance(x, np.ndarray):
        index = Shards(layout, ring_size).order(x.shape[axis])
        return np.take(x, np.argsort(index, kind="stable") if inverse else index, axis)
    mesh, spec = _mesh_and_spec(x, axis, split)
    over, length = axes.names(spec[axis]), x.shape[axis] // ring_size
    if not over or ranks_of(mesh, over) != ring_size or (layout == "striped" and length % ring_size):
        return _rearranged(x, (layout, ring_size, axis, inverse), mesh, spec)
    exchange = _zigzag if layout == "zigzag" else _striped
    return over_shards(exchange, (over, ring_size, axis, inverse), mesh, (P(*spec),), x)


def _mesh_and_spec(x: jax.Array, axis: int, split: Split) -> tuple[Any, list[Any]]:
    """The mesh and the spec of an array, with the ring of `split` for its `axis` if the ring's axes are automatic."""
    known = sharding_of(x)
    spec = [*known.spec] if isinstance(known, NamedSharding) else []
    spec += [None] * (x.ndim - len(spec))
    kinds = {} if split.mesh is None else dict(zip(split.mesh.axis_names, split.mesh.axis_types, strict=True))
    if not split.ring or any(kinds[name] != AxisType.Auto for name in split.ring):
        return getattr(known, "mesh", None), spec
    return split.mesh, [*spec[:axis], split.ring, *spec[axis + 1 :]]


def _rearranged(x: jax.Array, of: tuple[str, int, int, bool], mesh: Any, spec: list[Any]) -> jax.Array:
    """The tokens of `x` in the other order, sharded like `x`. All-gathers tokens that explicit axes split."""
    layout, ring_size, axis, inverse = of
    move = functools.partial(of_neighbours if inverse else to_neighbours, layout=layout, shards=ring_size, axis=axis)
    if mesh is None or mesh.empty:
        return move(x)
    if AxisType.Explicit not in mesh.axis_types:
        return move(x) if isinstance(x, jax.core.Tracer) else jax.device_put(move(x), x.sharding)
    whole, split = NamedSharding(mesh, P(*spec[:axis], None, *spec[axis + 1 :])), NamedSharding(mesh, P(*spec))
    return jax.sharding.reshard(move(jax.sharding.reshard(x, whole)), split)


def _zigzag(over: tuple[str, ...], ranks: int, axis: int, inverse: bool, x: jax.Array) -> jax.Array:
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


def _striped(over: tuple[str, ...], ranks: int, axis: int, inverse: bool, x: jax.Array) -> jax.Array:
    """Each rank sends token i of its natural shard to rank i % R, which is right only if R divides the shard length."""
    shape = (*x.shape[:axis], *((x.shape[axis], 1) if inverse else (-1, ranks)), *x.shape[axis + 1 :])
    split, joined = (axis, axis + 1) if inverse else (axis + 1, axis)
    return jax.lax.all_to_all(x.reshape(shape), over, split, joined, tiled=True).reshape(x.shape)
