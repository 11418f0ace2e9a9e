# SPDX-License-Identifier: Apache-2.0
"""The functions `decode_attention` and `prefill_attention`: new tokens attend to a cache that a ring shares."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Int

from ..backends.discovery import Registration
from ..config import RingAttentionConfig, backend_and_params
from ..contract.call import ARRAYS, Call
from ..errors import InputError, MeshError
from ..integers import POSITION, as_int32
from ..placement import arrays
from ..placement.arrays import Roles
from ..placement.axes import AxisName
from ..placement.layout import refuse_indivisible
from ..placement.mesh import ranks_of
from ..strategies import cache
from ..tuning.choice import with_parameters
from .dispatch import answer, chosen
from .entry import entry
from .mesh_roles import named_roles, refuse_indivisible_axes, split_of_call
from .options import options_in
from .selected import refuse_straddling
from .sharding import call_over_shards, sharded
from .validation import fitted

Lengths = Int[jax.Array, " B"]
SENT: Final = ("auto", "keys", "queries")


@entry
def decode_attention(
    query: arrays.Query,
    key_cache: arrays.Key,
    value_cache: arrays.Value,
    lengths: Lengths | int | None = None,
    softmax_aux: arrays.Sinks | arrays.SharedSinks | None = None,
    *,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: arrays.PerHead | None = None,
    kv_positions: arrays.KeyPositions | None = None,
    kv_range: tuple[Any, Any] | None = None,
    selected: arrays.Selected | None = None,
    selected_size: int = 1,
    axis_name: AxisName = None,
    batch_axis_name: AxisName = None,
    head_axis_name: AxisName = None,
    mesh: Mesh | AbstractMesh | None = None,
    layout: str = "contiguous",
    precision: str | jax.lax.Precision | None = None,
    return_lse: bool = False,
    backend: str | Sequence[str] | None = None,
    cfg: RingAttentionConfig | dict[str, Any] | None = None,
) -> Any:
    """Causal attention of a few new tokens to a cache of keys and values that is sharded over a ring.

    No keys are sent: each rank attends to its own shard, and the ranks merge their partial results. Row `b` of the
    cache holds `lengths[b]` tokens, and the queries are the last of them, so write the keys and values of the new
    tokens to the cache first. Entries of the cache after these are masked out, but must be finite. A query with a
    negative position sees no key, and its output is 0.

    With `mesh`, or under `jax.set_mesh`, arrays are global and the cache is split over `axis_name`. Inside your own
    `jax.shard_map`, the cache is this rank's shard; all other arrays and the result are the same on all ranks of the
    ring.

    `sliding_window`, `chunk_size`, `softmax_scale`, `logits_soft_cap`, `alibi_slopes`, `axis_name`, `batch_axis_name`,
    `head_axis_name`, `layout`, `precision` and `return_lse` mean what they mean in `ring_attention`.

    Args:
        query: The queries of the new tokens, `[B, T, N, H]`.
        key_cache: `[B, S, K, H]`, in the order of `layout`.
        value_cache: `[B, S, K, Hv]`.
        lengths: How many tokens each row of the cache holds, the new ones included: `[B]`, or one integer.
        softmax_aux: Attention sinks, as in `ring_attention`.
        kv_positions: The position of the token in each entry of a rolling cache, `[S]` or `[B, S]`, split like the
            cache; a negative position marks an empty entry. `lengths` then count every token of a row, including tokens
            that newer ones have overwritten. By default entry `i` of the sequence holds token `i`.
        kv_range: The first and the last position that each query sees, as in `ring_attention`; still none after itself.
        selected: The entries of the cache, or blocks of them, that each query chooses, as in `ring_attention`: ids are
            indices in the cache, not positions.
        selected_size: As in `ring_attention`.
        mesh: The mesh over which the call splits its global arrays.
        backend: The name of a backend, or several names to try in order.
        cfg: A `RingAttentionConfig`, or a dict of its fields.

    Returns:
        The output `[B, T, N, Hv]`. With `return_lse`, `(out, lse)` with `lse` `[B, N, T]` in float32.
    """
    call, backend, mesh = _cache_call(locals(), whole_queries=True)
    registration, call = chosen(backend, call, mesh), cache.not_differentiable(call)
    if mesh is None:
        return _attend(registration, call)
    return _over_mesh(registration, call, mesh)


@entry
def prefill_attention(
    query: arrays.Query,
    key_cache: arrays.Key,
    value_cache: arrays.Value,
    lengths: Lengths | int | None = None,
    softmax_aux: arrays.Sinks | arrays.SharedSinks | None = None,
    *,
    send: Literal["auto", "keys", "queries"] = "auto",
    sliding_window: int | tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: arrays.PerHead | None = None,
    kv_positions: arrays.KeyPositions | None = None,
    kv_range: tuple[Any, Any] | None = None,
    selected: arrays.Selected | None = None,
    selected_size: int = 1,
    axis_name: AxisName = None,
    batch_axis_name: AxisName = None,
    head_axis_name: AxisName = None,
    mesh: Mesh | AbstractMesh | None = None,
    layout: str = "contiguous",
    precision: str | jax.lax.Precision | None = None,
    return_lse: bool = False,
    backend: str | Sequence[str] | None = None,
    cfg: RingAttentionConfig | dict[str, Any] | None = None,
) -> Any:
    """Causal attention of a chunk of new tokens to a cache of keys and values; both are sharded over a ring.

    Row `b` of the cache holds `lengths[b]` tokens, and the queries are the last of them, so write the keys and values
    of the chunk to the cache first. Entries of the cache after these are masked out, but must be finite. A query with a
    negative position sees no key, and its output is 0.

    `send="keys"` sends the cache round the ring, as `ring_attention` does. `send="queries"` leaves the cache where it
    is: each rank gets all queries, attends to its own shard, and sends the partial results back to be merged; that has
    no gradients. By default the call sends whichever is fewer bytes.

    With `mesh`, or under `jax.set_mesh`, arrays are global, and queries and caches are split over `axis_name`. Inside
    your own `jax.shard_map`, arrays are local, and `lengths` still count the tokens of all ranks.

    `sliding_window`, `chunk_size`, `softmax_scale`, `logits_soft_cap`, `alibi_slopes`, `axis_name`, `batch_axis_name`,
    `head_axis_name`, `layout`, `precision` and `return_lse` mean what they mean in `ring_attention`.

    Args:
        query: The queries of the chunk, `[B, T, N, H]`, in the order of `layout`.
        key_cache: `[B, S, K, H]`, in the order of `layout`.
        value_cache: `[B, S, K, Hv]`.
        lengths: How many tokens each row of the cache holds, the chunk included: `[B]`, or one integer.
        softmax_aux: Attention sinks, as in `ring_attention`.
        kv_positions: As in `decode_attention`. The cache must still hold what the first query of the chunk sees.
        kv_range: The first and the last position that each query sees, as in `ring_attention`; still none after itself.
        selected: The entries of the cache, or blocks of them, that each query chooses, as in `ring_attention`: ids are
            indices in the cache, not positions.
        selected_size: As in `ring_attention`.
        send: "keys", "queries" or "auto".
        mesh: The mesh over which the call splits its global arrays.
        backend: The name of a backend, or several names to try in order.
        cfg: A `RingAttentionConfig`, or a dict of its fields.

    Returns:
        The output `[B, T, N, Hv]`. With `return_lse`, `(out, lse)` with `lse` `[B, N, T]` in float32.
    """
    if send not in SENT:
        raise InputError("send", f"got {send!r}", f"Pass one of {', '.join(map(repr, SENT))}")
    call, backend, mesh = _cache_call(locals(), whole_queries=False)
    of_keys, of_queries = bytes_to_send(call)
    sends_queries = send == "queries" or (send == "auto" and of_queries < of_keys)
    work = answer
    if sends_queries and call.placement.axis_name:  # on one device nothing travels
        work, call = _attend, cache.not_differentiable(call)
    if mesh is not None:
        return sharded(call, backend, mesh, None, None, work)
    return work(chosen(backend, call), call)


def bytes_to_send(call: Call) -> tuple[int, int]:
    """The bytes of the keys and values of a call, and those of its queries and their partial results.

    A rank sends its share of the keys, or of the queries, to each of the other ranks. Each head of a query sends back a
    float32 output, and its log-sum-exp takes part in a maximum (an all-reduce, which sends 4 bytes twice) and in a sum
    (4 bytes).
    """
    batch, tokens, heads, size = call.query.shape
    _, room, key_heads, value_size = call.value.shape
    bytes_of = call.query.dtype.itemsize
    of_keys = room * key_heads * (size + value_size) * bytes_of
    return batch * of_keys, batch * tokens * heads * (size * bytes_of + 4 * value_size + 12)


class _CacheCall(NamedTuple):
    """A call in canonical form, the backend that it asks for, and its mesh, which is `None` if the arrays are local."""

    call: Call
    backend: Any
    mesh: Any


def _cache_call(variables: dict[str, Any], whole_queries: bool) -> _CacheCall:
    """Checks the arguments of a call to a cache. Raises if they do not fit.

    With `whole_queries`, every rank has all queries, and the call has their positions. Otherwise they are split like
    the cache, and the call has the position of each row's first query. These positions may be negative.
    """
    backend, params = backend_and_params(variables["cfg"], variables["backend"])
    # With an offset, `kv_positions` alone do not serve as positions of the queries too. The true offset follows below.
    given = options_in(variables) | params | {"causal": True, "query_offset": 0}
    operands = {name: variables[name] for name in ("query", "key_cache", "value_cache")}
    tokens_of = operands | {"kv_positions": variables["kv_positions"]}
    whole = ({"query": tokens_of.pop("query")} if whole_queries else {}) | {"lengths": variables["lengths"]}
    mesh, _, ranks = split_of_call(variables["mesh"], given, tokens_of, whole)
    call, sizes = fitted(operands, given, None if mesh is None else 1, whole_queries)
    (tokens, room), rows = sizes.lengths, call.query.shape[:1]
    if variables["lengths"] is None:
        raise InputError("lengths", "is missing", "Pass how many tokens each row of the cache holds")
    remedy = f"Pass lengths from 0 to {room}, the number of tokens that the cache has room for"
    if call.kv_positions is not None:  # a rolling cache has held more tokens than it has room for
        room, remedy = POSITION[1], "Pass lengths from 0 to 2^30 - 1: how many tokens each row has held"
    known = as_int32("lengths", variables["lengths"], (0, room, remedy))
    if known.shape not in ((), rows):
        raise InputError("lengths", f"has shape {known.shape}", f"Pass one integer, or {rows[0]}, one for each row")
    refuse_indivisible("key_cache", sizes.lengths[1], call.placement.layout, ranks)  # padding it would copy it all
    refuse_straddling(call, ranks, sizes.lengths[1] // ranks)
    if mesh is None and not whole_queries:
        refuse_indivisible("query", tokens, call.placement.layout, ranks)
    first = jnp.broadcast_to(known, rows) - tokens
    if whole_queries:
        positions = first[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
        call = dataclasses.replace(call, q_positions=positions, query_offset=None)
    else:
        call = dataclasses.replace(call, query_offset=first)
    if call.kv_positions is not None:  # no query comes after the last position, so an empty entry there is not seen
        held = jnp.where(call.kv_positions < 0, POSITION[1], call.kv_positions)
        call = dataclasses.replace(call, kv_positions=held)
    return _CacheCall(call, backend, mesh)


def _attend(registration: Registration, call: Call) -> Any:
    """The result of a call on local arrays, whose keys stay on their ranks while ranks merge partial results."""
    if registration.descriptor().kernel is None:
        function = "decode_attention" if call.query_offset is None else "prefill_attention with send='queries'"
        raise InputError(
            "backend",
            f"{registration.name!r} drives the ring itself, and {function} needs a kernel of one block",
            "Pass another backend",
        )
    call = call if call.check is None else call.check(call)
    result = cache.attend(registration.implementation(), with_parameters(registration, call))
    return (result.out, result.lse) if call.return_lse else result.out


def _over_mesh(registration: Registration, call: Call, mesh: Any) -> Any:
    """The result of a decoding call on global arrays: only the cache is split over the ring, queries are not."""
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
        name: (roles if name in ("key", "value", "kv_positions") else whole).spec(ARRAYS[name], x.shape)
        for name, x in call.arrays.items()
    }
    out, *lse = call_over_shards(_attend, registration, call.placed(**roles.names), mesh, specs, whole)
    return (out, *lse) if lse else out
