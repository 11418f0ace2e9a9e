# SPDX-License-Identifier: Apache-2.0
"""Which keys each query of a block sees: the call's options, ids and masks together."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32

from ..masks import Coordinates, all_of
from .protocol import BIAS_FORBIDS, Block
from .rule import Rule


def bounds(rule: Rule, positions: Any) -> tuple[Any, Any]:
    """The first and the last key position that queries at `positions` see by causality, window and chunk.

    A query at `i` sees a key at `j` if `low <= j <= high`; `None` is no bound on that side. Always `low <= i <= high`,
    and neither bound decreases as `i` grows. `positions` and the results are int32, of NumPy or JAX; a sum beyond
    int32 is clipped.
    """
    left, right = (None, None) if rule.sliding_window is None else rule.sliding_window
    low = None if left is None else positions.clip(min=left - 2**31) - left
    high = None if right is None else positions.clip(max=2**31 - 1 - right) + right
    if rule.causal or rule.chunk_size is not None:
        high = positions
    if rule.chunk_size is not None:
        start = positions - positions % rule.chunk_size
        low = start if left is None else start.clip(min=low)
    return low, high


def visible(block: Block) -> Bool[Array, "b n t s"] | None:
    """Whether a query of `block` sees a key, bias aside; broadcastable to `[B, N, T, S]`. `None` without masks."""
    rule = block.rule
    q = Coordinates(block.q_positions, block.q_index).rows()
    kv = Coordinates(block.kv_positions, block.kv_index).columns()
    low, high = bounds(rule, q.positions)
    parts = [] if low is None else [(kv.positions >= low)[:, None]]
    parts += [] if high is None else [(kv.positions <= high)[:, None]]
    if block.q_segments is not None and block.kv_segments is not None:
        ids, kv_ids = block.q_segments[:, None, :, None], block.kv_segments[:, None, None, :]
        parts.append((ids == kv_ids) & (ids >= 0))
    if rule.masks:
        parts.append(_of_heads(block, q, kv))
    if block.mask is not None:
        parts.append(block.mask)
    if block.padded:
        parts.append((kv.index >= 0)[:, None])
    return all_of(parts)


def with_forbidden(bias: Float[Array, "*x"]) -> Float32[Array, "*x"]:
    """The bias in float32, with -inf for every entry below `BIAS_FORBIDS`, which masks out its pair."""
    bias = bias.astype(jnp.float32)
    return jnp.where(bias < BIAS_FORBIDS, -jnp.inf, bias)


def _of_heads(block: Block, q: Coordinates, kv: Coordinates) -> Bool[Array, "b n t s"]:
    """True for the pairs that each head sees by the masks of the rule, the other options aside.

    Each distinct mask is evaluated once and then gathered by head.
    """
    rule = block.rule
    if len(rule.masks) == 1:
        return rule.masks[0].visible(q, kv)[:, None]
    of_masks = jnp.stack(jnp.broadcast_arrays(*(mask.visible(q, kv) for mask in rule.masks)), 1)
    return of_masks[:, jnp.asarray(rule.mask_of_head)[block.head_index]]


def span(causal: bool, window: tuple[int | None, int | None] | None, chunk: int | None) -> int:
    """The largest number of keys that any query sees by causality, window and chunk; 2^30 if a side is unbounded."""
    low, high = bounds(Rule(1.0, causal, window, chunk), np.int32(0 if chunk is None else chunk - 1))
    return 2**30 if low is None or high is None else min(int(high) - int(low) + 1, 2**30)
