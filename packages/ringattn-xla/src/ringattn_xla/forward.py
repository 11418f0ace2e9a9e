# SPDX-License-Identifier: Apache-2.0
"""How the output of a block is computed: an online softmax that continues from a partial result."""

from typing import Any

import jax.numpy as jnp
from ringattn_core.dropout import kept
from ringattn_core.protocol import Block, Partial
from ringattn_core.visibility import visible

from .scores import biased, by_group, capped, grouped, of_rows, product, to_rows
from .tiling import Cut, choose, over_visible_tiles, pad, pad_rows, part, put, take, varying_alike

_CARRIED = ("BTK..", "BKT.", "BKT.")


def forward(block: Block, partial: Partial) -> Partial:
    """`partial` continued with the keys of the block."""
    block, partial = varying_alike((block, partial))
    length, size = block.q_length, choose(block, block.rule.fwd_params)
    block = pad(block, size)
    out = grouped(pad_rows(partial.out, block.q_length, 1), block)
    largest = of_rows(pad_rows(partial.lse, block.q_length, 2), block)
    total = jnp.where(jnp.isneginf(largest), 0.0, 1.0)

    def step(start: Cut, size: Cut, carry: Any) -> Any:
        rows = [take(x, axes, block, start, size) for x, axes in zip(carry, _CARRIED, strict=True)]
        rows = _continued(part(block, start, size), *rows)
        return tuple(put(x, row, axes, block, start, size) for x, row, axes in zip(carry, rows, _CARRIED, strict=True))

    out, largest, total = over_visible_tiles(block, size, step, (out, largest, total))
    out = out / jnp.swapaxes(jnp.where(total == 0.0, 1.0, total), 1, 2)[..., None]
    lse = to_rows(largest + jnp.log(total))
    return Partial(out.reshape(*out.shape[:2], -1, out.shape[-1])[:, :length], lse[:, :, :length])


def _continued(tile: Block, out: Any, largest: Any, total: Any) -> tuple[Any, Any, Any]:
    """One step of the online softmax: `out` and `total` are sums relative to `exp(largest)`."""
    s = biased(capped(tile), tile)
    seen = visible(tile)
    if seen is not None:
        s = jnp.where(by_group(seen, tile), s, -jnp.inf)
    now = jnp.maximum(largest, s.max(-1))
    finite = jnp.where(jnp.isneginf(now), 0.0, now)
    shrink = jnp.exp(largest - finite)
    p = jnp.exp(s - finite[..., None])
    total = total * shrink + p.sum(-1)
    if tile.rule.dropout:
        p = jnp.where(by_group(kept(tile), tile), p * (1.0 / (1.0 - tile.rule.dropout)), 0.0)
    added = product("bktgs,bskh->btkgh", p.astype(tile.v.dtype), tile.v, tile)
    return out * jnp.swapaxes(shrink, 1, 2)[..., None] + added, now, total
