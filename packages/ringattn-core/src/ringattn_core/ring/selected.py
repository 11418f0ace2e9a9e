# SPDX-License-Identifier: Apache-2.0
"""Turns the ids in `selected` into bits, for the keys of one hop."""

import math
from typing import Any

import jax.numpy as jnp

from ..contract import bits
from ..contract.bits import Bits
from ..contract.call import Call
from ..placement.layout import Shards
from .kv import KV


def bits_of(call: Call, shards: Shards, owner: Any, length: int, kv: KV) -> Bits | None:
    """Which of the keys in `kv` each query has chosen; `None` if the call has no `selected`.

    `kv` has some or all of the `length` keys of the shard of rank `owner`. A bit is for `selected_size` keys, or for
    fewer if `kv` begins within a block.
    """
    if call.selected is None:
        return None
    size, ids = call.selected_size, jnp.swapaxes(call.selected, 1, 2)
    if shards.count > 1:  # `size` divides each run of keys of a shard, so blocks are sharded as tokens are
        place, following = (shards.before(x, owner, length // size) for x in (ids, ids + 1))
        ids = jnp.where(following > place, place, -1)
    first, end = kv.start // size, -(-(kv.start + kv.length) // size)
    found = Bits(bits.of_numbers(ids - first, end - first), None, size)
    grain = math.gcd(size, kv.start)
    return found._replace(words=bits.regrained(found, kv.start - first * size, kv.length, grain), grain=grain)
