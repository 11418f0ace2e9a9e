# SPDX-License-Identifier: Apache-2.0
"""How the output of a block is computed: an online softmax that continues from a partial result."""

from typing import Any

import jax.numpy as jnp
from ringattn_core.contract.dropout import kept
from ringattn_core.contract.protocol import Block, Partial
from ringattn_core.contract.tile_padding import padded
from ringattn_core.contract.varying import align, axes_of
from ringattn_core.contract.visibility import visible

from .scores import biased, capped, from_row_values, like_scores, outer, row_values, rows, unrows
from .tiling import Cut, choose, over_visible_tiles, pad, part, put, take

_CARRIED = ("BTN.", ".BKR")


def forward(block: Block, partial: Partial) -> Partial:
    """`partial` continued with the keys of the block."""
    block, partial = align((block, partial), axes_of(block, partial))
    length, size = block.q_length, choose(block, block.rule.fwd_params)
    block = pad(block, size)
    out = padded(partial.out, block.q_length, 1)
    largest = row_values(padded(partial.lse, block.q_length, 2), block)
    softmax = jnp.stack([largest, jnp.where(jnp.isneginf(largest), 0.0, 1.0)])
    surviving = 1.0 - block.rule.dropout

    def step(start: Cut, size: Cut, carry: Any) -> Any:
        before = [take(x, axes, block, start, size) for x, axes in zip(carry, _CARRIED, strict=True)]
        after = _continued(part(block, start, size), *before)
        return tuple(put(x, new, axes, block, start, size) for x, new, axes in zip(carry, after, _CARRIED, strict=True))

    out, (largest, total) = over_visible_tiles(block, size, step, (out * surviving, softmax))
    weight = from_row_values(jnp.where(total == 0.0, 1.0, total) * surviving, block)
    lse = from_row_values(largest + jnp.log(total), block)
    return Partial((out / jnp.swapaxes(weight, 1, 2)[..., None])[:, :length], lse[:, :, :length])


def _continued(tile: Block, out: Any, softmax: Any) -> tuple[Any, Any]:
    """One step of the online softmax: `out` and `total` are sums relative to `exp(largest)`.

    What survives dropout weighs here what it weighs without: its true weight comes last, and in float32.

    `largest` and `total` are one array: of two, XLA updates the first early and copies all of it at every step.
    """
    largest, total = softmax
    k, v = jnp.swapaxes(tile.k, 1, 2), jnp.swapaxes(tile.v, 1, 2)
    s = biased(capped(rows(tile.q, tile), k, tile, by_keys=False), tile, by_keys=False)
    seen = visible(tile)
    if seen is not None:
        s = jnp.where(like_scores(seen, s, tile, by_keys=False), s, -jnp.inf)
    now = jnp.maximum(largest, s.max(-1))
    finite = jnp.where(jnp.isneginf(now), 0.0, now)
    shrink = jnp.exp(largest - finite)
    p = jnp.exp(s - finite[..., None])
    total = total * shrink + p.sum(-1)
    if tile.rule.dropout:
        p = jnp.where(like_scores(kept(tile), p, tile, by_keys=False), p, 0.0)
    added = outer(p.astype(v.dtype), v, tile)
    return unrows(rows(out, tile) * shrink[..., None] + added, tile), jnp.stack([now, total])
