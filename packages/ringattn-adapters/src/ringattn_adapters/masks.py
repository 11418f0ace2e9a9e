# SPDX-License-Identifier: Apache-2.0
"""Converts lengths, masks and biases of other libraries to options of `ring_attention`.

Lengths, and masks that hide whole tokens, become segment ids, which take memory proportional to the length; a dense
mask takes memory proportional to the length squared.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int
from ringattn_core import to_layout

from .options import integers

SEGMENT_IDS: Final = ("q_segment_ids", "kv_segment_ids")


class Ring(NamedTuple):
    """How ranks split the sequence of a call. `rank` is this rank's number, or `None` if arrays are global."""

    ranks: int
    rank: jax.Array | int | None

    def whole(self, length: int) -> int:
        """The length of the whole sequence, if an array in the call has `length` tokens."""
        return length if self.rank is None else length * self.ranks

    def shard(self, x: Bool[Array, "b S_global"], layout: str) -> Bool[Array, "b S"]:
        """The entries of `x`, over the whole sequence, for the tokens of the call's arrays, in layout order."""
        ordered = to_layout(x, layout, self.ranks, axis=-1, axis_name=())
        if self.rank is None:
            return ordered
        length = x.shape[-1] // self.ranks
        return jax.lax.dynamic_slice_in_dim(ordered, self.rank * length, length, -1)


def with_masks(
    options: Mapping[str, Any],
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    bias: Float[Array, "b n t s"] | None,
    mask: Bool[Array, "b n t s"] | None,
    lengths: tuple[Int[Array, " B"] | None, Int[Array, " B"] | None] = (None, None),
) -> dict[str, Any]:
    """`options`, extended by the options of `ring_attention` that express a bias, a mask and lengths.

    A bias and a mask broadcast. A mask that is equal for all heads and queries hides keys, as lengths do: by a negative
    segment id. Tokens that stay visible keep their ids from `options`. Lengths and a mask of keys are those of the
    whole sequence, in natural order, even if arrays are local.
    """
    found, ring = dict(options), _ring(options, query)
    batch, sizes = query.shape[0], (query.shape[1], key.shape[1])
    columns = ring.whole(sizes[1])
    visible = [
        None if ends is None else jnp.arange(ring.whole(size), dtype=jnp.int32)[None] < ends[:, None]
        for ends, size in zip(lengths, sizes, strict=True)
    ]
    if bias is not None:
        found["bias"] = _broadcast(bias, bias.shape[2], columns)
    if mask is not None:
        of_keys = mask.shape[1:] == (1, 1, columns) and mask.shape[0] in (1, batch) and sizes[0] > 1
        if of_keys and mask.dtype == jnp.bool_:
            visible[1] = mask[:, 0, 0] if visible[1] is None else visible[1] & mask[:, 0, 0]
        else:
            found["attention_mask"] = _broadcast(mask, sizes[0], columns)
    ids = [x for x in map(options.get, SEGMENT_IDS) if x is not None]
    if all(x is None for x in visible) or (len(ids) == 1 and sizes[0] != sizes[1]):
        return found  # in the second case `ring_attention` asks for the other ids
    ids = ids * 2 if len(ids) == 1 else ids or [jnp.zeros((batch, size), jnp.int32) for size in sizes]
    for name, x, size, seen in zip(SEGMENT_IDS, ids, sizes, visible, strict=True):
        x = integers(name, x, (batch, size))
        found[name] = x if seen is None else jnp.where(ring.shard(seen, options.get("layout", "contiguous")), x, -1)
    return found


def _broadcast(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """Broadcasts the last two axes, if of length 1, to `rows` queries and `columns` keys; other lengths stay."""
    lengths = (full if n == 1 else n for n, full in zip(x.shape[2:], (rows, columns), strict=True))
    return jnp.broadcast_to(x, (*x.shape[:2], *lengths))


def _ring(options: Mapping[str, Any], query: jax.Array) -> Ring:
    """The `Ring` of a call: arrays are local if a `shard_map` or `vmap` binds the ring's axis names, else global."""
    axis = options.get("axis_name")
    names = tuple(axis) if isinstance(axis, Sequence) and not isinstance(axis, str) else () if axis is None else (axis,)
    try:
        return Ring(math.prod(map(jax.lax.axis_size, names)), jax.lax.axis_index(names) if names else 0)
    except NameError:
        meshes = (options.get("mesh"), jax.typeof(query).sharding.mesh, jax.sharding.get_abstract_mesh())
        sizes = next((dict(m.shape) for m in meshes if isinstance(m, Mesh | AbstractMesh) and not m.empty), {})
        return Ring(math.prod(sizes.get(name, 1) for name in names), None)
