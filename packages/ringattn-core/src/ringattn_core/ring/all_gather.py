# SPDX-License-Identifier: Apache-2.0
"""The strategy "all_gather": no hops. Each rank computes one block with the keys of all ranks, in natural order."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from ..placement import axes
from ..placement.layout import of_neighbours, to_neighbours
from .blocks import Ring
from .kv import KV, packed


def gathering(ring: Ring, body: Callable[..., Any]) -> Callable[..., Any]:
    """The body of the forward pass that gathers the keys of all ranks and calls `body` once with all of them."""
    return lambda kv, owner, partial: body(_all_keys(ring, kv), 0, partial)


def scattering(ring: Ring, body: Callable[..., Any]) -> Callable[..., Any]:
    """The body of the backward pass that calls `body` with all ranks' keys and reduce-scatters `dk` and `dv`.

    Keys are gathered again: keeping them from the forward pass would cost the memory of all shards.
    """

    def scatter(axis: int, x: jax.Array) -> jax.Array:
        in_rank_order = to_neighbours(x, ring.key_shards.layout, ring.query_shards.count, axis)
        return axes.scattered_sum(in_rank_order, ring.axis, ring.query_shards.count, ring.rank, axis)

    def once(kv: KV, owner: Any, sums: Any) -> tuple[KV, Any]:
        dkv, sums = body(_all_keys(ring, kv), 0, sums)
        return jax.tree.map(functools.partial(scatter, dkv.token_axis), dkv), sums

    return once


def _all_keys(ring: Ring, kv: KV) -> KV:
    kv = dataclasses.replace(packed(kv), received=True)
    return jax.tree.map(lambda x: of_all_ranks(ring, x, kv.token_axis), kv)


def of_all_ranks(ring: Ring, x: jax.Array, axis: int) -> jax.Array:
    """Gathers the shards of all ranks along `axis`: in natural order if `ring.all_gather`, else in rank order."""
    whole = axes.all_gathered(x, ring.axis, ring.query_shards.count, ring.rank, axis)
    return of_neighbours(whole, ring.key_shards.layout, ring.query_shards.count, axis) if ring.all_gather else whole
