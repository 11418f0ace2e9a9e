# SPDX-License-Identifier: Apache-2.0
"""Blocks of random numbers for the tests of the TPU backend."""

from typing import Any

import numpy as np
from ringattn_core.contract.protocol import Block

from ringattn_testing import random_blocks


def make_block(batch: int = 2, q_length: int = 41, kv_length: int = 53, heads: int = 2, **fields: Any) -> Block:
    """`random_blocks.make_block`, whose queries and keys by default fill no whole number of tiles."""
    return random_blocks.make_block(batch, q_length, kv_length, heads, **fields)


def ranges(batch: int, heads: int, q_length: int, kv_length: int) -> tuple[np.ndarray, np.ndarray]:
    """The first and last positions `[batch, heads, q_length]` that each query sees; some see no key, some see all."""
    ends = np.random.default_rng(batch + heads).integers(-9, kv_length + 9, (2, batch, heads, q_length))
    first, last = np.sort(ends, 0).astype(np.int32)
    last[..., ::7] = first[..., ::7] - 1
    first[..., 1::7], last[..., 1::7] = -(2**31), 2**31 - 1
    return first, last
