# SPDX-License-Identifier: Apache-2.0
"""Checks a call whose keys and values are a cache that is sharded over a ring, for decoding and for prefill."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Int
from typing_extensions import TypedDict

from ..backends.discovery import Registration
from ..contract.call import Call
from ..errors import InputError
from ..masks.int32 import as_int32
from ..placement import arrays, axes
from ..placement.layout import pieces, refuse_indivisible
from .attention import config_of
from .checks import Sizes
from .mesh_roles import check_mesh, mesh_of, ranks_of
from .options import DEFAULTS, OPTIONS, refuse_unknown
from .shard_map import own_key_heads, refuse_replicated, refuse_sharded, refuse_unnamed_axes
from .validation import check_operands, refuse_shared_axes

Lengths = Int[jax.Array, " B"]


class CacheOptions(TypedDict, total=False):
    """The keyword arguments of a call on a cache; they mean what they mean in `ring_attention`."""

    sliding_window: int | tuple[int | None, int | None] | None
    chunk_size: int | None
    logits_soft_cap: float | None
    softmax_scale: float | None
    alibi_slopes: arrays.Slopes | None
    axis_name: axes.AxisName
    batch_axis_name: axes.AxisName
    head_axis_name: axes.AxisName
    layout: str
    precision: Any
    return_lse: bool


def checked(
    function: Any, operands: dict[str, Any], lengths: Any, mesh: Any, cfg: Any, options: dict[str, Any], spread: bool
) -> tuple[Call, Any, Lengths]:
    """Returns the call in canonical form, its mesh, and the position of each row's first query, which may be negative.

    The call has no positions yet. The mesh is `None` where the arrays are local. Inside a `shard_map`, queries are
    sharded over the ring if `spread`, else whole. `operands` has the query and the caches, by the names for errors.
    """
    _refuse_unknown(function, options)
    config = config_of(cfg)
    given = {**options, "fwd_params": config.fwd_params, "bwd_params": config.bwd_params}
    mesh = mesh_of(mesh, options, operands.values())
    converted = {name: arrays.as_array(name, x) for name, x in operands.items()}
    names = ("axis_name", "batch_axis_name", "head_axis_name")
    ring, batch, heads = (axes.names(given.get(name), name) for name in names)
    refuse_shared_axes(ring, batch, heads)
    ranks, head_ranks = 1, 1
    if mesh is None:
        ranks, head_ranks = axes.size("axis_name", ring), axes.size("head_axis_name", heads)
        axes.size("batch_axis_name", batch)
        if heads and all(x.ndim == 4 for x in converted.values()):
            query, *caches = converted
            converted |= {name: own_key_heads(converted[query], converted[name], heads) for name in caches}
    check_operands(converted)
    q, k, v = converted.values()
    tokens, room = q.shape[1] * (ranks if spread else 1), k.shape[1] * ranks
    sizes = Sizes.of_operands(q, k, (tokens, room), head_ranks, heads if mesh is None else ())
    values = DEFAULTS | given | {"causal": True}
    call = Call(query=q, key=k, value=v, **{x.name: x.canonical(values[x.name], sizes) for x in OPTIONS})
    remedy = f"Pass lengths from 0 to {room}, the number of tokens that the cache has room for"
    known = as_int32("lengths", lengths, (0, room, remedy))
    if known.shape not in ((), q.shape[:1]):
        raise InputError("lengths", f"has shape {known.shape}", f"Pass one integer, or {q.shape[0]}, one for each row")
    if mesh is not None:
        check_mesh(call, mesh)
        _refuse_uneven_cache(call, ranks_of(mesh, ring))
    else:
        _check_shard(call, converted, known, ranks, spread)
    return call, mesh, jnp.broadcast_to(known, q.shape[:1]) - tokens


def refuse_ring_backend(function: str, registration: Registration) -> None:
    """Raises if the backend drives the ring itself, and so cannot compute the attention to one shard of the cache."""
    if registration.descriptor().kernel is None:
        raise InputError(
            "backend",
            f"{registration.name!r} drives the ring itself, and {function} needs a kernel of one block",
            "Pass another backend",
        )


def _refuse_unknown(function: Any, options: dict[str, Any]) -> None:
    """Raises for a keyword that the function does not take."""
    for name in ("causal", "is_causal"):
        if name in options:
            remedy = "Leave it out: attention to a cache is always causal"
            raise InputError(name, f"is no argument of {function.__name__}", remedy)
    named = [name for name in function.__annotations__ if name not in ("options", "return")]
    refuse_unknown(options, (*named, *CacheOptions.__annotations__), function.__name__)


def _check_shard(call: Call, operands: dict[str, jax.Array], lengths: jax.Array, ranks: int, spread: bool) -> None:
    """Raises if the arrays inside a `shard_map` are split or whole where they must not be."""
    _refuse_uneven_cache(call, 1)
    query, *caches = operands
    split, whole = caches, {"lengths": lengths}
    if spread:
        refuse_indivisible(query, call.query.shape[1] * ranks, call.layout, ranks)
        split = [query, *caches]
    else:
        whole |= {query: call.query}
    refuse_replicated(call, {name: operands[name] for name in split})
    refuse_sharded(call, whole)
    refuse_unnamed_axes(call)


def _refuse_uneven_cache(call: Call, ranks: int) -> None:
    """Raises unless the layout splits the cache evenly between the ranks. (Padding would copy the whole cache.)"""
    room, parts = call.key.shape[1], ranks * pieces(call.layout)
    if room % parts:
        raise InputError(
            "key_cache",
            f"has room for {room} tokens, which {call.layout!r} on {ranks} ranks cannot split into {parts}",
            f"Allocate {-(-room // parts) * parts}",
        )
