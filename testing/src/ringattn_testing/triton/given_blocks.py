# SPDX-License-Identifier: Apache-2.0
"""Blocks of random numbers with any option, and what the XLA backend makes of them."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from ringattn_core.contract.protocol import Block, Partial
from ringattn_core.masks import Causal, Numpy, Prefix

from ringattn_testing import random_blocks
from ringattn_testing.random_blocks import random_ids as ids
from ringattn_testing.random_blocks import random_mask as dense_mask

TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}


def make_block(*sizes: int, tiles: tuple[int, int] | None = None, **fields: Any) -> Block:
    """`random_blocks.make_block`, with queries and keys in such `tiles` in both passes."""
    params = {} if tiles is None else {"params": {"q_blocksize": tiles[0], "kv_blocksize": tiles[1]}}
    return random_blocks.make_block(*sizes, **params, **fields)


def mask_in_tiles(length: int, tile: int) -> np.ndarray:
    """Tiles of pairs here and there, half of them visible as a whole and a fourth in part."""
    of_tile = np.random.default_rng(6).integers(0, 4, (length // tile, length // tile)).repeat(tile, 0).repeat(tile, 1)
    return ((of_tile < 2) | ((of_tile == 2) & dense_mask(length, length)))[None, None]


def bias(*shape: int) -> np.ndarray:
    return np.random.default_rng(4).normal(size=shape).astype(np.float32)


def half_bias(*shape: int) -> np.ndarray:
    return bias(*shape).astype(jnp.bfloat16)


def forbidding(*shape: int) -> np.ndarray:
    """A bias that forbids some pairs, and all of some rows, with each number that libraries write for that."""
    lows = np.array([-2e5, -1e9, np.finfo(np.float32).min, -np.inf], np.float32)
    forbidden = dense_mask(*shape)
    forbidden[..., ::3, :] = True
    return np.where(forbidden, lows[np.arange(np.prod(shape)).reshape(shape) % len(lows)], bias(*shape))


def _masks(length: int, keys: int) -> dict[str, Any]:
    masks = tuple(Numpy(dense_mask(2, length, keys)[n]) for n in range(2))
    return {"masks": masks, "mask_of_head": (1, 0, 0, 1)}


SLOPES = np.array([[0.5, 0.1, 0.02, 0.3]], np.float32)
SEEDS = np.array([5, 2**32 - 1], np.uint32)


def scattered(seed: int, *shape: int) -> np.ndarray:
    """Positions in no order."""
    return np.random.default_rng(seed).integers(-9, shape[-1], shape).astype(np.int32)


def ranges(batch: int, heads: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last positions `[batch, heads, length]` at random; some ranges are empty."""
    ends = np.random.default_rng(length).integers(-9, length, (2, batch, heads, length)).astype(np.int32)
    first, last = np.minimum(*ends), np.maximum(*ends)
    last[..., ::7] = first[..., ::7] - 1
    return first, last


def documents(batch: int, length: int, size: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last position of the document of each query; documents of other rows begin elsewhere."""
    index = np.arange(length, dtype=np.int32)
    rows = np.arange(batch, dtype=np.int32)[:, None, None]
    first = (index + 9 * rows) // size * size - 9 * rows
    return first, first + size - 1


def chosen(groups: int, size: int, count: int = 3, **fields: Any) -> Any:
    """Blocks of `size` keys at random, other ones for each query and group; some queries choose none."""

    def options(length: int, keys: int) -> dict[str, Any]:
        found = np.random.default_rng(size).integers(-1, -(-keys // size), (2, length, groups, count))
        found[:, length // 3 : length // 3 + 9] = -1
        return {"selected": found, "selected_size": size, **fields}

    return options


OPTIONS: dict[str, Any] = {
    "plain": lambda t, s: {},
    "causal": lambda t, s: {"causal": True},
    "window": lambda t, s: {"sliding_window": (5, 2)},
    "segments": lambda t, s: {"q_segments": ids(2, t), "kv_segments": ids(2, s)},
    "causal segments": lambda t, s: {"q_segments": ids(2, t), "kv_segments": ids(2, s), "causal": True},
    "dense mask": lambda t, s: {"mask": dense_mask(2, 1, t, s)},
    "padding": lambda t, s: {"padded": True, "kv_index": np.where(np.arange(s) % 3 == 1, -1, np.arange(s))[None]},
    "positions": lambda t, s: {
        "causal": True, "q_positions": scattered(5, 2, t), "kv_positions": scattered(6, 2, s),
    },
    "range": lambda t, s: {"kv_range": ranges(1, 1, t)},
    "ranges of rows": lambda t, s: {"kv_range": ranges(2, 1, t), "causal": True, "sliding_window": (90, None)},
    "ranges of heads": lambda t, s: {"kv_range": ranges(2, 4, t)},
    "ranges of heads of all rows": lambda t, s: {"kv_range": ranges(1, 4, t), "causal": True},
    "ranges of heads in segments": lambda t, s: {
        "kv_range": ranges(2, 4, t), "q_segments": ids(2, t), "kv_segments": ids(2, s),
    },
    "ranges of heads in segments with dropout": lambda t, s: {
        "kv_range": ranges(2, 4, t), "q_segments": ids(2, t), "kv_segments": ids(2, s),
        "dropout_prob": 0.3, "seed": SEEDS,
    },
    "documents as ranges": lambda t, s: {"kv_range": documents(2, t), "causal": True},
    "mask of the algebra": lambda t, s: {"masks": (Causal() | Prefix(9),)},
    "masks of heads": _masks,
    "both kinds of masks": lambda t, s: {**_masks(t, s), "mask": dense_mask(2, 4, t, s), "causal": True},
    "chosen keys": chosen(1, 1, 20),
    "chosen blocks of 4": chosen(2, 4, 9, causal=True),
    "chosen blocks of 5": chosen(4, 5),
    "chosen blocks of 16": chosen(2, 16, sliding_window=(90, None)),
    "chosen blocks of 64": chosen(2, 64, 1, causal=True),
    "chosen blocks of 128": chosen(1, 128, 1),
    "chosen blocks and a mask": lambda t, s: {**chosen(2, 16)(t, s), "mask": dense_mask(2, 4, t, s)},
    "soft cap": lambda t, s: {"logits_soft_cap": 1.5, "causal": True},
    "soft cap far above the scores": lambda t, s: {"logits_soft_cap": 3e4},
    "scale": lambda t, s: {"softmax_scale": 0.9},
    "negative scale": lambda t, s: {"softmax_scale": -0.7, "causal": True},
    "scale of zero": lambda t, s: {"softmax_scale": 0.0},
    "bias": lambda t, s: {"bias": bias(2, 4, t, s)},
    "slopes": lambda t, s: {"slopes": SLOPES, "causal": True},
    "slopes of rows": lambda t, s: {"slopes": np.concatenate([SLOPES, SLOPES * 2])},
    "dropout": lambda t, s: {"dropout_prob": 0.3, "seed": SEEDS, "causal": True},
    "all at once": lambda t, s: {
        "causal": True, "sliding_window": (40, None), "logits_soft_cap": 3.0, "bias": bias(2, 4, t, s),
        "dropout_prob": 0.2, "seed": np.array([1, 2], np.uint32),
        "slopes": np.array([[0.01, 0.02, 0.03, 0.04]], np.float32),
        "q_segments": ids(2, t), "kv_segments": ids(2, s),
    },
}  # fmt: skip
"""What a block of so many queries and keys, two batch rows and four heads may be asked for."""
RANGES = ("range", "ranges of rows", "ranges of heads", "ranges of heads of all rows", "documents as ranges")
"""The options in which the caller says which positions each query sees."""
CHOSEN = tuple(name for name in OPTIONS if name.startswith("chosen"))
"""The options with chosen keys, of several grains and groups."""


def with_option(option: str, q_length: int, kv_length: int, **fields: Any) -> Block:
    given = OPTIONS[option](q_length, kv_length)
    return make_block(2, q_length, kv_length, **{"heads": 4, "kv_heads": 2, **given, **fields})


def near(what: str, got: Any, want: Any, tolerance: float) -> None:
    """Both agree, infinities and all; NaN agrees with nothing."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance, equal_nan=False, err_msg=what)


def spreads_nan(forward: Callable[[Block, Partial | None], Partial], block: Block) -> None:
    """The results of a head whose sinks are NaN are NaN, in rows that see no key too; those of other heads are not."""
    batch, length, heads, _ = block.q.shape
    partial = forward(block, Partial(None, jnp.zeros((batch, heads, length)).at[:, 1].set(jnp.nan)))
    assert partial.out is not None and np.isnan(partial.out[:, :, 1]).all() and np.isnan(partial.lse[:, 1]).all()
    assert np.isfinite(np.delete(partial.out, 1, 2)).all() and np.isfinite(np.delete(partial.lse, 1, 1)).all()


def after_bias_sums(jaxpr: Any, kernel: str) -> list[bool]:
    """For each launch of `kernel` in a program: whether it waits for the kernel that sums ds for an earlier strip."""
    sums, found = set(), []
    for equation in jaxpr.eqns:
        after = any(variable in sums for variable in equation.invars if not isinstance(variable, Literal))
        name = getattr(equation.params.get("call"), "name", "")
        found += [after] if name == kernel else []
        if after or name == "ringattn_bias_sums":
            sums.update(equation.outvars)
    return found
