# SPDX-License-Identifier: Apache-2.0
"""Blocks of random numbers for the tests of the TPU backend."""

from typing import Any

import random_blocks
from ringattn_core.contract.protocol import Block


def make_block(batch: int = 2, q_length: int = 41, kv_length: int = 53, heads: int = 2, **fields: Any) -> Block:
    """`random_blocks.make_block`, whose queries and keys by default fill no whole number of tiles."""
    return random_blocks.make_block(batch, q_length, kv_length, heads, **fields)
