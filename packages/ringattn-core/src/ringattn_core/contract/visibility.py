# SPDX-License-Identifier: Apache-2.0
"""What each query sees, in the arrays of a block: `first`, `last`, segment ids and bits, and a bias that forbids."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from ..masks import Coordinates, Interval, Mask, Reach, all_of
from ..masks.builder import Built
from ..masks.reach import INT32_MAX, INT32_MIN
from . import bits
from .protocol import BIAS_FORBIDS, Block


class Queries(NamedTuple):
    """Some queries, for all blocks of a call: where they are, the first and the last key position that each sees.

    `first` and `last` are as in `Block`. `masks` are all masks of the `mask_builder` if one of them is no interval, and
    else none; they become bits. `monotone`: neither end decreases where positions do not.
    """

    at: Coordinates
    first: Int32[Array, "b n T"] | None
    last: Int32[Array, "b n T"] | None
    masks: tuple[Mask, ...]
    monotone: bool


def intervals(
    reach: Reach, built: Built, kv_range: Interval, q: Coordinates, head_index: Int32[Array, " N"], natural: bool
) -> Queries:
    """What queries at `q`, `[b, T]`, see by `reach`, by the masks that a `mask_builder` made, and by `kv_range`.

    The masks become intervals if each of them is one. `kv_range` is `[b, n, T]`. `natural`: positions are indices in
    the sequence, both of queries and of keys.
    """
    seen = Interval(*(x if x is None else x[:, None] for x in reach.bounds(q.positions))) & kv_range
    of_masks = [x for mask in built.masks if (x := mask.interval(q, natural)) is not None]
    as_bits = built.masks if len(of_masks) < len(built.masks) else ()
    if of_masks and not as_bits:
        seen &= _of_heads(of_masks, jnp.asarray(built.of_head, jnp.int32)[head_index], q)
    # No interval that contains the query's own position is empty: the ends of empty ones are not monotone.
    of_call = bool(as_bits) or all(mask.monotone and mask.contains_own for mask in built.masks)
    monotone = of_call and kv_range.first is kv_range.last is None
    return Queries(q, *_without_empty(seen), as_bits, monotone)


def _of_heads(of_masks: list[Interval], mask_of_head: Int32[Array, " N"], q: Coordinates) -> Interval:
    """The interval of each head, `[b, n, T]`, from the intervals of all masks, `[b, T]`."""

    def by_head(ends: list[Any], unbounded: int) -> Any:
        if all(x is None for x in ends):
            return None
        bounds = [jnp.full_like(q.positions, unbounded) if x is None else x for x in ends]
        by_mask = jnp.stack(jnp.broadcast_arrays(*bounds), 1)
        return by_mask if len(ends) == 1 else by_mask[:, mask_of_head]

    return Interval(by_head([x.first for x in of_masks], INT32_MIN), by_head([x.last for x in of_masks], INT32_MAX))


def _without_empty(seen: Interval) -> Interval:
    """The same intervals; an empty one begins at the largest int32 and ends at the least.

    So `position - first <= last - first` is false in unsigned integers too.
    """
    if seen.first is None or seen.last is None:
        return seen
    first, last = jnp.broadcast_arrays(seen.first, seen.last)
    empty = first > last
    return Interval(jnp.where(empty, INT32_MAX, first), jnp.where(empty, INT32_MIN, last))


def visible(block: Block) -> Bool[Array, "b n t s"] | None:
    """Whether a query of `block` sees a key, bias aside; broadcastable to `[B, N, T, S]`. `None` without masks."""
    positions = block.kv_positions[:, None, None]
    parts = [] if block.first is None else [positions >= block.first[..., None]]
    parts += [] if block.last is None else [positions <= block.last[..., None]]
    if block.q_segments is not None and block.kv_segments is not None:
        ids, kv_ids = block.q_segments[:, None, :, None], block.kv_segments[:, None, None, :]
        parts.append((ids == kv_ids) & (ids >= 0))
    if block.bits is not None:
        words = bits.by_head(block.bits, block.bits_of_head, block.q.shape[2])
        parts.append(bits.unpacked(words, block.kv_length, block.grain))
    if block.padded:
        parts.append((block.kv_index >= 0)[:, None, None])
    return all_of(parts)


def with_forbidden(bias: Float[Array, "*x"]) -> Float32[Array, "*x"]:
    """The bias in float32, with -inf for every entry below `BIAS_FORBIDS`, which masks out its pair."""
    bias = bias.astype(jnp.float32)
    return jnp.where(bias < BIAS_FORBIDS, -jnp.inf, bias)
