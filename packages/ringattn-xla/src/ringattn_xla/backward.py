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

from .scores import distance, from_scores, like_scores, product, row_values, rows, scores, unrows
from .tiling import Cut, choose, over_visible_tiles, pad, part, put, take

_AXES = {"dq": "BK.R", "dk": "BSK.", "dv": "BSK.", "dbias": "BNTS", "dslopes": "BN"}


def backward(
    block: Block,
    dout: Float[Array, "B T N Hv"],
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    dq: Float32[Array, "B T N H"] | None,
) -> Gradients:
    """`dq` continued with the keys of the block, and the gradients that the block adds to everything else."""
    asked, before = block, jnp.zeros(block.q.shape, jnp.float32) if dq is None else dq
    axes = axes_of(block, dout, lse, delta, before)
    block, dout, lse, delta, before = align((block, dout, lse, delta, before), axes)
    size = choose(block, block.rule.bwd_params)
    block = pad(block, size)
    dout = padded(dout, block.q_length, 1)
    # A row that saw nothing has no probabilities; neither has padding.
    lse = padded(jnp.where(jnp.isneginf(lse), jnp.inf, lse), block.q_length, 2, jnp.inf)
    of_rows = [row_values(x, block) for x in (lse, padded(delta, block.q_length, 2))]
    if block.shift is not None:
        of_rows.append(row_values(block.shift, block))
    total = {"dq": jnp.swapaxes(rows(padded(before, block.q_length, 1), block), 2, 3)}
    total |= {"dk": ordering.zeros(block.k.shape, before), "dv": ordering.zeros(block.v.shape, before)}
    total |= {} if block.bias is None or block.bias_fixed else {"dbias": ordering.zeros(block.bias.shape, before)}
    total |= {} if block.slopes is None else {"dslopes": ordering.zeros(block.slopes.shape, before)}
    total = align(total, axes)

    def step(start: Cut, size: Cut, total: dict[str, Any]) -> dict[str, Any]:
        row = [take(x, "BKR", block, start, size) for x in of_rows]
        added = _of_tile(part(block, start, size), take(dout, "BTN.", block, start, size), *row)
        old = {name: take(x, _AXES[name], block, start, size) for name, x in total.items()}
        return {name: put(x, old[name] + added[name], _AXES[name], block, start, size) for name, x in total.items()}

    total = over_visible_tiles(block, size, step, total)
    dq = unrows(jnp.swapaxes(total["dq"], 2, 3), block)
    dbias = total.get("dbias")
    if dbias is not None and asked.bias is not None:
        dbias = dbias[:, :, : asked.bias.shape[2], : asked.kv_length]
    dk, dv = (total[name][:, : asked.kv_length] for name in ("dk", "dv"))
    return Gradients(dq[:, : asked.q_length], dk, dv, dbias, total.get("dslopes"))


def _of_tile(tile: Block, dout: Any, lse: Any, delta: Any, shift: Any = None) -> dict[str, Any]:
    """What one tile adds."""
    rule, dtype = tile.rule, tile.q.dtype
    q, k, v, dout = rows(tile.q, tile), jnp.swapaxes(tile.k, 1, 2), jnp.swapaxes(tile.v, 1, 2), rows(dout, tile)
    s, capped = scores(q, k, tile, by_keys=True)
    s = s if shift is None else s - shift[:, :, None]
    p = jnp.exp(s - lse[:, :, None])
    dp = product(v, dout, 3, tile)
    dropped = p
    if rule.dropout:
        keep = jnp.where(like_scores(kept(tile), p, tile, by_keys=True), 1.0 / (1.0 - rule.dropout), 0.0)
        dropped, dp = p * keep, dp * keep
    ds = p * (dp - delta[:, :, None])
    added, pairs = {}, from_scores(ds, tile, by_keys=True)
    if tile.bias is not None and not tile.bias_fixed:
        added["dbias"] = _summed(pairs, tile.bias)
    if tile.slopes is not None:
        added["dslopes"] = _summed(-(pairs * distance(tile)).sum((2, 3)), tile.slopes)
    if rule.soft_cap is not None:
        ds = ds * (1.0 - jnp.square(capped / rule.soft_cap))
    dropped, ds = dropped.astype(dtype), (ds * rule.scale).astype(dtype)
    added["dv"] = jnp.swapaxes(product(dropped, dout, 2, tile), 1, 2)
    added["dk"] = jnp.swapaxes(product(ds, q, 2, tile), 1, 2)
    added["dq"] = product(jnp.swapaxes(k, 2, 3), ds, 2, tile)
    return added


def _summed(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x` summed over the axes on which `like` broadcasts."""
    axes = tuple(axis for axis, length in enumerate(like.shape) if length == 1 and x.shape[axis] != 1)
    return x.sum(axes, keepdims=True) if axes else x
