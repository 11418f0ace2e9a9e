# SPDX-License-Identifier: Apache-2.0
"""What a block computes, written out densely in float64 NumPy, and blocks to compute it on."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from ringattn_core.config import BwdParams, FwdParams
from ringattn_core.contract.protocol import Block
from ringattn_core.contract.rule import Rule

Arrays = dict[str, np.ndarray]


def make_block(
    batch: int = 2, q_length: int = 7, kv_length: int = 7, heads: int = 2, kv_heads: int = 2, dim: int = 8,
    value_dim: int | None = None, dtype: Any = jnp.float32, draw_seed: int = 0, tile: int | None = None,
    offset: int = 0, **fields: Any,
) -> Block:  # fmt: skip
    """A block of random numbers; fields of `Rule` go to its rule, of `Block` to itself, the keys start at `offset`."""
    draw = np.random.default_rng(draw_seed)
    value_dim = value_dim or dim
    q, k, v = (
        jnp.asarray(draw.normal(size=(batch, length, count, size)), dtype)
        for length, count, size in (
            (q_length, heads, dim), (kv_length, kv_heads, dim), (kv_length, kv_heads, value_dim)
        )
    )  # fmt: skip
    names = {field.name for field in dataclasses.fields(Rule)}
    rule = Rule(
        **{
            "scale": dim**-0.5,
            "fwd_params": FwdParams(q_blocksize=tile, kv_blocksize=tile),
            "bwd_params": BwdParams(q_blocksize=tile, kv_blocksize=tile),
            **{name: fields.pop(name) for name in list(fields) if name in names},
        }
    )
    index, kv_index = np.arange(q_length, dtype=np.int32)[None], np.arange(kv_length, dtype=np.int32)[None] + offset
    given: dict[str, Any] = {
        "q_positions": index, "kv_positions": kv_index, "q_index": index, "kv_index": kv_index,
        "batch_index": np.arange(batch, dtype=np.int32), "head_index": np.arange(heads, dtype=np.int32),
        "q_segments": None, "kv_segments": None, "bias": None, "mask": None, "slopes": None, "seed": None, **fields,
    }  # fmt: skip
    kv = jnp.stack([k, v]) if value_dim == dim else jnp.concatenate([k, v], -1)
    return Block(q=q, kv=kv, rule=rule, **{n: x if x is None else jnp.asarray(x) for n, x in given.items()})


def f64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def visible(block: Block) -> np.ndarray:
    """Which pairs `[B, N, T, S]` may meet, straight from the table of the specification."""
    rule = block.rule
    i, j = f64(block.q_positions)[:, None, :, None], f64(block.kv_positions)[:, None, None, :]
    seen = np.ones((block.q.shape[0], block.q.shape[2], block.q_length, block.kv_length), bool)
    if rule.causal:
        seen &= j <= i
    if rule.window is not None:
        left, right = rule.window
        seen &= (left is None) | (j >= i - (left or 0))
        seen &= (right is None) | (j <= i + (right or 0))
    if rule.chunk is not None:
        seen &= (np.floor(i / rule.chunk) == np.floor(j / rule.chunk)) & (j <= i)
    if block.q_segments is not None:
        ids, kv_ids = f64(block.q_segments)[:, None, :, None], f64(block.kv_segments)[:, None, None, :]
        seen &= (ids == kv_ids) & (ids >= 0)
    for head in range(seen.shape[1]) if rule.masks else ():
        mask = rule.masks[rule.mask_of_head[head] if rule.mask_of_head else 0]
        index = np.ix_(np.asarray(block.q_index)[0], np.asarray(block.kv_index)[0])
        seen[:, head] &= mask.held.array[index]  # pyright: ignore[reportAttributeAccessIssue]
    if block.mask is not None:
        seen &= np.asarray(block.mask)
    return seen


def philox(counter: list[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    """Philox 4x32-10 in uint64."""
    low = np.uint64(0xFFFFFFFF)
    c = [x.astype(np.uint64) for x in counter]
    k = [np.uint64(x) for x in key]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> np.uint64(32)) ^ c[1] ^ k[0], b & low, (a >> np.uint64(32)) ^ c[3] ^ k[1], a & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return c


def keep(block: Block) -> np.ndarray:
    """What dropout multiplies each probability by."""
    rate = block.rule.dropout
    shape = (block.q.shape[0], block.q.shape[2], block.q_length, block.kv_length)
    if not rate:
        return np.ones(shape)
    kept = np.zeros(shape, bool)
    for b in range(shape[0]):
        index = np.broadcast_arrays(
            np.asarray(block.kv_index)[0][None, None, :] // 4, np.asarray(block.q_index)[0][None, :, None],
            np.asarray(block.head_index)[:, None, None], np.asarray(block.batch_index)[b],
        )  # fmt: skip
        words = np.stack(philox(list(index), (int(block.seed[b]), 0)))  # pyright: ignore[reportOptionalSubscript]
        word = np.take_along_axis(words, (np.asarray(block.kv_index)[0] % 4)[None, None, None, :], 0)[0]
        kept[b] = word >= np.uint64(int(rate * 2**32))
    return kept / (1 - rate)


def scores(block: Block) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores, what the cap's derivative multiplies by, and distances, each `[B, N, T, S]`."""
    q, k = f64(block.q), np.repeat(f64(block.k), block.group, 2)
    s, slope = np.einsum("btnh,bsnh->bnts", q, k) * block.rule.scale, np.ones(1)
    if block.rule.soft_cap is not None:
        bent = np.tanh(s / block.rule.soft_cap)
        s, slope = block.rule.soft_cap * bent, 1 - bent**2
    if block.bias is not None:
        s = s + f64(block.bias)
    distance = np.abs(f64(block.q_positions)[:, None, :, None] - f64(block.kv_positions)[:, None, None, :])
    if block.slopes is not None:
        s = s - f64(block.slopes)[:, :, None, None] * distance
    return np.where(visible(block), s, -np.inf), slope, distance


def forward(block: Block) -> tuple[np.ndarray, np.ndarray]:
    """The output `[B, T, N, Hv]` and the lse `[B, N, T]` of the block alone."""
    s, _, _ = scores(block)
    with np.errstate(divide="ignore"):
        top = np.where(np.isneginf(s.max(-1)), 0, s.max(-1))
        lse = top + np.log(np.exp(s - top[..., None]).sum(-1))
    p = np.exp(s - np.where(np.isneginf(lse), 0, lse)[..., None]) * keep(block)
    return np.einsum("bnts,bsnh->btnh", p, np.repeat(f64(block.v), block.group, 2)), lse


def backward(block: Block, dout: np.ndarray, lse: np.ndarray, delta: np.ndarray) -> Arrays:
    """The gradients of the block by name, `dq` from zero."""
    s, slope, distance = scores(block)
    p = np.exp(s - np.where(np.isneginf(lse), 0, lse)[..., None])
    kept, v, k = keep(block), np.repeat(f64(block.v), block.group, 2), np.repeat(f64(block.k), block.group, 2)
    ds = p * (kept * np.einsum("btnh,bsnh->bnts", dout, v) - delta[..., None])
    inner = ds * slope * block.rule.scale
    by_head = {"dk": (inner, f64(block.q)), "dv": (p * kept, dout)}
    shape = block.k.shape[:3]
    grads = {
        name: np.einsum("bnts,btnh->bsnh", *pair).reshape(*shape, block.group, -1).sum(3)
        for name, pair in by_head.items()
    }
    grads["dq"] = np.einsum("bnts,bsnh->btnh", inner, k)
    if block.bias is not None:
        grads["dbias"] = _summed(ds, block.bias.shape)
    if block.slopes is not None:
        grads["dslopes"] = _summed(-(ds * distance).sum((2, 3)), block.slopes.shape)
    return grads


def _summed(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return x.sum(tuple(a for a, n in enumerate(shape) if n == 1 and x.shape[a] != 1), keepdims=True)
