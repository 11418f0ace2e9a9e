# SPDX-License-Identifier: Apache-2.0
"""The kernels of `select` on NVIDIA GPUs: the scores of the blocks of a shard, and the best of these blocks.

The score of a key never leaves the registers of its program.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Int32

from . import launch
from .launch import padded
from .scores import NO_INDEX, Activation, activated, indices_of_blocks, not_nan

QUERIES: Final = 64
"""The queries of a program."""
KEYS: Final = 128
"""The keys of a tile: of one product of matrices."""
TILES: Final = 32
"""The most tiles of keys of a program."""
HELD: Final = 2**17
"""If the queries of a program have at most so many bytes, it loads them once, else once for each tile of keys."""
LARGE_MEMORY: Final = ("9.0", "10.0", "10.3")
"""The compute capabilities of the GPUs whose shared memory has room for `HELD`."""
IN_REGISTERS: Final = 2**14
"""The most scores that a program of `_choose` holds."""

Ranked = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""A function of scores `[t, n]`, the indices of the queries and the ids of the blocks, which returns final scores."""


def fit(query: Any, blocks: int, size: int, count: int, pool: str, activation: Activation) -> bool:
    """Whether the kernels take a call: with 16-bit index heads of 16, 32, 64 or 128, a `size` that divides 128, at most
    4,096 blocks a shard, a `count` up to 64, `pool="max"`, and `relu` or no activation.
    """
    blocks_fit = KEYS % size == 0 and blocks <= 4096 and count <= 64
    return launch.fits(activation, query) and blocks_fit and pool == "max"


def best_blocks(
    query: Float[Array, "B t I D"],
    weights: Float32[Array, "B t I"] | None,
    q_ids: Int32[Array, "B t"] | None,
    q_index: Int32[Array, " t"],
    key: Float[Array, "B n size K D"],
    kv_ids: Int32[Array, "B n size"] | None,
    blocks: Int32[Array, " n"],
    *,
    groups: int,
    count: int,
    causal: bool,
    activation: Activation,
    ranked: Ranked,
) -> tuple[Float32[Array, "B t G count"], Int32[Array, "B t G count"]]:
    """The highest scores of each query and group, the highest first, and the ids of their blocks.

    Of equal scores, the smaller id comes first. Blocks without a key that the query sees have the score -inf and the id
    `NO_INDEX`. `blocks` ascend.
    """
    (rows, length, heads, dim), (size, key_heads) = query.shape, key.shape[2:4]
    query, weights, q_ids, q_index = (padded(x, QUERIES) for x in (query, weights, q_ids, q_index[None]))
    key, kv_ids = (padded(x if x is None else x.reshape(rows, -1, *x.shape[3:]), KEYS) for x in (key, kv_ids))
    key_index = padded(indices_of_blocks(blocks, size)[None], KEYS, NO_INDEX)
    tokens, keys, of_group = query.shape[1], key.shape[1], heads // groups
    capacity = pl.next_power_of_2(keys // KEYS) * (KEYS // size)
    blocks = padded(blocks[None], capacity, NO_INDEX)
    limit = q_index if causal else jnp.full_like(q_index, NO_INDEX - 1)
    # How many tiles of keys a program sees. Keys ascend: who does not see the first key of a tile sees none of it.
    near = (key_index[:, ::KEYS] <= limit.reshape(-1, QUERIES).max(1)[:, None]).sum(1, dtype=jnp.int32)
    tiles, parts = tokens // QUERIES, pl.cdiv(capacity * size, TILES * KEYS)
    (scores,) = launch.launch(
        functools.partial(
            _score,
            size=size,
            held=of_group * QUERIES * dim * 2 <= HELD and launch.capability() in LARGE_MEMORY,
            activation=activation,
            ranked=ranked,
        ),
        (tiles, parts, groups, rows),
        [
            (query, (None, QUERIES, of_group, dim), lambda tile, _, group, row: (row, tile, group, 0)),
            (weights, (None, QUERIES, of_group), lambda tile, _, group, row: (row, tile, group)),
            (q_ids, (None, QUERIES), lambda tile, _, group, row: (row, tile)),
            (q_index, (None, QUERIES), lambda tile, _, group, row: (0, tile)),
            (limit, (None, QUERIES), lambda tile, _, group, row: (0, tile)),
            (near, (1,), lambda tile, _, group, row: (tile,)),
            (key, (None, keys, None, dim), lambda tile, _, group, row: (row, 0, group % key_heads, 0)),
            (kv_ids, (None, keys), lambda tile, _, group, row: (row, 0)),
            (key_index, (None, keys), lambda tile, _, group, row: (0, 0)),
            (blocks, (None, capacity), lambda tile, _, group, row: (0, 0)),
        ],
        [
            (
                ((rows, groups, capacity, tokens), jnp.float32),
                (None, None, capacity, QUERIES),
                lambda tile, _, group, row: (row, group, 0, tile),
            )
        ],
    )
    queries = min(IN_REGISTERS // capacity, QUERIES)
    top, ids = launch.launch(
        functools.partial(_choose, count=count),
        (tokens // queries, 1, groups, rows),
        [
            (scores, (None, None, capacity, queries), lambda tile, _, group, row: (row, group, 0, tile)),
            (blocks, (None, capacity), lambda tile, _, group, row: (0, 0)),
        ],
        [
            (
                ((rows, groups, count, tokens), dtype),
                (None, None, count, queries),
                lambda tile, _, group, row: (row, group, 0, tile),
            )
            for dtype in (jnp.float32, jnp.int32)
        ],
    )
    return jnp.moveaxis(top, 3, 1)[:, :length], jnp.moveaxis(ids, 3, 1)[:, :length]


def _score(part: Any, *refs: Any, size: int, held: bool, activation: Activation, ranked: Ranked) -> None:
    """The scores `[blocks, QUERIES]` of `TILES` tiles of keys, for a group of index heads.

    `limit` is the last index that a query sees, and `near` the number of tiles that some query of the program sees.
    """
    query, weights, q_ids, q_index, limit, near, key, kv_ids, key_index, blocks, out = refs
    heads, of_tile = query.shape[1], KEYS // size

    def of_head(head: Any) -> tuple[jax.Array, Any]:
        return query[:, head, :], None if weights is None else weights[:, head][:, None]

    known = [of_head(head) for head in range(heads)] if held else None

    def tile(number: Any, _: None) -> None:
        at, places = pl.ds(number * KEYS, KEYS), pl.ds(number * of_tile, of_tile)
        keys = key[at, :].T

        def add(head: Any, sums: jax.Array) -> jax.Array:
            q, weight = known[head] if known else of_head(head)
            x = activated(activation, jnp.dot(q, keys, preferred_element_type=jnp.float32))
            return sums + (x if weight is None else x * weight)

        x = jnp.zeros((QUERIES, KEYS), jnp.float32)
        if known:  # unrolled, so that the queries and weights stay where they are
            for head in range(heads):
                x = add(head, x)
        else:
            x = jax.lax.fori_loop(0, heads, add, x)
        seen = key_index[at][None] <= limit[...][:, None]
        if q_ids is not None:
            ids = kv_ids[at][None]
            seen &= (ids == q_ids[...][:, None]) & (ids >= 0)
        x = jnp.where(seen, not_nan(x), -jnp.inf)
        # Triton would move a whole tile between threads for the reshape.
        x = x.max(1, keepdims=True) if of_tile == 1 else x.reshape(QUERIES, of_tile, size).max(2)
        out[places, :] = ranked(x, q_index[...], blocks[places]).T

    def unseen(number: Any, _: None) -> None:
        out[pl.ds(number * of_tile, of_tile), :] = jnp.full((of_tile, QUERIES), -jnp.inf)

    first = part * TILES
    last = jnp.minimum(first + TILES, out.shape[0] // of_tile)
    until = jnp.clip(near[0], first, last)
    jax.lax.fori_loop(first, until, tile, None)
    jax.lax.fori_loop(until, last, unseen, None)


def _choose(_: Any, scores: Any, blocks: Any, top: Any, ids: Any, *, count: int) -> None:
    """The `count` highest of the scores `[blocks, queries]`, and their ids, `[count, queries]`."""
    blocks = blocks[...][:, None]

    def one(place: Any, x: jax.Array) -> jax.Array:
        highest = x.max(0)
        chosen = jnp.where(x == highest[None], blocks, NO_INDEX).min(0)
        top[place, :] = highest
        ids[place, :] = jnp.where(highest > -jnp.inf, chosen, NO_INDEX)
        return jnp.where(blocks == chosen[None], -jnp.inf, x)

    jax.lax.fori_loop(0, count, one, scores[...])
