# SPDX-License-Identifier: Apache-2.0
"""How the gradients of a block are computed: each visible tile once, probabilities from the final lse."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32
from ringattn_core.dropout import kept
from ringattn_core.protocol import Block, Gradients
from ringattn_core.visibility import visible

from .scores import biased, by_group, capped, distance, grouped, of_rows, product
from .tiling import Cut, choose, over_visible_tiles, pad, pad_rows, part, put, take, varying_alike

_ACCUMULATED = {"dq": "BTK..", "dk": "BSK.", "dv": "BSK.", "dbias": "BNTS", "dslopes": "BN"}


def backward(
    block: Block,
    dout: Float[Array, "B T N Hv"],
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    dq: Float32[Array, "B T N H"],
) -> Gradients:
    """The gradients that this block's keys give and get; `dq` continues."""
    asked = block
    block, dout, lse, delta, dq = varying_alike((block, dout, lse, delta, dq))
    size = choose(block, block.rule.bwd_params)
    block = pad(block, size)
    dout = grouped(pad_rows(dout, block.q_length, 1), block)
    delta = of_rows(pad_rows(delta, block.q_length, 2), block)
    lse = of_rows(pad_rows(jnp.where(jnp.isneginf(lse), 0.0, lse), block.q_length, 2, jnp.inf), block)
    total = {"dq": grouped(pad_rows(dq, block.q_length, 1), block)}
    total |= {"dk": jnp.zeros(block.k.shape, jnp.float32), "dv": jnp.zeros(block.v.shape, jnp.float32)}
    total |= {} if block.bias is None else {"dbias": jnp.zeros(block.bias.shape, jnp.float32)}
    total |= {} if block.slopes is None else {"dslopes": jnp.zeros(block.slopes.shape, jnp.float32)}
    total, *_ = varying_alike((total, block))

    def step(start: Cut, size: Cut, total: dict[str, Any]) -> dict[str, Any]:
        row = (take(dout, "BTK..", block, start, size), *(take(x, "BKT.", block, start, size) for x in (lse, delta)))
        added = _of_tile(part(block, start, size), *row)
        before = {name: take(x, _ACCUMULATED[name], block, start, size) for name, x in total.items()}
        return {
            name: put(x, before[name] + added[name], _ACCUMULATED[name], block, start, size) for name, x in total.items()
        }

    total = over_visible_tiles(block, size, step, total)
    dq = total["dq"].reshape(*block.q.shape)[:, : asked.q_length]
    dk, dv = total["dk"][:, : asked.kv_length], total["dv"][:, : asked.kv_length]
    dbias = total.get("dbias")
    if dbias is not None and asked.bias is not None:
        dbias = dbias[:, :, : asked.bias.shape[2], : asked.kv_length]
    return Gradients(dq, dk, dv, dbias, total.get("dslopes"))


def _of_tile(tile: Block, dout: Any, lse: Any, delta: Any) -> dict[str, Any]:
    """What one tile adds. What nobody sees is selected away last, so that no NaN of its row or column shows in it."""
    rule = tile.rule
    s = capped(tile)
    p = jnp.exp(biased(s, tile) - lse[..., None])
    dp = product("btkgh,bskh->bktgs", dout.astype(tile.v.dtype), tile.v, tile)
    dropped = p
    if rule.dropout:
        keep = jnp.where(by_group(kept(tile), tile), 1.0 / (1.0 - rule.dropout), 0.0)
        dropped, dp = p * keep, dp * keep
    ds = p * (dp - delta[..., None])
    seen = visible(tile)
    if seen is not None:
        seen = by_group(seen, tile)
        dropped, ds = jnp.where(seen, dropped, 0.0), jnp.where(seen, ds, 0.0)
    added = {}
    if tile.bias is not None:
        added["dbias"] = _summed(jnp.swapaxes(ds, 2, 3).reshape(ds.shape[0], -1, *_square(tile)), tile.bias)
    if tile.slopes is not None:
        by_distance = (ds * by_group(distance(tile)[:, None], tile)).sum((2, 4))
        added["dslopes"] = _summed(-by_distance.reshape(ds.shape[0], -1), tile.slopes)
    if rule.soft_cap is not None:
        ds = ds * (1.0 - jnp.square(s / rule.soft_cap))
    ds = ds * rule.scale
    dtype = tile.q.dtype
    added["dv"] = product("bktgs,btkgh->bskh", dropped.astype(dtype), dout.astype(dtype), tile)
    added["dk"] = product("bktgs,btkgh->bskh", ds.astype(dtype), grouped(tile.q, tile), tile)
    added["dq"] = product("bktgs,bskh->btkgh", ds.astype(dtype), tile.k, tile)
    return added


def _square(tile: Block) -> tuple[int, int]:
    return tile.q_length, tile.kv_length


def _summed(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x` summed over the axes on which `like` broadcasts."""
    axes = tuple(axis for axis, length in enumerate(like.shape) if length == 1 and x.shape[axis] != 1)
    return x.sum(axes, keepdims=True) if axes else x
