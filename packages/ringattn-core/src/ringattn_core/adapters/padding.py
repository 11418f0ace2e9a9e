# SPDX-License-Identifier: Apache-2.0
"""Which tokens are padding, where lengths or a mask over the keys alone say it: they belong to no segment.

Segment ids take memory of the length; the same as a dense mask takes its square.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from ..placement import axes
from ..placement.layout import canonical, columns, to_layout


def hidden(
    options: Mapping[str, Any],
    shape: tuple[int, int, int],
    queries: Bool[Array, "b T_global"] | None,
    keys: Bool[Array, "b S_global"] | None,
) -> dict[str, Any]:
    """The options, with segment ids by which only the tokens told present see and are seen.

    Presence is told in natural order over the whole sequence; `shape` is the batch and the lengths of this call. Ids
    that the options have already stay where a token is present.
    """
    found = dict(options)
    batch, *lengths = shape
    names = ("q_segment_ids", "kv_segment_ids")
    given = [options.get(name) for name in names]
    alone = sum(ids is None for ids in given) == 1
    if (queries is None and keys is None) or (alone and lengths[0] != lengths[1]):
        return found
    if alone:
        given = [ids for ids in given if ids is not None] * 2
    for name, ids, length, present in zip(names, given, lengths, (queries, keys), strict=True):
        ids = jnp.zeros((batch, length), jnp.int32) if ids is None else jnp.asarray(ids)
        found[name] = ids if present is None else jnp.where(_held(present, options), ids, -1)
    return found


def whole(length: int, options: Mapping[str, Any]) -> int:
    """How long the sequence is of which a call with these options holds `length` tokens."""
    return length if options.get("mesh") is not None else length * _ranks(options)


def _held(x: Bool[Array, "b S_global"], options: Mapping[str, Any]) -> Bool[Array, "b S"]:
    """The entries of the tokens that the call holds, in the order of its layout."""
    layout = canonical(options.get("layout", "contiguous"))
    if options.get("mesh") is not None:
        return to_layout(x, layout, _ranks(options), axis=-1)
    return columns(x, layout, _ranks(options), axes.coordinate(axes.names(options.get("axis_name"))))


def _ranks(options: Mapping[str, Any]) -> int:
    ring, mesh = axes.names(options.get("axis_name")), options.get("mesh")
    if mesh is None:
        return axes.size("axis_name", ring)
    return math.prod(dict(mesh.shape).get(name, 1) for name in ring)


def of_keys(mask: jax.Array, shape: tuple[int, int, int]) -> bool:
    """Whether a mask [b, n, t, s] speaks of keys alone, for a batch and lengths of this `shape`."""
    batch, rows, columns = shape
    return mask.shape[1:] == (1, 1, columns) and mask.shape[0] in (1, batch) and rows > 1


def spread(x: jax.Array, rows: int | None, columns: int) -> jax.Array:
    """A mask or bias [b, n, t, s] with `columns`, and `rows` where that is a number, in place of an axis of size 1."""
    rows = rows if rows is not None and x.shape[2] == 1 else x.shape[2]
    return jnp.broadcast_to(x, (*x.shape[:2], rows, columns if x.shape[3] == 1 else x.shape[3]))
