# SPDX-License-Identifier: Apache-2.0
"""Trains an indexer: how far its distribution over the keys is from that of the attention, with gradients (`teach`).

For a query `t` and a group of heads, attention gives the key `j` the weight `P_j = Σ_n exp(s_nj - lse_n)`, summed over
the query heads `n` of the group. With `Z = Σ_j P_j`, its distribution is `p = P / Z`. The indexer's distribution is the
softmax of the index scores `I`. Both are over the keys that the query sees, or that it has chosen among them. Then

    KL(p || softmax(I)) = Σ_j p_j (ln P_j - I_j) - ln Z + ln Σ_j exp(I_j)
    dKL / dI_j = softmax(I)_j - p_j

The first round over the ring sums what the loss needs. The second knows `Z` and the log-sum-exp of the index scores,
and computes the gradients; those of the index keys follow the keys home.
"""

import dataclasses
import functools
import math
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Float32, Int
from ringattn_core import ring_loop
from ringattn_core.contract.varying import align, axes_of
from ringattn_core.errors import InputError

from . import teaching_kernels as kernels
from . import tiles
from .arguments import Blocks, Names, flag, floats, function, index_arrays, integers, ranks_here, refuse_undivided
from .divergence import Sums, dproducts_of, dscores_of
from .launch import on_cuda
from .scores import Activation, activated, flat, indices_of_blocks, product, products, relu, summed, visible


def teach(
    index_query: Float[Array, "B T I D"],
    index_key: Float[Array, "B S D"] | Float[Array, "B S groups D"],
    weights: Float[Array, "B T I"] | None,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    lse: Float32[Array, "B N T"],
    *,
    groups: int = 1,
    selected: Int[Array, "B T choices n"] | None = None,
    selected_size: int = 1,
    causal: bool = False,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    activation: Activation = relu,
    q_segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    axis_name: Names = None,
    mesh: Mesh | AbstractMesh | None = None,
    layout: str = "contiguous",
) -> Float32[Array, ""]:
    """The loss that trains an indexer: the mean over queries of `KL(p || softmax(I))`, where `I` are index scores.

    `p` is how attention weighs the keys, the sum over the query heads of a group, normalised. Both distributions are
    over the keys that the query sees and, with `selected`, has chosen. Index scores are those of `select`. The mean is
    over the groups, and over the queries for which attention gives some of these keys a weight.

    Gradients reach `index_query`, `index_key` and `weights` alone; all other arrays count as constants. In your own
    `jax.shard_map`, the mean is over the queries of the ring: as of any loss, take the mean over a mesh axis that
    splits the batch yourself.

    Args:
        index_query: As in `select`.
        index_key: As in `select`.
        weights: As in `select`; `None` is 1.
        query: The queries of the attention.
        key: The keys of the attention; with latents (MLA), the latents as one key head, and queries that are multiplied
            by the up-projection.
        lse: What `ring_attention(..., return_lse=True)` returned for these queries and keys. Its sum may be over other
            keys too, and over sinks: `p` is normalised again.
        groups: The number of groups of heads, each with a distribution. Group `g` has `I // groups` neighbouring index
            heads and `N // groups` neighbouring query heads.
        selected: The ids that `select` returned: the choices of each group, or one for all. By default, the
            distributions are over all keys that a query sees.
        selected_size: As in `ring_attention`.
        causal: As in the attention.
        softmax_scale: As in the attention.
        logits_soft_cap: As in the attention.
        activation: As in `select`.
        q_segment_ids: As in the attention.
        kv_segment_ids: If only one of the two is given, it serves both.
        axis_name: The mesh axes of the ring; `None` if the sequence is not split.
        mesh: The mesh over which the ring splits the global arrays.
        layout: As in `ring_attention`.

    Raises:
        ringattn_core.errors.InputError: An argument has a wrong value.
        ringattn_core.errors.MeshError: The mesh or an axis name does not fit the call.
    """
    index_query, index_key, weights, groups = index_arrays(index_query, index_key, weights, groups)
    query, key, lse = _attention_arrays(query, key, lse, groups, index_query, index_key)
    blocks = Blocks("selected_size", selected_size, key.shape[1], axis_name, layout)
    if selected is None and blocks.size > 1:
        raise InputError("selected_size", f"is {blocks.size}, but there is no selected", "Pass the ids too")
    if selected is not None:
        selected = _ids(selected, groups, query, blocks)
    q_ids, kv_ids = blocks.segments(q_segment_ids, kv_segment_ids, query, key)
    softmax_scale = _number("softmax_scale", softmax_scale, 1 / math.sqrt(query.shape[-1]))
    cap = None if logits_soft_cap is None else _number("logits_soft_cap", logits_soft_cap)
    causal, activation = flag("causal", causal), function("activation", activation)
    lesson = Lesson(blocks.size, groups, causal, softmax_scale, cap, activation, str(index_query.dtype))
    constants = {"query": query, "lse": jnp.swapaxes(lse, 1, 2), "selected": selected, "q_segment_ids": q_ids}
    passing = blocks.split(key), kv_ids
    constants, passing = jax.lax.stop_gradient((constants, passing))
    own = {"index_query": index_query, "weights": weights} | constants
    travelling = {blocks.name: (blocks.split(index_key), *passing)}
    # JAX then sums the gradient of an array that is the same on several ranks of a `shard_map`.
    own, travelling = align((own, travelling), axes_of(own, travelling))
    axes = tuple(axis_name) if isinstance(axis_name, list) else axis_name
    sums: Any = _divergence(lesson, (axes, mesh, layout), own, travelling)
    total, count = jax.lax.psum(sums, axes) if ranks_here(axes) else sums
    return total / jnp.maximum(count, 1.0)


class Pairs(NamedTuple):
    """A tile of queries and keys."""

    seen: Bool[Array, "B G t s"]
    products: Float32[Array, "B I t s"]
    """Of index queries and keys; 0 where a pair is not seen."""
    scores: Float32[Array, "B G t s"]
    """The index scores; 0 where a pair is not seen."""
    weight: Float32[Array, "B G t s"]
    """`P`, the weight in the attention; 0 where a pair is not seen."""


@dataclasses.dataclass(frozen=True)
class Lesson:
    """What is known when the program is traced, and what the bodies of both rounds share."""

    size: int
    groups: int
    causal: bool
    scale: float
    cap: float | None
    activation: Activation
    dtype: str
    """Of the index queries and keys."""

    def __call__(self, own: Any, theirs: Any, so_far: Any) -> Any:
        """By kernels in programs for NVIDIA GPUs, if they take the call; else by plain JAX."""
        plain, by_kernels = (functools.partial(self.hop, own, theirs, so_far, x) for x in (False, True))
        (_, key, _), queries = next(iter(theirs.arrays.values())), own.arrays
        like = jax.eval_shape(flat, key)
        fit = kernels.fit(queries["index_query"], queries["query"], like, self.groups, self.activation)
        return on_cuda(by_kernels, plain) if fit else plain()

    def hop(self, own: Any, theirs: Any, so_far: Any, by_kernels: bool) -> Any:
        raise NotImplementedError

    def tiled(self, own: Any, theirs: Any, by_kernels: bool) -> tuple[Any, tiles.Cut, Any, tiles.Cut]:
        """The tiles of queries and of keys, stacked, each with how they are cut."""
        queries, blocks = dict(own.arrays) | {"index": own.index[None]}, theirs.index
        batch, length, heads, _ = queries["query"].shape
        choices = 0 if queries["selected"] is None else queries["selected"].shape[2]
        heads = batch * (self.groups if by_kernels else max(heads, queries["index_query"].shape[2]))
        limits = kernels.LAUNCH if by_kernels else tiles.PLAIN
        kept = batch * choices * (blocks.size + 1)
        of_queries, of_keys = tiles.cuts(length, blocks.size, self.size, heads, kept, limits)
        (arrays,) = theirs.arrays.values()
        keys = of_keys.split(arrays), of_keys.split(blocks[None], -1)[:, 0]
        return of_queries.split(queries), of_queries, keys, of_keys

    def chosen(self, queries: Any, theirs: Any, of_keys: tiles.Cut) -> Bool[Array, "tiles B blocks choices t"] | None:
        """Which blocks of these keys each query of a tile has chosen, by tiles of keys; `None` without a choice."""
        ids, blocks = queries["selected"], theirs.index
        if ids is None:
            return None
        place = jnp.full(theirs.total + 1, blocks.size, jnp.int32).at[blocks].set(jnp.arange(blocks.size))
        ids = jnp.moveaxis(jnp.where((ids < 0) | (ids > theirs.total), theirs.total, ids), 2, 1)
        rows = place[ids].reshape(-1, ids.shape[-1])
        table = jnp.zeros((len(rows), blocks.size + 1), bool).at[jnp.arange(len(rows))[:, None], rows].set(True)
        return of_keys.split(jnp.moveaxis(table[:, :-1].reshape(*ids.shape[:3], -1), 3, 1))

    def some(self, queries: Any, blocks: jax.Array, chosen: jax.Array | None) -> jax.Array | None:
        """Whether some query of a tile may see some of these blocks; `None` if that is certain."""
        found = None if chosen is None else chosen.any()
        if self.causal:
            near = (blocks * self.size <= queries["index"].max()) & (blocks >= 0)
            found = near.any() if found is None else found & near.any()
        return found

    def seen(self, queries: Any, keys: Any, chosen: jax.Array | None) -> Bool[Array, "b c t s"]:
        """Which keys of a tile each query of a tile sees and has chosen."""
        (_, _, kv_ids), blocks = keys
        each = indices_of_blocks(blocks, self.size)
        seen = visible(self.causal, queries["index"][0], each, queries["q_segment_ids"], flat(kv_ids))
        return seen if chosen is None else seen & jnp.repeat(jnp.moveaxis(chosen, 1, 3), self.size, 3)

    def pairs(self, queries: Any, keys: Any, chosen: jax.Array | None) -> Pairs:
        """The pairs of a tile of queries and a tile of keys."""
        index_key, key = (flat(x) for x in keys[0][:2])
        x = products(queries["index_query"], index_key)
        seen = jnp.broadcast_to(self.seen(queries, keys, chosen), (x.shape[0], self.groups, *x.shape[2:]))
        x = jnp.where(self.of_heads(seen, x.shape[1]), x, 0.0)
        scores = summed(activated(self.activation, x), queries["weights"], self.groups)
        s = products(queries["query"], key) * self.scale
        s = s if self.cap is None else self.cap * jnp.tanh(s / self.cap)
        lse = jnp.swapaxes(queries["lse"], 1, 2)[..., None]
        s = jnp.where(self.of_heads(seen, s.shape[1]) & (lse != -jnp.inf), s - lse, -jnp.inf)
        return Pairs(seen, x, jnp.where(seen, scores, 0.0), summed(jnp.exp(s), None, self.groups))

    def by_kernels(self, compute: Any, queries: Any, keys: Any, chosen: jax.Array | None) -> Any:
        """What a function of `teaching_kernels` computes for a tile of queries and a tile of keys."""
        index_key, key = (flat(x) for x in keys[0][:2])
        shared = kernels.Shared(self.groups, self.scale, self.cap, self.activation)
        return compute(queries, index_key, key, self.seen(queries, keys, chosen), shared)

    def of_heads(self, x: jax.Array, heads: int) -> jax.Array:
        """`x`, of each group, repeated for the heads of the group."""
        return jnp.repeat(x, heads // self.groups, 1)


class Measure(Lesson):
    """The body of the first round."""

    def hop(self, own: Any, theirs: Any, so_far: Sums | None, by_kernels: bool) -> Sums:
        queries, of_queries, keys, of_keys = self.tiled(own, theirs, by_kernels)
        if so_far is None:
            zeros = jnp.zeros_like(own.arrays["lse"][..., : self.groups])
            so_far = align(Sums.of_none(zeros), axes_of(own.index))

        def sums_of(queries: Any, keys: Any, chosen: Any) -> Sums:
            if by_kernels:
                sums = self.by_kernels(kernels.sums_of, queries, keys, chosen)
            else:
                pairs = self.pairs(queries, keys, chosen)
                sums = Sums.of(pairs.seen, pairs.scores, pairs.weight)
            return jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), sums)

        def continued(tile: Any) -> Sums:
            queries, sums = tile

            def step(sums: Sums, keys_and_chosen: Any) -> tuple[Sums, None]:
                keys, chosen = keys_and_chosen
                some = self.some(queries, keys[1], chosen)
                return tiles.where_any(some, lambda: sums.merged(sums_of(queries, keys, chosen)), sums), None

            return jax.lax.scan(step, sums, (keys, self.chosen(queries, theirs, of_keys)))[0]

        parts = jax.lax.map(continued, (queries, of_queries.split(so_far)))
        return of_queries.joined(parts, own.index.size)


class OfQueries(NamedTuple):
    """The gradients of this rank's index queries and weights."""

    index_query: Float32[Array, "B T I D"]
    weights: Float32[Array, "B T I"] | None


class Differentiate(Lesson):
    """The body of the second round; `own` has `index_lse` and `weight` (`Sums`) too. It sends home `dik`."""

    def hop(self, own: Any, theirs: Any, so_far: OfQueries | None, by_kernels: bool) -> tuple[OfQueries, Any]:
        queries, of_queries, keys, of_keys = self.tiled(own, theirs, by_kernels)

        def gradients(queries: Any, keys: Any, chosen: Any) -> tuple[OfQueries, jax.Array]:
            index_key = keys[0][0]
            if by_kernels:
                dquery, dweights, dkey = self.by_kernels(kernels.gradients_of, queries, keys, chosen)
            else:
                dquery, dweights, dkey = self.gradients(queries, index_key, self.pairs(queries, keys, chosen))
            return OfQueries(dquery, None if queries["weights"] is None else dweights), dkey.reshape(index_key.shape)

        def continued(dkeys: jax.Array, queries: Any) -> tuple[jax.Array, OfQueries]:
            def step(sums: OfQueries, keys_and_chosen: Any) -> tuple[OfQueries, jax.Array]:
                keys, chosen = keys_and_chosen
                nothing = jax.tree.map(jnp.zeros_like, sums), jnp.zeros_like(keys[0][0], jnp.float32)
                some = self.some(queries, keys[1], chosen)
                new, dkey = tiles.where_any(some, lambda: gradients(queries, keys, chosen), nothing)
                return jax.tree.map(jnp.add, sums, new), dkey

            start = OfQueries(queries["index_query"], queries["weights"])
            start = align(jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), start), axes_of(own.index))
            sums, new = jax.lax.scan(step, start, (keys, self.chosen(queries, theirs, of_keys)))
            return dkeys + new, sums

        dkeys = align(jnp.zeros_like(keys[0][0], jnp.float32), axes_of(own.index))
        dkeys, parts = jax.lax.scan(continued, dkeys, queries)
        new = of_queries.joined(parts, own.index.size)
        found = new if so_far is None else jax.tree.map(jnp.add, so_far, new)
        return found, of_keys.joined(dkeys, theirs.index.size)

    def gradients(self, queries: Any, index_key: jax.Array, pairs: Pairs) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The gradients of index queries and weights of a tile, and those of a tile of index keys, in float32."""
        index_lse, total = (jnp.swapaxes(queries[name], 1, 2) for name in ("index_lse", "weight"))
        weights = None if queries["weights"] is None else jnp.swapaxes(queries["weights"], 1, 2)
        dscores = dscores_of(pairs.seen, pairs.scores, pairs.weight, index_lse, total)
        dscores = self.of_heads(dscores, pairs.products.shape[1])
        q, k = queries["index_query"], flat(index_key)
        dproducts, dweights = dproducts_of(self.activation, pairs.products, dscores, weights, q.dtype)
        dproducts = dproducts.reshape(q.shape[0], k.shape[2], -1, *dproducts.shape[2:])
        dquery = product("bghts,bsgd->btghd", dproducts, k).reshape(q.shape)
        grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
        return dquery, jnp.swapaxes(dweights, 1, 2), product("bghts,btghd->bsgd", dproducts, grouped)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _divergence(lesson: Lesson, ring: Any, own: Any, travelling: Any) -> tuple[jax.Array, jax.Array]:
    """The sum of the losses of these queries and groups, and how many have one."""
    return _totals(_loop(Measure, lesson, ring, own, travelling))


def _loop(round_of: Any, lesson: Lesson, ring: Any, own: Any, travelling: Any, send_home: bool = False) -> Any:
    body, (axis_name, mesh, layout) = round_of(**vars(lesson)), ring
    return ring_loop(body, own, travelling, send_home=send_home, axis_name=axis_name, mesh=mesh, layout=layout)


def _totals(sums: Sums) -> tuple[jax.Array, jax.Array]:
    return sums.divergences.sum(), (sums.weight != 0).sum(dtype=jnp.int32).astype(jnp.float32)


def _forward(lesson: Lesson, ring: Any, own: Any, travelling: Any) -> Any:
    """Both rounds. The residuals are the gradients of the sum of the losses, in float32."""
    sums = _loop(Measure, lesson, ring, own, travelling)
    known = own | {"index_lse": sums.index_lse, "weight": sums.weight}
    of_queries, dkey = _loop(Differentiate, lesson, ring, known, travelling, send_home=True)
    ((name, (index_key, *others)),) = travelling.items()
    of_own = {key: _placed_as(dx, own[key]) for key, dx in of_queries._asdict().items()}
    of_travelling = {name: (_placed_as(dkey, index_key), *[None] * len(others))}
    return _totals(sums), (dict.fromkeys(own) | of_own, of_travelling)


def _backward(lesson: Lesson, ring: Any, gradients: Any, cotangents: Any) -> Any:
    """The gradients times the cotangent of the sum, in the dtypes of the index arrays."""
    of_own, of_travelling = jax.tree.map(lambda x: x * cotangents[0], gradients)
    of_own["index_query"] = of_own["index_query"].astype(lesson.dtype)
    return of_own, jax.tree.map(lambda x: x.astype(lesson.dtype), of_travelling)


_divergence.defvjp(_forward, _backward)


def _placed_as(gradient: jax.Array | None, x: Any) -> jax.Array | None:
    """The gradient, split over explicit mesh axes as `x` is."""
    if gradient is None or jax.typeof(x).sharding.mesh.empty:
        return gradient
    wanted, found = (jax.typeof(a).sharding for a in (x, gradient))
    return gradient if tuple(found.spec) == tuple(wanted.spec) else jax.sharding.reshard(gradient, wanted)


def _attention_arrays(query: Any, key: Any, lse: Any, groups: int, index_query: Any, index_key: Any) -> tuple[Any, ...]:
    """Query, key and `lse` of the attention; raises unless they fit each other and the arrays of the indexer."""
    query = floats("query", query, "B T N H")
    key = floats("key", key, "B S K H", like=query)
    (batch, tokens, heads, size), keys = query.shape, index_key.shape[1]
    if query.shape[:2] != index_query.shape[:2]:
        fact = f"has {batch} rows of {tokens} tokens, and index_query {index_query.shape[0]} of {index_query.shape[1]}"
        raise InputError("query", fact, "Pass the queries of the same tokens")
    if key.shape[:2] != (batch, keys) or key.shape[3] != size or heads % key.shape[2]:
        fact = f"has shape {key.shape}, for query {query.shape} and {keys} index keys"
        raise InputError("key", fact, "Pass [B, S, K, H], where K divides the query heads")
    refuse_undivided("groups", groups, heads, "query heads")
    remedy = "Pass the lse [B, N, T] that ring_attention(..., return_lse=True) returns"
    if lse is None:
        raise InputError("lse", "is missing", remedy)
    lse = jnp.asarray(lse)
    if lse.dtype != jnp.float32 or lse.shape != (batch, heads, tokens):
        raise InputError("lse", f"has shape {lse.shape} and dtype {lse.dtype}", f"{remedy}, in float32")
    return query, key, lse


def _ids(selected: Any, groups: int, query: jax.Array, blocks: Blocks) -> jax.Array:
    """The ids of chosen blocks as int32; raises for ids of no block, as far as their values are known here."""
    ids = integers("selected", selected, "Pass the integers that select returns")
    if ids.ndim != 4 or ids.shape[:2] != query.shape[:2] or ids.shape[2] not in (1, groups):
        wanted = f"({query.shape[0]}, {query.shape[1]}, {'1' if groups == 1 else f'1 or {groups}'}, n)"
        raise InputError("selected", f"has shape {ids.shape}", f"Pass {wanted}")
    if not isinstance(selected, Tracer) and getattr(selected, "is_fully_addressable", True) and ids.size:
        known = np.asarray(selected)
        if known.min() < -1 or known.max() >= blocks.count:
            fact = f"has ids from {known.min()} to {known.max()}"
            raise InputError("selected", fact, f"Pass ids from 0 to {blocks.count - 1}, or -1 for none")
    return ids


def _number(argument: str, x: Any, default: float | None = None) -> float:
    if x is None and default is not None:
        return default
    if isinstance(x, bool) or not isinstance(x, numbers.Real) or not 0 < float(x) < math.inf:
        raise InputError(argument, f"got {x!r}", "Pass a positive number that is known outside jax.jit")
    return float(x)
