# SPDX-License-Identifier: Apache-2.0
"""Which keys each query of a block sees: the call's options, ids and masks together."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from ..masks import Causal, Chunked, Coordinates, Local, Mask, all_of
from .protocol import BIAS_FORBIDS, Block
from .rule import Rule


def position_masks(rule: Rule) -> list[Mask]:
    """The options `causal`, `window` and `chunk` of `rule` as masks of the mask algebra."""
    masks: list[Mask] = []
    if rule.causal:
        masks.append(Causal())
    if rule.sliding_window is not None:
        masks.append(Local(*rule.sliding_window))
    if rule.chunk_size is not None:
        masks.append(Chunked(rule.chunk_size))
    return masks


def visible(block: Block) -> Bool[Array, "b n t s"] | None:
    """Whether each query of `block` sees each key, broadcastable to `[B, N, T, S]`; `None` if all do."""
    rule = block.rule
    q = Coordinates(block.q_positions, block.q_index).rows()
    kv = Coordinates(block.kv_positions, block.kv_index).columns()
    parts = [mask.visible(q, kv)[:, None] for mask in position_masks(rule)]
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
    """The bias in float32, with -inf where it forbids a pair: below `BIAS_FORBIDS`."""
    bias = bias.astype(jnp.float32)
    return jnp.where(bias < BIAS_FORBIDS, -jnp.inf, bias)


def _of_heads(block: Block, q: Coordinates, kv: Coordinates) -> Bool[Array, "b n t s"]:
    """Which pairs each head sees, from the masks of the rule.

    Each distinct mask is evaluated once and then gathered by head.
    """
    rule = block.rule
    if len(rule.masks) == 1:
        return rule.masks[0].visible(q, kv)[:, None]
    of_masks = jnp.stack(jnp.broadcast_arrays(*(mask.visible(q, kv) for mask in rule.masks)), 1)
    return of_masks[:, jnp.asarray(rule.mask_of_head)[block.head_index]]


def span(causal: bool, window: tuple[int | None, int | None] | None, chunk: int | None) -> int:
    """An upper bound on the number of keys that a query sees, from the options of a rule; 2^30 without a bound.

    `window` and `chunk` bound it. A window with an open side does not, unless the right side is closed: by `causal`, or
    by `chunk`, which is causal too.
    """
    spans = [2**30] if chunk is None else [chunk]
    if window is not None:
        left, right = window
        right = 0 if causal or chunk is not None else right
        spans += [] if left is None or right is None else [left + right + 1]
    return min(spans)
