# SPDX-License-Identifier: Apache-2.0
"""Blocks of random numbers with any option that decides what is visible, and which pairs those are."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from ringattn_core.config import BwdParams, FwdParams
from ringattn_core.contract.protocol import Block
from ringattn_core.contract.rule import Rule
from ringattn_core.contract.visibility import visible
from ringattn_core.masks import Causal, Numpy, Prefix

_SHORT = {
    "scale": "softmax_scale",
    "window": "sliding_window",
    "chunk": "chunk_size",
    "soft_cap": "logits_soft_cap",
    "dropout": "dropout_prob",
}
"""Short names of fields of `Rule`, for tests."""
_OF_RULE = {field.name for field in dataclasses.fields(Rule)}


def make_block(
    batch: int = 2,
    q_length: int = 41,
    kv_length: int = 53,
    heads: int = 2,
    kv_heads: int | None = None,
    dim: int = 8,
    dtype: Any = jnp.float32,
    params: dict[str, Any] | None = None,
    draw: Callable[..., Any] | None = None,
    **fields: Any,
) -> Block:
    """A block of random numbers, or of what `draw(size=)` makes; fields of `Rule` go to its rule, others to itself."""
    draw = draw or np.random.default_rng(0).normal
    kv_heads = kv_heads or heads
    fields = {_SHORT.get(name, name): x for name, x in fields.items()}
    of_rule = {name: fields.pop(name) for name in list(fields) if name in _OF_RULE}
    sizes = {"fwd_params": FwdParams(**(params or {})), "bwd_params": BwdParams(**(params or {}))}
    index, kv_index = np.arange(q_length, dtype=np.int32)[None], np.arange(kv_length, dtype=np.int32)[None]
    given: dict[str, Any] = {
        "q_positions": index,
        "kv_positions": kv_index,
        "q_index": index,
        "kv_index": kv_index,
        "batch_index": np.arange(batch, dtype=np.int32),
        "head_index": np.arange(heads, dtype=np.int32),
        **dict.fromkeys(("q_segments", "kv_segments", "bias", "mask", "slopes", "seed")),
        **fields,
    }
    return Block(
        q=jnp.asarray(draw(size=(batch, q_length, heads, dim)), dtype),
        kv=jnp.asarray(draw(size=(2, batch, kv_length, kv_heads, dim)), dtype),
        rule=Rule(**{"softmax_scale": dim**-0.5, **sizes, **of_rule}),
        **{name: x if x is None or isinstance(x, bool) else jnp.asarray(x) for name, x in given.items()},
    )


def ids(batch: int, length: int) -> np.ndarray:
    """Documents that differ by batch row, with padding at the end."""
    found = np.sort(np.random.default_rng(length).integers(0, 3, (batch, length)), -1)
    found[:, length - length // 5 :] = -1
    return found.astype(np.int32)


def dense_mask(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).random(shape) < 0.6


def scattered(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9, shape[-1], shape).astype(np.int32)


def tiled_mask(*shape: int) -> np.ndarray:
    """A mask that leaves some tiles whole, forbids others, and cuts through the rest."""
    found = np.ones(shape, bool)
    found[..., :20, :] = False
    found[..., 20:, 25:40] = dense_mask(*shape)[..., 20:, 25:40]
    return found


OPTIONS: dict[str, Any] = {
    "nothing": lambda t, s: {},
    "causal": lambda t, s: {"causal": True},
    "causal, keys later": lambda t, s: {"causal": True, "kv_positions": np.arange(s, dtype=np.int32)[None] + 20},
    "causal, all keys too late": lambda t, s: {"causal": True, "kv_positions": np.arange(s, dtype=np.int32)[None] + t},
    "window": lambda t, s: {"window": (5, 2)},
    "window to the left": lambda t, s: {"window": (4, None), "causal": True},
    "window to the right": lambda t, s: {"window": (None, 3)},
    "window wider than any block": lambda t, s: {"window": (2**30, 2**31 - 1)},
    "chunk": lambda t, s: {"chunk": 6},
    "chunk in a window": lambda t, s: {"chunk": 12, "window": (5, 1)},
    "segments": lambda t, s: {"q_segments": ids(2, t), "kv_segments": ids(2, s)},
    "causal segments": lambda t, s: {"q_segments": ids(2, t), "kv_segments": ids(2, s), "causal": True},
    "mask of the algebra": lambda t, s: {"masks": (Causal() | Prefix(9),), "mask_of_head": (0, 0)},
    "masks of heads": lambda t, s: {
        "masks": tuple(Numpy(dense_mask(2, t, s)[n]) for n in range(2)),
        "mask_of_head": (1, 0),
    },
    "dense mask": lambda t, s: {"mask": dense_mask(2, 1, t, s)},
    "dense mask by tiles": lambda t, s: {"mask": tiled_mask(1, 2, t, s)},
    "both kinds of masks": lambda t, s: {
        "masks": (Causal() | Prefix(9),),
        "mask_of_head": (0, 0),
        "mask": dense_mask(2, 2, t, s),
        "causal": True,
    },
    "padding": lambda t, s: {"padded": True, "kv_index": np.where(np.arange(s) % 3 == 1, -1, np.arange(s))[None]},
    "positions": lambda t, s: {
        "causal": True,
        "increasing": False,
        "q_positions": scattered(5, 2, t),
        "kv_positions": scattered(6, 2, s),
    },
    "positions in chunks": lambda t, s: {
        "chunk": 4,
        "increasing": False,
        "q_positions": scattered(5, 1, t),
        "kv_positions": scattered(6, 2, s),
    },
}
"""What of a block with so many queries and keys, two batch rows and two heads, is visible."""


def with_option(option: str, q_length: int = 41, kv_length: int = 53, **fields: Any) -> Block:
    return make_block(q_length=q_length, kv_length=kv_length, **{**OPTIONS[option](q_length, kv_length), **fields})


def seen_pairs(block: Block) -> np.ndarray:
    """`[B, N, T, S]`."""
    shape = (block.q.shape[0], block.q.shape[2], block.q_length, block.kv_length)
    seen = visible(block)
    return np.broadcast_to(True if seen is None else np.asarray(seen), shape)
