# SPDX-License-Identifier: Apache-2.0
"""How adapters pass lengths and masks to `ring_attention`: as segment ids if they hide whole tokens, else densely.

Segment ids take memory proportional to the length, a dense mask to its square.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from ..placement import axes
from ..placement.layout import canonical, columns
from ..placement.reorder import to_layout


def with_hidden_tokens(
    options: Mapping[str, Any],
    shape: tuple[int, int, int],
    queries: Bool[Array, "b T_global"] | None,
    keys: Bool[Array, "b S_global"] | None,
) -> dict[str, Any]:
    """The options, with segment ids that hide every token whose entry in `queries` or `keys` is false.

    `queries` and `keys` are over the whole sequence, in natural order. `shape` is the batch and the lengths of this
    call. Other tokens keep the ids that the options give them.
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
        found[name] = ids if present is None else jnp.where(_local(present, options), ids, -1)
    return found


def global_length(local: int, options: Mapping[str, Any]) -> int:
    """The length of the whole sequence, given the length `local` of the arrays of a call with these options."""
    return local if options.get("mesh") is not None else local * _ranks(options)


def hides_whole_keys(mask: Bool[Array, "b n t s"], shape: tuple[int, int, int]) -> bool:
    """Whether a mask is equal for all heads and queries. `shape` is the batch, the queries and the keys."""
    batch, rows, columns = shape
    return mask.shape[1:] == (1, 1, columns) and mask.shape[0] in (1, batch) and rows > 1


def broadcast(x: jax.Array, rows: int | None, columns: int) -> jax.Array:
    """Broadcasts the key axis of a mask or bias [b, n, t, s] to `columns`, and its query axis to `rows` if given."""
    rows = rows if rows is not None and x.shape[2] == 1 else x.shape[2]
    return jnp.broadcast_to(x, (*x.shape[:2], rows, columns if x.shape[3] == 1 else x.shape[3]))


def _local(x: Bool[Array, "b S_global"], options: Mapping[str, Any]) -> Bool[Array, "b S"]:
    """The entries of the tokens in the call's arrays, in the order of its layout."""
    layout = canonical(options.get("layout", "contiguous"))
    if options.get("mesh") is not None:
        return to_layout(x, layout, _ranks(options), axis=-1)
    return columns(x, layout, _ranks(options), axes.coordinate(axes.names(options.get("axis_name"))))


def _ranks(options: Mapping[str, Any]) -> int:
    ring, mesh = axes.names(options.get("axis_name")), options.get("mesh")
    if mesh is None:
        return axes.size("axis_name", ring)
    return math.prod(dict(mesh.shape).get(name, 1) for name in ring)
