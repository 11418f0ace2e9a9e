# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a block: an online softmax over its visible tiles that continues from a partial result."""

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
    block, before = align((block, before), axes_of(block, before))
    length, size = block.q_length, choose(block, block.rule.fwd_params)
    block = pad(block, size)
    largest, total = _begun(before)
    softmax = jnp.stack([row_values(padded(x, block.q_length, 2), block) for x in (largest, total)])
    out = before.out if before.max_logits is None else before.out * jnp.swapaxes(total, 1, 2)[..., None]
    out = padded(out, block.q_length, 1)
    surviving = 1.0 - block.rule.dropout_prob
    begun = {"out": out * surviving, "softmax": softmax}
    found = over_visible_tiles(block, size, _continued, {}, begun, _AXES)
    largest, total = (from_row_values(x, block)[:, :, :length] for x in found["softmax"])
    weight = jnp.where(total == 0.0, 1.0, total) * surviving
    out = found["out"][:, :length] / jnp.swapaxes(weight, 1, 2)[..., None]
    return Partial(out, largest + jnp.log(total), largest if block.rule.return_max_logits else None)


def _begun(before: Partial) -> tuple[jax.Array, jax.Array]:
    """The largest score of each query so far, and the sum of `exp(s - largest)`, which is 0 if it has seen no key.

    Without `max_logits`, the lse serves as the largest score: the sum is then 1.
    """
    nothing = jnp.isneginf(before.lse)
    if before.max_logits is None:
        return before.lse, jnp.where(nothing, 0.0, 1.0)
    return before.max_logits, jnp.exp(before.lse - jnp.where(nothing, 0.0, before.max_logits))


def _continued(tile: Block, _: Arrays, before: Arrays) -> Arrays:
    """One step of the online softmax: `out` and `total` are sums of terms with the factor `exp(s - largest)`.

    A probability that dropout keeps enters `out` unscaled; `forward` divides by the keep probability, in float32.

    `largest` and `total` are one array: with two arrays, XLA would copy all of the first one at every step.
    """
    largest, total = before["softmax"]
    k, v = jnp.swapaxes(tile.k, 1, 2), jnp.swapaxes(tile.v, 1, 2)
    s = scores(rows(tile.q, tile), k, tile, by_keys=False)[0]
    now = jnp.maximum(largest, s.max(-1))
    finite = jnp.where(jnp.isneginf(now), 0.0, now)
    shrink = jnp.exp(largest - finite)
    p = jnp.exp(s - finite[..., None])
    total = total * shrink + p.sum(-1)
    if tile.rule.dropout_prob:
        p = jnp.where(like_scores(kept(tile), p, tile, by_keys=False), p, 0.0)
    added = product(p.astype(v.dtype), v, 2, tile)
    out = rows(before["out"], tile) * shrink[..., None] + added
    return {"out": unrows(out, tile), "softmax": jnp.stack([now, total])}
