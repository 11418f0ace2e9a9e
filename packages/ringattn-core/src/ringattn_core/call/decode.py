# SPDX-License-Identifier: Apache-2.0
"""The function `decode_attention`: a few new tokens attend to a cache of keys that is sharded over a ring."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from typing_extensions import Unpack

from ..backends.discovery import Registration
from ..contract.call import Call
from ..errors import MeshError
from ..placement import arrays
from ..placement.arrays import Roles
from ..placement.mesh import of_context
from ..ring.cache import not_differentiable
from .cache import Lengths, attend, checked
from .dispatch import chosen
from .mesh_roles import named_roles, ranks_of, refuse_indivisible_axes
from .options import ARRAYS, CacheOptions
from .sharding import over_shards


def decode_attention(
    query: arrays.Query,
    key_cache: arrays.Key,
    value_cache: arrays.Value,
    lengths: Lengths | int,
    softmax_aux: arrays.Sinks | arrays.SharedSinks | None = None,
    *,
    mesh: Any = None,
    backend: Any = None,
    cfg: Any = None,
    **options: Unpack[CacheOptions],
) -> Any:
    """Causal attention of a few new tokens to a cache of keys and values that is sharded over a ring.

    No keys are sent: each rank attends to its own shard, and the ranks merge their partial results. Row `b` of the
    cache holds `lengths[b]` tokens, and the queries are the last of them, so write the keys and values of the new
    tokens to the cache first. Entries of the cache after these are masked out, but must be finite. A query with a
    negative position sees no key, and its output is 0.

    With `mesh`, or under `jax.set_mesh`, arrays are global and the cache is split over `axis_name`. Inside your own
    `jax.shard_map`, the cache is this rank's shard; all other arrays and the result are the same on all ranks of the
    ring.

    Args:
        query: The queries of the new tokens, `[B, T, N, H]`.
        key_cache: `[B, S, K, H]`, in the order of `layout`.
        value_cache: `[B, S, K, Hv]`.
        lengths: How many tokens each row of the cache holds, the new ones included: `[B]`, or one integer.
        softmax_aux: Attention sinks, as in `ring_attention`.
        mesh: The mesh over which the call splits its global arrays.
        backend: The name of a backend, or several names to try in order.
        cfg: A `RingAttentionConfig`, or a dict of its fields.
        **options: Options of `ring_attention` for masks by position, scores, axis names, layout, precision and
            `return_lse`; `ringattn_core.call.options.CacheOptions` lists their names.

    Returns:
        The output `[B, T, N, Hv]`. With `return_lse`, `(out, lse)` with `lse` `[B, N, T]` in float32.
    """
    given: dict[str, Any] = options | {"softmax_aux": softmax_aux, "mesh": mesh, "backend": backend, "cfg": cfg}
    call, first, mesh, backend = checked(decode_attention, query, key_cache, value_cache, lengths, given, sharded=False)
    positions = first[:, None] + jnp.arange(call.query.shape[1], dtype=jnp.int32)[None]
    call = not_differentiable(dataclasses.replace(call, q_positions=positions))
    registration = chosen(backend, call, mesh)
    return attend(registration, call) if mesh is None else _sharded(registration, call, of_context(mesh, call.query))


def _sharded(registration: Registration, call: Call, mesh: Any) -> Any:
    """The result of the call on global arrays. Only the cache is split over the ring."""
    roles = named_roles(call, mesh)
    refuse_indivisible_axes(call, mesh, roles)
    parts = ranks_of(mesh, roles.heads)
    if call.key.shape[2] % parts:
        raise MeshError(
            f"key_cache has heads {call.key.shape[2]}, which the {parts} ranks of mesh axes {roles.heads} do not "
            f"divide. Pass head_axis_name=() to leave heads whole, or another mesh"
        )
    whole = Roles(roles.batch, (), roles.heads)
    specs = {
        name: (roles if name in ("key", "value") else whole).spec(ARRAYS[name], x.shape)
        for name, x in call.arrays.items()
    }
    outputs = whole.spec(arrays.Output), whole.spec(arrays.LogSumExp)
    out, *lse = over_shards(attend, registration, dataclasses.replace(call, **roles.names), mesh, specs, outputs)
    return (out, *lse) if lse else out
