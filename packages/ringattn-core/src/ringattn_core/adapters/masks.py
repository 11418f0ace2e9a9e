# SPDX-License-Identifier: Apache-2.0
"""How adapters pass lengths and masks to `ring_attention`: as segment ids if they hide whole tokens, else densely.

Segment ids take memory proportional to the length, a dense mask to its square.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..call.checks import refuse_misfit
from ..masks.int32 import as_int32
from ..placement import arrays, axes
from ..placement.layout import canonical, columns
from ..placement.reorder import to_layout


def global_length(local: int, options: Mapping[str, Any]) -> int:
    """The length of the whole sequence, given the length `local` of the arrays of a call with these options."""
    return local if options.get("mesh") is not None else local * _ranks(options)


def with_masks(
    options: Mapping[str, Any],
    shape: tuple[int, int, int],
    bias: Float[Array, "b n t s"] | None,
    mask: Bool[Array, "b n t s"] | None,
    queries: Bool[Array, "b T_global"] | None = None,
    keys: Bool[Array, "b S_global"] | None = None,
) -> dict[str, Any]:
    """The options, with a bias and a mask that broadcast, and with ids that hide tokens.

    A token is hidden whose entry in `queries` or `keys` is false; these are over the whole sequence, in natural order.
    A mask that is equal for all heads and queries hides keys too. Other tokens keep the ids of the options. `shape` is
    the batch and the lengths of this call.
    """
    found, (batch, *lengths) = dict(options), shape
    columns = global_length(lengths[1], options)
    if bias is not None:
        found["bias"] = _broadcast(bias, bias.shape[2], columns)
    if mask is not None:
        of_keys = mask.shape[1:] == (1, 1, columns) and mask.shape[0] in (1, batch) and lengths[0] > 1
        if of_keys and mask.dtype == jnp.bool_:
            keys = mask[:, 0, 0] if keys is None else keys & mask[:, 0, 0]
        else:
            found["attention_mask"] = _broadcast(mask, lengths[0], columns)
    if queries is None and keys is None:
        return found
    names = ("q_segment_ids", "kv_segment_ids")
    given = [ids for ids in map(options.get, names) if ids is not None]
    if len(given) == 1 and lengths[0] != lengths[1]:
        return found  # `ring_attention` asks for the other ids
    given = given * 2 if len(given) == 1 else given or [jnp.zeros((batch, length), jnp.int32) for length in lengths]
    for name, ids, length, present in zip(names, given, lengths, (queries, keys), strict=True):
        ids = as_int32(name, ids)
        refuse_misfit(name, ids, arrays.QueryIds, {"B": batch, "T": length})
        found[name] = ids if present is None else jnp.where(_local(present, options), ids, -1)
    return found


def _broadcast(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """Broadcasts an axis of queries or keys of length 1 to `rows` and `columns`; other lengths stay, for the checks."""
    lengths = (full if n == 1 else n for n, full in zip(x.shape[2:], (rows, columns), strict=True))
    return jnp.broadcast_to(x, (*x.shape[:2], *lengths))


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
