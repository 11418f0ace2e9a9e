# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a block: an online softmax over its visible tiles that continues from a partial result."""

import dataclasses

import jax
import jax.numpy as jnp
from ringattn_core.contract.dropout import kept
from ringattn_core.contract.merge import empty
from ringattn_core.contract.protocol import Block, Partial, padded
from ringattn_core.contract.varying import align, axes_of

from .scores import from_row_values, like_scores, product, row_values, rows, scores, unrows
from .tiling import Arrays, choose, over_visible_tiles, pad

_AXES = {"out": "BTN.", "softmax": ".BKR"}


def forward(block: Block, partial: Partial | None) -> Partial:
    """Continues the online softmax of `partial` with the keys of the block; `None` starts a new one."""
    # Without the barrier, XLA of JAX 0.11 fuses the hops of a ring on CPUs, and compiles for over 15 minutes.
    before = empty(block) if partial is None else jax.lax.optimization_barrier(partial)
    before = before if before.out is not None else dataclasses.replace(before, out=empty(block).out)
    block, before = align((block, before), axes_of(block, before))
    length, size = block.q_length, choose(block, block.rule.fwd_params)
    block = pad(block, size)
    softmax = jnp.stack([row_values(padded(x, block.q_length, 2), block) for x in _begun(before)])
    out = padded(before.out, block.q_length, 1)
    surviving = 1.0 - block.rule.dropout_prob
    begun = {"out": out * surviving, "softmax": softmax}
    found = over_visible_tiles(block, size, _continued, {}, begun, _AXES)
    base, total, *max_logits = (from_row_values(x, block)[:, :, :length] for x in found["softmax"])
    weight = jnp.where(total == 0.0, 1.0, total) * surviving
    out = found["out"][:, :length] / jnp.swapaxes(weight, 1, 2)[..., None]
    return Partial(out, base + jnp.log(total), *max_logits)


def _begun(before: Partial) -> list[jax.Array]:
    """The state of the online softmax: for each query `base`, the sum of `exp(s - base)`, and maybe the largest score.

    `base` begins as the lse. So the sum begins as 1, as 0 if neither keys nor sinks are in the denominator, or as NaN
    where the lse is NaN: the output is then NaN even if the query sees no key.
    """
    total = jnp.where(jnp.isneginf(before.lse), 0.0, jnp.where(jnp.isnan(before.lse), jnp.nan, 1.0))
    return [before.lse, total, *([] if before.max_logits is None else [before.max_logits])]


def _continued(tile: Block, _: Arrays, before: Arrays) -> Arrays:
    """One step of the online softmax: `out` and `total` are sums of terms with the factor `exp(s - base)`.

    A probability that dropout keeps enters `out` unscaled; `forward` divides by the keep probability, in float32.

    `base` and `total` are one array: with two arrays, XLA would copy all of the first one at every step.
    """
    base, total, *max_logits = before["softmax"]
    k, v = jnp.swapaxes(tile.k, 1, 2), jnp.swapaxes(tile.v, 1, 2)
    s = scores(rows(tile.q, tile), k, tile, by_keys=False)[0]
    largest = s.max(-1)
    now = jnp.maximum(base, largest)
    finite = jnp.where(jnp.isneginf(now), 0.0, now)
    shrink = jnp.exp(base - finite)
    p = jnp.exp(s - finite[..., None])
    total = total * shrink + p.sum(-1)
    if tile.rule.dropout_prob:
        p = jnp.where(like_scores(kept(tile), p, tile, by_keys=False), p, 0.0)
    added = product(p.astype(v.dtype), v, 2, tile)
    out = rows(before["out"], tile) * shrink[..., None] + added
    most = [jnp.maximum(largest, x) for x in max_logits]
    return {"out": unrows(out, tile), "softmax": jnp.stack([now, total, *most])}
