# SPDX-License-Identifier: Apache-2.0
"""Blocks of random numbers with any option that decides what is visible, and which pairs those are."""

from typing import Any

import numpy as np
import random_blocks
from random_blocks import MASKS
from random_blocks import random_mask as dense_mask
from ringattn_core.contract.protocol import Block
from ringattn_core.masks import Causal, Numpy, Prefix


def make_block(batch: int = 2, q_length: int = 41, kv_length: int = 53, heads: int = 2, **fields: Any) -> Block:
    """`random_blocks.make_block`, whose queries and keys by default fill no whole number of tiles."""
    return random_blocks.make_block(batch, q_length, kv_length, heads, **fields)


def tiled_mask(*shape: int) -> np.ndarray:
    """A mask that leaves some tiles whole, forbids others, and cuts through the rest."""
    found = np.ones(shape, bool)
    found[..., :20, :] = False
    found[..., 20:, 25:40] = dense_mask(*shape)[..., 20:, 25:40]
    return found


OPTIONS: dict[str, Any] = MASKS | {
    "nothing": lambda t, s: {},
    "causal, keys later": lambda t, s: {"causal": True, "kv_positions": np.arange(s, dtype=np.int32)[None] + 20},
    "causal, all keys too late": lambda t, s: {"causal": True, "kv_positions": np.arange(s, dtype=np.int32)[None] + t},
    "mask of the algebra": lambda t, s: {"masks": (Causal() | Prefix(9),), "mask_of_head": (0, 0)},
    "masks of heads": lambda t, s: {
        "masks": tuple(Numpy(dense_mask(2, t, s)[n]) for n in range(2)),
        "mask_of_head": (1, 0),
    },
    "dense mask by tiles": lambda t, s: {"mask": tiled_mask(1, 2, t, s)},
    "both kinds of masks": lambda t, s: {
        "masks": (Causal() | Prefix(9),),
        "mask_of_head": (0, 0),
        "mask": dense_mask(2, 2, t, s),
        "causal": True,
    },
}
"""What of a block with so many queries and keys, two batch rows and two heads, is visible."""


def with_option(option: str, q_length: int = 41, kv_length: int = 53, **fields: Any) -> Block:
    return make_block(q_length=q_length, kv_length=kv_length, **{**OPTIONS[option](q_length, kv_length), **fields})
