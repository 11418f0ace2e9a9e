# SPDX-License-Identifier: Apache-2.0
"""The backward pass of a block: visits each visible tile once, and computes probabilities from the final lse."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32
from ringattn_core.contract import ordering
from ringattn_core.contract.dropout import kept
from ringattn_core.contract.protocol import Block, Gradients, padded
from ringattn_core.contract.varying import align, axes_of

from .scores import like_scores, product, row_values, rows, scores, term_gradients, terms, unrows
from .tiling import BLOCK_AXES, Arrays, choose, over_visible_tiles, pad

_AXES = {"dout": "BTN.", "lse": "BKR", "delta": "BKR", "dq": "BK.R", "dk": "BSK.", "dv": "BSK."}


def backward(
    block: Block,
    dout: Float[Array, "B T N Hv"],
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    dq: Float32[Array, "B T N H"] | None,
) -> Gradients:
    """The gradients of the block. `dq` of the result is the gradient plus the argument `dq`, if there is one."""
    asked, before = block, jnp.zeros(block.q.shape, jnp.float32) if dq is None else dq
    given = block, dout, lse, delta, before
    block, dout, lse, delta, before = align(given, axes_of(given))
    size = choose(block, block.rule.bwd_params)
    block = pad(block, size)
    dout = padded(dout, block.q_length, 1)
    # For a query that sees no key, and for padding, lse becomes +inf, so that the probabilities are 0.
    lse = padded(jnp.where(jnp.isneginf(lse), jnp.inf, lse), block.q_length, 2, jnp.inf)
    values = {"lse": lse, "delta": padded(delta, block.q_length, 2)}
    read = {"dout": dout, **{name: row_values(x, block) for name, x in values.items()}}
    total = {"dq": jnp.swapaxes(rows(padded(before, block.q_length, 1), block), 2, 3)}
    inputs = {"k": block.k, "v": block.v, **terms(block)}
    total |= {f"d{name}": ordering.zeros(x.shape, before) for name, x in inputs.items()}
    letters = _AXES | {f"d{name}": BLOCK_AXES[name] for name in terms(block)}
    total = over_visible_tiles(block, size, _added, read, total, letters)
    dq = unrows(jnp.swapaxes(total["dq"], 2, 3), block)
    inputs = {"k": asked.k, "v": asked.v, **terms(asked)}
    unpadded = {f"d{name}": total[f"d{name}"][tuple(map(slice, x.shape))] for name, x in inputs.items()}
    return Gradients(dq[:, : asked.q_length], **unpadded)


def _added(tile: Block, read: Arrays, total: Arrays) -> Arrays:
    """Adds the gradients of one tile to `total`. `read` has `dout`, `lse` and `delta` of its queries."""
    rule, dtype = tile.rule, tile.q.dtype
    q, k, v, dout = rows(tile.q, tile), jnp.swapaxes(tile.k, 1, 2), jnp.swapaxes(tile.v, 1, 2), rows(read["dout"], tile)
    s, capped = scores(q, k, tile, by_keys=True)
    p = jnp.exp(s - read["lse"][:, :, None])
    dp = product(v, dout, 3, tile)
    dropped = p
    if rule.dropout_prob:
        keep = jnp.where(like_scores(kept(tile), p, tile, by_keys=True), rule.keep_weight, 0.0)
        dropped, dp = p * keep, dp * keep
    ds = p * (dp - read["delta"][:, :, None])
    added = {f"d{name}": x for name, x in term_gradients(ds, tile).items()}
    if rule.logits_soft_cap is not None:
        ds = ds * (1.0 - jnp.square(capped / rule.logits_soft_cap))
    dropped, ds = dropped.astype(dtype), (ds * rule.softmax_scale).astype(dtype)
    added["dv"] = jnp.swapaxes(product(dropped, dout, 2, tile), 1, 2)
    added["dk"] = jnp.swapaxes(product(ds, q, 2, tile), 1, 2)
    added["dq"] = product(jnp.swapaxes(k, 2, 3), ds, 2, tile)
    return {name: x + added[name] for name, x in total.items()}
