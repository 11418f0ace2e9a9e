# SPDX-License-Identifier: Apache-2.0
"""Chooses keys: for each query, the blocks of keys whose index scores are highest (`select`)."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Float32, Int, Int32
from ringattn_core import ring_loop
from ringattn_core.errors import InputError

from . import launch, tiles
from . import selection_kernels as kernels
from .arguments import Blocks, Names, flag, function, index_arrays, whole
from .scores import (
    FLOAT32,
    NO_INDEX,
    Activation,
    activated,
    flat,
    indices_of_blocks,
    not_nan,
    products,
    relu,
    summed,
    visible,
)


def select(
    index_query: Float[Array, "B T I D"],
    index_key: Float[Array, "B S D"] | Float[Array, "B S groups D"],
    weights: Float[Array, "B T I"] | None = None,
    *,
    count: int,
    size: int = 1,
    groups: int = 1,
    pool: Literal["max", "mean"] = "max",
    causal: bool = False,
    forced: tuple[int, int] = (0, 0),
    activation: Activation = relu,
    q_segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    axis_name: Names = None,
    mesh: Mesh | AbstractMesh | None = None,
    layout: str = "contiguous",
) -> Int32[Array, "B T groups count"]:
    """For each query and group, the ids of the `count` blocks of keys with the highest scores, for `selected=`.

    The score of a key is the sum over the index heads of the group of `weights * activation(index_query · index_key)`,
    in float32. The score of a block is the highest score of a key that the query sees. A block of which the query sees
    no key is not chosen. Of equal scores the smaller id is chosen, so the result is the same for every ring, layout and
    order of hops. A score of NaN is the lowest. The ids have no gradient; `teach` trains the indexer.

    With `mesh`, or under `jax.set_mesh`, arrays are global; in your own `jax.shard_map`, they are this rank's shard.
    The lengths divide as `layout` needs.

    Args:
        index_query: The queries of the `I` index heads, in float32, float16 or bfloat16. A scale of the scores belongs
            into them, or into the weights.
        index_key: One key for all index heads, or one for each group.
        weights: The weight of each query's index heads; 1 by default.
        count: How many blocks each query and group chooses; at most as many as there are.
        size: The number of keys of a block, as `selected_size`: block `i` has the keys from `i * size` on.
        groups: The number of choices of each query. Group `g` has `I // groups` neighbouring index heads.
        pool: "max", or "mean": the score is that of the mean of the keys of a block, in float32. The mean leaves
            out padding alone: it has later keys, and those of other segments. So force the query's own block.
        causal: A query sees no key after it.
        forced: `(first, newest)`: so many first blocks of the sequence, and so many newest ones, the query's own block
            among them. They are chosen before all others, unless the query sees none of their keys, and count among
            `count`.
        activation: An elementwise function, by default `max(x, 0)`, or `None`: the products themselves. Pass the same
            function each time, since a new one compiles again.
        q_segment_ids: A query sees the keys with its own id; a negative id is padding.
        kv_segment_ids: If only one of the two is given, it serves both.
        axis_name: The mesh axes of the ring; `None` if the sequence is not split.
        mesh: The mesh over which the ring splits the global arrays.
        layout: The order of the tokens: "contiguous", "zigzag" or "striped", where `size` is 1. Ids count keys in
            natural order.

    Returns:
        The ids, in ascending order; -1 fills up.

    Raises:
        ringattn_core.errors.InputError: An argument has a wrong value.
        ringattn_core.errors.MeshError: The mesh or an axis name does not fit the call.
    """
    query, key, weights, groups = index_arrays(index_query, index_key, weights, groups)
    blocks = Blocks("size", size, key.shape[1], axis_name, layout)
    count = whole("count", count, 1)
    if count > blocks.count:
        fact = f"is {count}, but there are only {blocks.count} blocks of {blocks.size}"
        raise InputError("count", fact, f"Pass at most {blocks.count}")
    if pool not in ("max", "mean"):
        raise InputError("pool", f"got {pool!r}", "Pass 'max' or 'mean'")
    first, newest = _forced(forced, count)
    q_ids, kv_ids = blocks.segments(q_segment_ids, kv_segment_ids, query, key)
    key = blocks.split(key)
    causal, activation = flag("causal", causal), function("activation", activation)
    choice = Choice(count, blocks.size, groups, pool, causal, first, newest, activation)
    own = {"index_query": query, "weights": weights, "q_segment_ids": q_ids}
    travelling = {blocks.name: (_means(key, kv_ids) if pool == "mean" else key, kv_ids)}
    own, travelling = jax.lax.stop_gradient((own, travelling))
    best = ring_loop(choice, own, travelling, axis_name=axis_name, mesh=mesh, layout=layout)
    return _ascending(best)


class Best(NamedTuple):
    """The best blocks so far, the best first, and their scores; an empty place has the score -inf and `NO_INDEX`."""

    scores: Float32[Array, "B T G count"]
    ids: Int32[Array, "B T G count"]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The body of the ring: continues the best blocks of this rank's queries with the blocks of one shard."""

    count: int
    size: int
    groups: int
    pool: str
    causal: bool
    first: int
    newest: int
    activation: Activation

    def __call__(self, own: Any, theirs: Any, best: Best | None) -> Best:
        ((key, kv_ids),), blocks = theirs.arrays.values(), theirs.index
        query, weights, q_ids = (own.arrays[name] for name in ("index_query", "weights", "q_segment_ids"))
        (rows, length, heads, _), count = query.shape, min(self.count, blocks.size)
        kept, size = rows * self.groups * blocks.size, 1 if self.sees_starts(kv_ids) else self.size

        def over(of_queries: tiles.Cut, best_of: Callable[..., Best]) -> Callable[[], Best]:
            """The best blocks of all queries, one tile after another; `best_of` finds the best of this shard."""

            def continued(tile: Any) -> Best:
                *queries, index, best = tile
                return self.merged(best, best_of(*queries, index[0]))

            split = (query, weights, q_ids, own.index[None], best)
            return lambda: of_queries.joined(jax.lax.map(continued, of_queries.split(split)), length)

        of_queries, of_keys = tiles.cuts(length, blocks.size, size, rows * heads, kept, tiles.PLAIN)

        def by_tiles(*queries: Any) -> Best:
            keys = of_keys.split((key, kv_ids)), of_keys.split(blocks[None], -1)[:, 0]
            scores = jax.lax.map(lambda keys: self.scores(queries, *keys), keys)
            scores = jnp.moveaxis(scores, 0, 3)  # [B, G, t, tiles of keys, blocks]
            scores = jnp.swapaxes(scores.reshape(*scores.shape[:3], -1)[..., : blocks.size], 1, 2)
            # `top_k` prefers the earlier of equal entries, which has the smaller id.
            top, places = jax.lax.top_k(scores, count)
            return Best(top, jnp.where(top > -jnp.inf, blocks[places], NO_INDEX))

        def by_kernels(query: Any, weights: Any, q_ids: Any, index: Any) -> Best:
            found = kernels.best_blocks(
                query, weights, q_ids, index, key, kv_ids, blocks,
                groups=self.groups, count=count, causal=self.causal, activation=self.activation, ranked=self.ranked,
            )  # fmt: skip
            return Best(*found)

        plain = over(of_queries, by_tiles)
        if not kernels.fit(query, blocks.size, self.size, self.count, self.pool, self.activation):
            return plain()
        of_launches = tiles.Cut.of(length, max(tiles.PLAIN.entries // kept, kernels.QUERIES))
        return launch.on_cuda(over(of_launches, by_kernels), plain)

    def scores(self, queries: Any, keys: Any, blocks: Int32[Array, " n"]) -> Float32[Array, "B G t n"]:
        """The scores of some blocks for some queries; -inf for blocks of which the query sees no key."""
        (query, weights, q_ids, q_index), (key, kv_ids) = queries, keys
        starts = jnp.where(blocks < 0, -1, blocks * self.size)
        each = starts if self.sees_starts(kv_ids) else indices_of_blocks(blocks, self.size)

        def computed() -> jax.Array:
            seen = visible(self.causal, q_index, each, q_ids, flat(kv_ids))
            x = activated(self.activation, products(query, key if self.pool == "mean" else flat(key)))
            x = not_nan(summed(x, weights, self.groups))
            if self.pool == "mean":
                x = jnp.where(seen.reshape(*seen.shape[:3], blocks.size, -1).any(-1), x, -jnp.inf)
            else:
                x = jnp.where(seen, x, -jnp.inf).reshape(*x.shape[:3], blocks.size, self.size).max(-1)
            return self.ranked(x, q_index, blocks)

        near = (starts <= q_index.max()) & (starts >= 0) if self.causal else None
        nothing = jnp.full_like(jnp.swapaxes(query[:, :, : self.groups, :1], 1, 2), -jnp.inf, jnp.float32)
        return tiles.where_any(near, computed, jnp.repeat(nothing, blocks.size, 3))

    def sees_starts(self, kv_ids: Any) -> bool:
        """Whether scores are of whole blocks, and a query sees a block exactly if it sees its first key."""
        return self.pool == "mean" and kv_ids is None

    def ranked(
        self, x: Float32[Array, "... t n"], q_index: Int32[Array, " t"], blocks: Int32[Array, " n"]
    ) -> Float32[Array, "... t n"]:
        """Scores without -0.0, at most the largest float32, and `inf` for forced blocks that the query sees."""
        x = jnp.minimum(x, FLOAT32.max)
        x = jnp.where(x == 0, 0.0, x)  # of -0.0 and 0.0, a sort would take the latter to be larger
        if self.first + self.newest == 0:
            return x
        behind = (q_index // self.size)[:, None] - blocks[None]
        must = (blocks < self.first)[None] | ((behind >= 0) & (behind < self.newest))
        must = jax.lax.expand_dims(must, range(x.ndim - 2))
        return jnp.where(must & (x > -jnp.inf), jnp.inf, x)

    def merged(self, best: Best | None, new: Best) -> Best:
        """The best of the blocks so far and of new ones, each with the best first."""
        if best is None:
            missing = [(0, 0)] * 3 + [(0, self.count - new.ids.shape[-1])]
            fills = (-jnp.inf, NO_INDEX)
            return Best(*(jnp.pad(x, missing, constant_values=fill) for x, fill in zip(new, fills, strict=True)))
        both = [jnp.concatenate(pair, -1) for pair in zip(best, new, strict=True)]
        lowest_first, ids = jax.lax.sort((-both[0], both[1]), num_keys=2)
        return Best(-lowest_first[..., : self.count], ids[..., : self.count])


@jax.jit
def _ascending(best: Best) -> Int32[Array, "B T G count"]:
    ids = jnp.sort(best.ids, -1)
    return jnp.where(ids == NO_INDEX, -1, ids)


@jax.jit
def _means(key: Float[Array, "B blocks size G D"], ids: Int32[Array, "B blocks size"] | None) -> jax.Array:
    """The mean of the keys of each block, in float32, without padding."""
    real = jnp.ones(key.shape[:3], jnp.float32) if ids is None else (ids >= 0).astype(jnp.float32)
    sums = (key.astype(jnp.float32) * real[..., None, None]).sum(2)
    return sums / jnp.maximum(real.sum(2), 1.0)[..., None, None]


def _forced(forced: Any, count: int) -> tuple[int, int]:
    remedy = "Pass (first, newest): how many first blocks of the sequence, and how many newest ones"
    if not isinstance(forced, (tuple, list)) or len(forced) != 2:
        raise InputError("forced", f"got {forced!r}", remedy)
    first, newest = (whole("forced", x, 0) for x in forced)
    if first + newest > count:
        fact = f"is {first} first blocks and {newest} newest ones, more than count={count}"
        raise InputError("forced", fact, "Pass fewer, or a larger count")
    return first, newest
