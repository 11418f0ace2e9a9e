# SPDX-License-Identifier: Apache-2.0
"""Correct backends, as short as possible: two dense block kernels, a fused attention, and a ring that gathers keys."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from ringattn_core import Block, Feature, Gradients, Partial, Rule, from_flash
from ringattn_core.contract import bits
from ringattn_core.contract.bits import by_head
from ringattn_core.contract.dropout import kept
from ringattn_core.contract.from_flash import FEATURES, FEATURES_OF_RANGES
from ringattn_core.contract.merge import merge
from ringattn_core.contract.tiles import tiles
from ringattn_core.contract.visibility import intervals, visible
from ringattn_core.masks import Coordinates, Interval, Reach
from ringattn_core.masks.builder import Built, build
from ringattn_core.placement.layout import Shards

HIGHEST = jax.lax.Precision.HIGHEST


def product(equation: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(equation, *(x.astype(jnp.float32) for x in operands), precision=HIGHEST)


def of_heads(x: jax.Array, block: Block) -> jax.Array:
    """Keys or values, one for each query head."""
    return jnp.repeat(x.astype(jnp.float32), block.group, axis=2)


def distance(block: Block) -> jax.Array:
    return jnp.abs(block.q_positions[:, :, None] - block.kv_positions[:, None, :])[:, None].astype(jnp.float32)


def scores(block: Block, seen: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Every score, -inf where forbidden or not `seen`, and the derivative of the soft cap."""
    s = block.rule.softmax_scale * product("btnh,bsnh->bnts", block.q, of_heads(block.k, block))
    slope = jnp.ones((), jnp.float32)
    if block.rule.logits_soft_cap is not None:
        bent = jnp.tanh(s / block.rule.logits_soft_cap)
        s, slope = block.rule.logits_soft_cap * bent, 1 - bent**2
    if block.bias is not None:
        bias = block.bias.astype(jnp.float32)
        s = s + jnp.where(bias < -1e5, -jnp.inf, bias)
    if block.slopes is not None:
        s = s - block.slopes[:, :, None, None] * distance(block)
    return (s if seen is None else jnp.where(seen, s, -jnp.inf)), slope


def keep(block: Block) -> jax.Array:
    return kept(block) / (1 - block.rule.dropout_prob) if block.rule.dropout_prob else jnp.ones((), jnp.float32)


def softmax(s: jax.Array, sinks: jax.Array | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Probabilities over the last axis, the largest score, and the lse counted from it; differentiable.

    In a row of nothing but -inf the probabilities and the largest score are 0, and the lse is -inf.
    """
    largest = s.max(-1, keepdims=True)
    if sinks is not None:
        largest = jnp.maximum(largest, sinks.max(-1)[None, :, None, None])
    largest = jax.lax.stop_gradient(jnp.where(jnp.isneginf(largest), 0.0, largest))
    weights = jnp.where(jnp.isneginf(s), 0.0, jnp.exp(jnp.where(jnp.isneginf(s), 0.0, s - largest)))
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks[None, :, None, :] - largest).sum(-1, keepdims=True)
    some = total != 0
    total = jnp.where(some, total, 1.0)
    return weights / total, largest[..., 0], jnp.where(some, jnp.log(total), -jnp.inf)[..., 0]


class Dense:
    """A block kernel that holds all scores."""

    def forward(self, block: Block, partial: Partial | None) -> Partial:
        s = self.scores(block)[0]
        p, largest, lse = softmax(s)
        out = product("bnts,bsnh->btnh", p * keep(block), of_heads(block.v, block))
        found = Partial(out, largest + lse, s.max(-1) if block.rule.return_max_logits else None)
        return found if partial is None else merge(partial, found)

    def scores(self, block: Block) -> tuple[jax.Array, jax.Array]:
        return scores(block, self.visible(block))

    def visible(self, block: Block) -> jax.Array | None:
        return visible(block)

    def backward(
        self, block: Block, dout: jax.Array, lse: jax.Array, delta: jax.Array, dq: jax.Array | None
    ) -> Gradients:
        s, slope = self.scores(block)
        p = jnp.where(jnp.isneginf(s), 0.0, jnp.exp(s - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None]))
        dp = product("btnh,bsnh->bnts", dout, of_heads(block.v, block))
        ds = p * (keep(block) * dp - delta[..., None])
        dz = block.rule.softmax_scale * ds * slope
        own = product("bnts,bsnh->btnh", dz, of_heads(block.k, block))
        return Gradients(
            dq=own if dq is None else dq + own,
            dk=grouped(product("bnts,btnh->bsnh", dz, block.q), block),
            dv=grouped(product("bnts,btnh->bsnh", p * keep(block), dout), block),
            dbias=None if block.bias is None else summed_to(ds, block.bias.shape),
            dslopes=None
            if block.slopes is None
            else -summed_to(ds * distance(block), (*block.slopes.shape, 1, 1))[..., 0, 0],
        )


class Tiled(Dense):
    """The same kernel, which skips tiles of which no query sees a key, and masks only tiles that are seen in part."""

    def visible(self, block: Block) -> jax.Array | None:
        seen, (some, full) = visible(block), of_pairs(block)
        return None if seen is None else full | (some & seen)


def of_pairs(block: Block) -> tuple[jax.Array, jax.Array]:
    """For each pair of a query and a key, whether `tiles` says that its tile is seen, in part and in full."""
    sizes = [next(size for size in (16, 8, 4, 2, 1) if x % size == 0) for x in (block.q_length, block.kv_length)]
    some, full = (jnp.repeat(jnp.repeat(x, sizes[0], 2), sizes[1], 3) for x in tiles(block, *sizes))
    return by_head(some, None, block.q.shape[2]), by_head(full, None, block.q.shape[2])


def grouped(x: jax.Array, block: Block) -> jax.Array:
    return x.reshape(*x.shape[:2], -1, block.group, x.shape[-1]).sum(3)


def summed_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return x.sum([axis for axis, size in enumerate(shape) if size == 1], keepdims=True)


Ends = Callable[[jax.Array, jax.Array, int], tuple[jax.Array, jax.Array]]
"""A function of `first`, `last` and the number of keys; a saboteur returns other ends."""


class Flash:
    """A kernel of `from_flash`: a dense attention, and its backward pass, that take each query's first and last key."""

    static_masks = key_indices = True
    features = FEATURES | FEATURES_OF_RANGES | {Feature.RETURN_LSE}

    def __init__(self, fault: str = "", ends: Ends = lambda first, last, keys: (first, last)) -> None:
        self.fault = fault
        kernel = from_flash(functools.partial(flash_forward, ends=ends), functools.partial(flash_backward, ends=ends))
        self.forward, self.backward = kernel.forward, kernel.backward


def flash_scores(q: jax.Array, k: jax.Array, scale: float, first: jax.Array, last: jax.Array) -> jax.Array:
    index = jnp.arange(k.shape[1], dtype=jnp.int32).reshape(1, 1, 1, -1)
    s = scale * product("btnh,bsnh->bnts", q, jnp.repeat(k, q.shape[2] // k.shape[2], 2))
    return jnp.where((first[..., None] <= index) & (index <= last[..., None]), s, -jnp.inf)


def flash_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, first: jax.Array, last: jax.Array, ends: Ends
) -> tuple[jax.Array, jax.Array]:
    p, largest, lse = softmax(flash_scores(q, k, scale, *ends(first, last, k.shape[1])))
    return product("bnts,bsnh->btnh", p, jnp.repeat(v, q.shape[2] // k.shape[2], 2)), largest + lse


def flash_backward(
    q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, lse: jax.Array, dout: jax.Array, *,
    scale: float, first: jax.Array, last: jax.Array, delta: jax.Array, ends: Ends,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    group = q.shape[2] // k.shape[2]
    s = flash_scores(q, k, scale, *ends(first, last, k.shape[1]))
    p = jnp.exp(s - lse[..., None])
    ds = scale * p * (product("btnh,bsnh->bnts", dout, jnp.repeat(v, group, 2)) - delta[..., None])
    dk, dv = product("bnts,btnh->bsnh", ds, q), product("bnts,btnh->bsnh", p, dout)
    dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3) for x in (dk, dv))
    return product("bnts,bsnh->btnh", ds, jnp.repeat(k, group, 2)), dk, dv


@dataclasses.dataclass(frozen=True)
class Gathered:
    """The operands of the ring function below: one block of all keys, in the order of the ranks."""

    block: Block
    sinks: jax.Array | None
    ranks: int
    rank: Any

    def origin(self) -> jax.Array:
        """The rank that each key comes from."""
        return jnp.arange(self.block.kv_length) // (self.block.kv_length // self.ranks)


class Gathering:
    """A ring function without a ring: every rank gathers all keys, and JAX differentiates."""

    def prepare(self, gathered: Gathered) -> Gathered:
        """The operands as they are; a saboteur overrides it."""
        return gathered

    def finish(self, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
        return out, lse

    def __call__(self, **options: Any) -> Any:
        gathered = self.prepare(gather(options))
        out, lse = self.finish(*self.attended(gathered.block, gathered.sinks))
        return (out, lse) if options["return_lse"] else out

    def attended(self, block: Block, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        p, largest, lse = softmax(scores(block, visible(block))[0], sinks)
        out = product("bnts,bsnh->btnh", p * keep(block), of_heads(block.v, block))
        return out.astype(block.q.dtype), largest + lse


def gather(options: dict[str, Any]) -> Gathered:
    """A whole call as one block, with keys in float32, so that ranks sum gradients in float32."""
    q, k, v = options["query"], options["key"].astype(jnp.float32), options["value"].astype(jnp.float32)
    axis, layout = options["axis_name"] or (), options["layout"]
    ranks = 1
    for name in axis:
        ranks *= jax.lax.axis_size(name)
    rank = jax.lax.axis_index(axis) if axis else 0

    def whole(x: jax.Array | None, along: int = 1) -> Any:
        return x if x is None or not axis else jax.lax.all_gather(x, axis, axis=along, tiled=True)

    def positions(given: jax.Array | None, index: jax.Array) -> jax.Array:
        return index if given is None else jnp.atleast_2d(given)

    def coordinate(name: Any, size: int) -> jax.Array:
        return (jax.lax.axis_index(name) if name else 0) * size + jnp.arange(size)

    q_index = Shards(layout, ranks).indices(rank, q.shape[1])[None]
    own_index = Shards(layout, ranks).indices(rank, k.shape[1])[None]
    kv_index = whole(own_index)
    batch, heads = coordinate(options["batch_axis_name"], q.shape[0]), coordinate(options["head_axis_name"], q.shape[2])
    kv = whole(jnp.stack([k, v]), 2) if k.shape == v.shape else whole(jnp.concatenate([k, v], -1))
    copies = jax.lax.axis_size(options["head_axis_name"]) if options["head_axis_name"] else 1
    rows = Coordinates(positions(options["q_positions"], q_index), q_index)
    columns = Coordinates(positions(whole(options["kv_positions"], -1), kv_index), kv_index)
    built = Built((), ())
    if options["mask_builder"] is not None:
        lengths = q.shape[1] * ranks, k.shape[1] * ranks
        built = build(options["mask_builder"], *lengths, q.shape[2] * copies, k.shape[2] * copies)
    reach = Reach(options["causal"], *(options["sliding_window"] or (None, None)), options["chunk_size"])
    sees = intervals(reach, built, Interval(), rows, heads, natural=False)
    bias, mask, slopes, seed = (options[n] for n in ("bias", "attention_mask", "alibi_slopes", "dropout_seed"))
    of_head = jnp.asarray(built.of_head, jnp.int32)[heads] if sees.masks else None
    dense = None if mask is None else jnp.take(mask, kv_index[0], 3)
    seen = bits.of_masks(sees.masks, of_head, dense, rows, columns)
    words, set_of_head = (None, None) if seen is None else seen[:2]
    block = Block(
        q=q, kv=kv, first=sees.first, last=sees.last, q_positions=rows.positions, kv_positions=columns.positions,
        q_index=q_index, kv_index=kv_index, batch_index=batch, head_index=heads,
        q_segments=options["q_segment_ids"], kv_segments=whole(options["kv_segment_ids"]),
        bias=None if bias is None else jnp.take(bias, kv_index[0], 3), bits=words, bits_of_head=set_of_head,
        slopes=None if slopes is None else slopes[None].astype(jnp.float32),
        seed=None if seed is None else jnp.broadcast_to(seed, q.shape[:1]),
        rule=Rule(options["softmax_scale"], options["logits_soft_cap"], options["dropout_prob"]),
        monotone=False,
    )  # fmt: skip
    sinks = options["softmax_aux"]
    return Gathered(block, None if sinks is None else sinks.astype(jnp.float32), ranks, rank)
