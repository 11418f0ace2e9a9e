# SPDX-License-Identifier: Apache-2.0
"""Blocks of random numbers with any option, and what the XLA backend makes of them."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from ringattn_core.config import BwdParams, FwdParams
from ringattn_core.contract.protocol import Block
from ringattn_core.contract.rule import Rule
from ringattn_core.masks import Causal, Numpy, Prefix

TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}


def make_block(
    batch: int = 2, q_length: int = 7, kv_length: int = 7, heads: int = 2, kv_heads: int = 2, dim: int = 8,
    value_dim: int | None = None, dtype: Any = jnp.float32, draw_seed: int = 0, tiles: tuple[int, int] | None = None,
    offset: int = 0, **fields: Any,
) -> Block:  # fmt: skip
    """A block of random numbers; fields of `Rule` go to its rule, of `Block` to itself, the keys start at `offset`."""
    assert heads % kv_heads == 0
    draw = np.random.default_rng(draw_seed)
    value_dim = value_dim or dim
    q, k, v = (
        jnp.asarray(draw.normal(size=(batch, length, count, size)), dtype)
        for length, count, size in (
            (q_length, heads, dim), (kv_length, kv_heads, dim), (kv_length, kv_heads, value_dim),
        )
    )  # fmt: skip
    q_tile, kv_tile = tiles or (None, None)
    names = {field.name for field in dataclasses.fields(Rule)}
    rule = Rule(
        **{
            "scale": dim**-0.5,
            "fwd_params": FwdParams(q_blocksize=q_tile, kv_blocksize=kv_tile),
            "bwd_params": BwdParams(q_blocksize=q_tile, kv_blocksize=kv_tile),
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
    return Block(q=q, kv=kv, rule=rule, **{n: _array(x) for n, x in given.items()})


def _array(x: Any) -> Any:
    return x if x is None or isinstance(x, bool) else jnp.asarray(x)


def ids(batch: int, length: int) -> np.ndarray:
    """Documents that differ by batch row, with padding at the end."""
    found = np.sort(np.random.default_rng(length).integers(0, 3, (batch, length)), -1)
    found[:, length - length // 5 :] = -1
    return found.astype(np.int32)


def dense_mask(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).random(shape) < 0.6


def mask_in_tiles(length: int, tile: int) -> np.ndarray:
    """Tiles of pairs here and there, half of them visible as a whole and a fourth in part."""
    of_tile = np.random.default_rng(6).integers(0, 4, (length // tile, length // tile)).repeat(tile, 0).repeat(tile, 1)
    return ((of_tile < 2) | ((of_tile == 2) & dense_mask(length, length)))[None, None]


def bias(*shape: int) -> np.ndarray:
    return np.random.default_rng(4).normal(size=shape).astype(np.float32)


def forbidding(*shape: int) -> np.ndarray:
    """A bias that forbids some pairs, and all of some rows."""
    found = bias(*shape)
    found[dense_mask(*shape)] = -np.inf
    found[..., ::3, :] = -np.inf
    return found


def _masks(length: int, keys: int) -> dict[str, Any]:
    masks = tuple(Numpy(dense_mask(2, length, keys)[n]) for n in range(2))
    return {"masks": masks, "mask_of_head": (1, 0, 0, 1)}


def _scattered(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9, shape[-1], shape).astype(np.int32)


SLOPES = np.array([[0.5, 0.1, 0.02, 0.3]], np.float32)
SEEDS = np.array([5, 2**32 - 1], np.uint32)

OPTIONS: dict[str, Any] = {
    "plain": lambda t, s: {},
    "causal": lambda t, s: {"causal": True},
    "window": lambda t, s: {"window": (5, 2)},
    "window to the left": lambda t, s: {"window": (4, None), "causal": True},
    "window to the right": lambda t, s: {"window": (None, 3)},
    "window wider than any block": lambda t, s: {"window": (2**30, 2**31 - 1)},
    "chunk": lambda t, s: {"chunk": 6},
    "chunk in a window": lambda t, s: {"chunk": 12, "window": (5, 1)},
    "segments": lambda t, s: {"q_segments": ids(2, t), "kv_segments": ids(2, s)},
    "causal segments": lambda t, s: {"q_segments": ids(2, t), "kv_segments": ids(2, s), "causal": True},
    "mask of the algebra": lambda t, s: {"masks": (Causal() | Prefix(9),)},
    "masks of heads": _masks,
    "dense mask": lambda t, s: {"mask": dense_mask(2, 1, t, s)},
    "dense mask of heads": lambda t, s: {"mask": dense_mask(1, 4, t, s)},
    "both kinds of masks": lambda t, s: {**_masks(t, s), "mask": dense_mask(2, 4, t, s), "causal": True},
    "soft cap": lambda t, s: {"soft_cap": 1.5, "causal": True},
    "soft cap far above the scores": lambda t, s: {"soft_cap": 3e4},
    "scale": lambda t, s: {"scale": 0.9},
    "negative scale": lambda t, s: {"scale": -0.7, "causal": True},
    "scale of zero": lambda t, s: {"scale": 0.0},
    "bias": lambda t, s: {"bias": bias(2, 4, t, s)},
    "bias of keys": lambda t, s: {"bias": bias(1, 1, 1, s), "soft_cap": 2.0},
    "bias of heads": lambda t, s: {"bias": bias(1, 4, t, s), "causal": True},
    "bias that forbids": lambda t, s: {"bias": forbidding(2, 4, t, s)},
    "slopes": lambda t, s: {"slopes": SLOPES, "causal": True},
    "slopes of rows": lambda t, s: {"slopes": np.concatenate([SLOPES, SLOPES * 2])},
    "dropout": lambda t, s: {"dropout": 0.3, "seed": SEEDS, "causal": True},
    "padding": lambda t, s: {"padded": True, "kv_index": np.where(np.arange(s) % 3 == 1, -1, np.arange(s))[None]},
    "positions": lambda t, s: {
        "causal": True, "increasing": False, "q_positions": _scattered(5, 2, t), "kv_positions": _scattered(6, 2, s),
    },
    "positions in chunks": lambda t, s: {
        "chunk": 4, "increasing": False, "q_positions": _scattered(5, 1, t), "kv_positions": _scattered(6, 2, s),
    },
    "all at once": lambda t, s: {
        "causal": True, "window": (40, None), "soft_cap": 3.0, "bias": bias(2, 4, t, s), "dropout": 0.2,
        "seed": np.array([1, 2], np.uint32), "slopes": np.array([[0.01, 0.02, 0.03, 0.04]], np.float32),
        "q_segments": ids(2, t), "kv_segments": ids(2, s),
    },
}  # fmt: skip
"""What a block of so many queries and keys, two batch rows and four heads may be asked for."""


KEY_INDICES = {
    "consecutive": np.arange(40),
    "consecutive from a multiple of four": np.arange(40) + 4000,
    "consecutive from no multiple of four": np.arange(40) + 4002,
    "every fourth": np.arange(40) * 4 + 1,
    "two runs that meet within a tile": np.concatenate([np.arange(8) + 8, np.arange(32) + 400]),
    "with padding": np.where(np.arange(40) < 35, np.arange(40), -1),
}
"""Global indices of 40 keys; a kernel may draw for four at once only where they follow each other."""


def with_option(option: str, q_length: int, kv_length: int, **fields: Any) -> Block:
    given = OPTIONS[option](q_length, kv_length)
    return make_block(2, q_length, kv_length, **{"heads": 4, "kv_heads": 2, **given, **fields})


def near(what: str, got: Any, want: Any, tolerance: float) -> None:
    """Both agree, infinities and all; a failure names the worst element."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want), f"{what}: infinite elsewhere")
    wrong = np.abs(np.where(np.isinf(want), 0, got) - np.where(np.isinf(want), 0, want))
    worst = np.unravel_index(np.argmax(np.where(np.isnan(wrong), np.inf, wrong)), wrong.shape)
    assert wrong[worst] <= tolerance, f"{what} is off by {wrong[worst]:.3g} > {tolerance:.3g} at {worst}"
