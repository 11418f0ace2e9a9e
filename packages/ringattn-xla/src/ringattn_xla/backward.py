# SPDX-License-Identifier: Apache-2.0
"""The backward pass of a block: each visible tile once, probabilities from the final lse."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32
from ringattn_core.contract import ordering
from ringattn_core.contract.dropout import kept
from ringattn_core.contract.protocol import Block, Gradients
from ringattn_core.contract.tile_padding import padded
from ringattn_core.contract.varying import align, axes_of

from .scores import distance, from_scores, inner, like_scores, outer, row_values, rows, scores
from .tiling import Cut, choose, over_visible_tiles, pad, part, put, take

_AXES = {"dq": "BK.R", "dk": "BSK.", "dv": "BSK.", "dbias": "BNTS", "dslopes": "BN"}


def backward(
    block: Block,
    dout: Float[Array, "B T N Hv"],
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    dq: Float32[Array, "B T N H"],
) -> Gradients:
    """`dq` continued with the keys of the block, and the gradients that the block adds to everything else."""
    asked = block
    axes = axes_of(block, dout, lse, delta, dq)
    block, dout, lse, delta, dq = align((block, dout, lse, delta, dq), axes)
    size = choose(block, block.rule.bwd_params)
    block = pad(block, size)
    dout = padded(dout, block.q_length, 1)
    # A row that saw nothing has no probabilities; neither has padding.
    lse = padded(jnp.where(jnp.isneginf(lse), jnp.inf, lse), block.q_length, 2, jnp.inf)
    of_rows = [row_values(x, block) for x in (lse, padded(delta, block.q_length, 2))]
    if block.shift is not None:
        of_rows.append(row_values(block.shift, block))
    total = {"dq": jnp.swapaxes(rows(padded(dq, block.q_length, 1), block), 2, 3)}
    total |= {"dk": ordering.zeros(block.k.shape, dq), "dv": ordering.zeros(block.v.shape, dq)}
    total |= {} if block.bias is None or block.bias_fixed else {"dbias": ordering.zeros(block.bias.shape, dq)}
    total |= {} if block.slopes is None else {"dslopes": ordering.zeros(block.slopes.shape, dq)}
    total = align(total, axes)

    def step(start: Cut, size: Cut, total: dict[str, Any]) -> dict[str, Any]:
        row = [take(x, "BKR", block, start, size) for x in of_rows]
        added = _of_tile(part(block, start, size), take(dout, "BTN.", block, start, size), *row)
        before = {name: take(x, _AXES[name], block, start, size) for name, x in total.items()}
        return {name: put(x, before[name] + added[name], _AXES[name], block, start, size) for name, x in total.items()}

    total = over_visible_tiles(block, size, step, total)
    batch, heads, head_dim, _ = total["dq"].shape
    dq = total["dq"].reshape(batch, heads, head_dim, -1, block.group).transpose(0, 3, 1, 4, 2).reshape(block.q.shape)
    dbias = total.get("dbias")
    if dbias is not None and asked.bias is not None:
        dbias = dbias[:, :, : asked.bias.shape[2], : asked.kv_length]
    dk, dv = (total[name][:, : asked.kv_length] for name in ("dk", "dv"))
    return Gradients(dq[:, : asked.q_length], dk, dv, dbias, total.get("dslopes"))


def _of_tile(tile: Block, dout: Any, lse: Any, delta: Any, shift: Any = None) -> dict[str, Any]:
    """What one tile adds."""
    rule, dtype = tile.rule, tile.q.dtype
    q, k, v, dout = rows(tile.q, tile), jnp.swapaxes(tile.k, 1, 2), jnp.swapaxes(tile.v, 1, 2), rows(dout, tile)
    s, product = scores(q, k, tile, by_keys=True)
    s = s if shift is None else s - shift[:, :, None]
    p = jnp.exp(s - lse[:, :, None])
    dp = inner(v, dout, tile)
    dropped = p
    if rule.dropout:
        keep = jnp.where(like_scores(kept(tile), p, tile, by_keys=True), 1.0 / (1.0 - rule.dropout), 0.0)
        dropped, dp = p * keep, dp * keep
    ds = p * (dp - delta[:, :, None])
    added = {}
    if tile.bias is not None and not tile.bias_fixed:
        added["dbias"] = _summed(from_scores(ds, tile, by_keys=True), tile.bias)
    if tile.slopes is not None:
        by_distance = (from_scores(ds, tile, by_keys=True) * distance(tile)).sum((2, 3))
        added["dslopes"] = _summed(-by_distance, tile.slopes)
    if rule.soft_cap is not None:
        ds = ds * (1.0 - jnp.square(product / rule.soft_cap))
    dropped, ds = dropped.astype(dtype), (ds * rule.scale).astype(dtype)
    added["dv"] = jnp.swapaxes(outer(dropped, dout, tile), 1, 2)
    added["dk"] = jnp.swapaxes(outer(ds, q, tile), 1, 2)
    added["dq"] = outer(jnp.swapaxes(k, 2, 3), ds, tile)
    return added


def _summed(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x` summed over the axes on which `like` broadcasts."""
    axes = tuple(axis for axis, length in enumerate(like.shape) if length == 1 and x.shape[axis] != 1)
    return x.sum(axes, keepdims=True) if axes else x
