# SPDX-License-Identifier: Apache-2.0
"""Sizes, coordinates and collectives of mesh axes, by name, inside a traced function."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from ..errors import MeshError

AxisName = str | Sequence[str] | None


def names(axis: AxisName, argument: str = "axis_name") -> tuple[str, ...]:
    """The axis names as a tuple, from `None`, one name, or a sequence of names."""
    if axis is None:
        return ()
    found = (axis,) if isinstance(axis, str) else tuple(axis) if isinstance(axis, Iterable) else (axis,)
    if not all(isinstance(name, str) for name in found) or len(set(found)) < len(found):
        raise MeshError(f"{argument}={axis!r} does not name mesh axes. Pass a name, or several different ones")
    return found


def size(axis: tuple[str, ...], argument: str = "axis_name") -> int:
    """The number of ranks along the product of the axes; they must be bound by a `shard_map` or a `vmap`."""
    return math.prod(_size_of(argument, name) for name in axis)


def _size_of(argument: str, name: str) -> int:
    try:
        return jax.lax.axis_size(name)
    except NameError:
        known = jax.sharding.get_abstract_mesh().manual_axes
        if known:
            raise MeshError(
                f"{argument}={name!r} is not an axis of the surrounding shard_map, whose axes are "
                f"{', '.join(map(repr, known))}. Pass one of them"
            ) from None
        raise MeshError(
            f"{argument}={name!r} is not an axis of any shard_map around this call. Pass mesh=, set it by "
            f"jax.set_mesh, or call inside a jax.shard_map over a mesh with that axis"
        ) from None


def bound(axis: tuple[str, ...]) -> bool:
    """Whether a surrounding `shard_map` or `vmap` binds all these axis names.

    In a backward pass the axis name of a `vmap` is not bound, although collectives over it work.
    """
    try:
        for name in axis:
            jax.lax.axis_size(name)
    except NameError:
        return False
    return True


def manual() -> frozenset[str]:
    """The mesh axes over which a surrounding `shard_map` is manual; empty outside a `shard_map`."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def tracked() -> frozenset[str]:
    """The `manual` axes for which JAX tracks which values vary over them: all under `check_vma=True`, else none."""
    return frozenset(name for name in manual() if name in varying(jax.lax.axis_index(name)))


def varying(x: Array) -> frozenset[str]:
    """The `tracked` mesh axes over which an array varies; none if `x` is no JAX array."""
    return frozenset(jax.typeof(x).manual_axis_type.varying if isinstance(x, jax.Array) else ())


def shared(x: Array, axis: tuple[str, ...]) -> Array:
    """`x`, which is equal on all ranks of `axis`, marked as varying. Its gradient is summed over the ranks in float32.

    Axes over which JAX does not track whether arrays vary are left out.

    XLA for CPUs aborts on a sum in bfloat16 where other mesh axes are automatic (benchmarks/upstream/bfloat16_sum.py).
    """
    missing = tuple(sorted((tracked() & {*axis}) - varying(x)))
    if not missing or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jax.lax.pcast(x.astype(jnp.float32), missing, to="varying").astype(x.dtype)


def coordinate(axis: tuple[str, ...]) -> Int32[Array, ""] | int:
    """This rank's number along the product of the axes; the first name varies slowest."""
    return jax.lax.axis_index(axis) if axis else 0


def all_gathered(x: Array, axis: tuple[str, ...], ranks: int, rank: Any, dim: int) -> Array:
    """The arrays `x` of all ranks, concatenated along axis `dim` in the order of `coordinate`; `rank` is this rank."""
    if bound(axis):
        return jax.lax.all_gather(x, axis, axis=dim, tiled=True)
    # In a backward pass JAX can sum over the axis name of a `vmap`, but not gather over it
    # (benchmarks/upstream/gather_in_backward.py).
    length = x.shape[dim]
    zeros = jnp.zeros((*x.shape[:dim], ranks * length, *x.shape[dim + 1 :]), x.dtype)
    return jax.lax.psum(jax.lax.dynamic_update_slice_in_dim(zeros, x, rank * length, dim), axis)


def scattered_sum(x: Array, axis: tuple[str, ...], ranks: int, rank: Any, dim: int) -> Array:
    """A reduce-scatter: this rank's share, along axis `dim`, of the sum of the arrays `x` of all ranks."""
    if bound(axis):
        return jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    length = x.shape[dim] // ranks
    return jax.lax.dynamic_slice_in_dim(jax.lax.psum(x, axis), rank * length, length, dim)


def pairs_of_shift(ranks: int, shift: int) -> list[tuple[int, int]]:
    """The sender and the receiver of each message, if every rank sends to the rank `shift` ranks onward."""
    return [(rank, (rank + shift) % ranks) for rank in range(ranks)]


def permuted(x: Array, axis: tuple[str, ...], pairs: Sequence[tuple[int, int]]) -> Array:
    """What this rank receives when the first rank of each pair sends `x` to the second.

    `coordinate` counts ranks in the order of the names given. `ppermute` of JAX 0.10 counts in the order of the mesh,
    and later versions refuse names in another order (benchmarks/upstream/permute_by_axis_order.py).
    """
    mesh_order = tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in axis)
    if len(axis) > 1 and set(mesh_order) == set(axis):
        sizes = [jax.lax.axis_size(name) for name in mesh_order]
        number = np.arange(math.prod(sizes)).reshape(sizes).transpose([mesh_order.index(name) for name in axis])
        pairs = [(int(number.flat[a]), int(number.flat[b])) for a, b in pairs]
        axis = mesh_order
    return jax.lax.ppermute(x, axis_name=axis, perm=pairs)
