# SPDX-License-Identifier: Apache-2.0
"""The function `prefill_attention`: a chunk of queries attends to a longer cache. Either keys or queries travel."""

import dataclasses
from typing import Any, Final, Literal

from typing_extensions import Unpack

from ..contract.call import Call
from ..errors import InputError
from ..placement import arrays
from ..ring.cache import not_differentiable
from .cache import Lengths, attend, checked
from .dispatch import answer, chosen
from .options import CacheOptions
from .sharding import sharded

SENT: Final = ("auto", "keys", "queries")


def prefill_attention(
    query: arrays.Query,
    key_cache: arrays.Key,
    value_cache: arrays.Value,
    lengths: Lengths | int,
    softmax_aux: arrays.Sinks | arrays.SharedSinks | None = None,
    *,
    send: Literal["auto", "keys", "queries"] = "auto",
    mesh: Any = None,
    backend: Any = None,
    cfg: Any = None,
    **options: Unpack[CacheOptions],
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

    Args:
        query: The queries of the chunk, `[B, T, N, H]`, in the order of `layout`.
        key_cache: `[B, S, K, H]`, in the order of `layout`.
        value_cache: `[B, S, K, Hv]`.
        lengths: How many tokens each row of the cache holds, the chunk included: `[B]`, or one integer.
        softmax_aux: Attention sinks, as in `ring_attention`.
        send: "keys", "queries" or "auto".
        mesh: The mesh over which the call splits its global arrays.
        backend: The name of a backend, or several names to try in order.
        cfg: A `RingAttentionConfig`, or a dict of its fields.
        **options: Options of `ring_attention` for masks by position, scores, axis names, layout, precision and
            `return_lse`; `ringattn_core.call.options.CacheOptions` lists their names.

    Returns:
        The output `[B, T, N, Hv]`. With `return_lse`, `(out, lse)` with `lse` `[B, N, T]` in float32.
    """
    if send not in SENT:
        raise InputError("send", f"got {send!r}", f"Pass one of {', '.join(map(repr, SENT))}")
    given: dict[str, Any] = options | {"softmax_aux": softmax_aux, "mesh": mesh, "backend": backend, "cfg": cfg}
    call, first, mesh, backend = checked(prefill_attention, query, key_cache, value_cache, lengths, given, sharded=True)
    call = dataclasses.replace(call, query_offset=first)
    of_keys, of_queries = bytes_to_send(call)
    sends_queries = send == "queries" or (send == "auto" and of_queries < of_keys)
    work = answer
    if sends_queries and call.axis_name:  # on one device nothing travels
        work, call = attend, not_differentiable(call)
    if mesh is not None:
        return sharded(call, backend, mesh, None, None, work)
    return work(chosen(backend, call), call)


def bytes_to_send(call: Call) -> tuple[int, int]:
    """The bytes of the keys and values of a call, and those of its queries and their partial results.

    Whichever travels, a rank sends its share of them to each of the other ranks. Each head of a query sends back a
    float32 output, and its log-sum-exp takes part in a maximum (an all-reduce, which sends 4 bytes twice) and in a sum
    (4 bytes).
    """
    batch, tokens, heads, size = call.query.shape
    _, room, key_heads, value_size = call.value.shape
    bytes_of = call.query.dtype.itemsize
    of_keys = room * key_heads * (size + value_size) * bytes_of
    return batch * of_keys, batch * tokens * heads * (size * bytes_of + 4 * value_size + 12)
