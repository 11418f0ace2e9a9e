# SPDX-License-Identifier: Apache-2.0
"""How masks that kernels cannot compute reach them: a bit for each pair, 32 keys to a word, key `j` in bit `j % 32`."""

from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32
from ringattn_core.masks import Coordinates, Mask
from ringattn_core.protocol import Block

BITS: Final = 32
PAIRS_AT_ONCE: Final = 2**26
"""How many pairs of a mask that is not made of comparisons are looked at before the next."""


def of_rule(block: Block) -> tuple[UInt32[Array, "b m T W"], Int32[Array, " N"] | None]:
    """The words of each mask of the rule, and which of them each head of the block obeys (`None`: the only one)."""
    rule = block.rule
    q = Coordinates(block.q_positions, block.q_index)
    kv = Coordinates(*(_by_word(x, "edge")[:, None] for x in (block.kv_positions, block.kv_index)))
    each = [_of_mask(mask, q, kv) for mask in rule.masks]
    batch = max(x.shape[0] for x in each)
    packed = jnp.stack([jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in each], 1)
    if len(rule.masks) == 1:
        return packed, None
    return packed, jnp.asarray(rule.mask_of_head, jnp.int32)[block.head_index]


def _of_mask(mask: Mask, q: Coordinates, kv: Coordinates) -> UInt32[Array, "b T W"]:
    """The words of one mask; of one that XLA might not fuse, some rows after the other."""

    def of_rows(q: Coordinates) -> Any:
        rows = Coordinates(*(x[:, :, None, None] for x in q))
        return _packed(mask.visible(rows, kv), (1, q.index.shape[1], *kv.index.shape[2:]))

    length = q.index.shape[1]
    rows = max(PAIRS_AT_ONCE // (kv.index.shape[2] * BITS), 1)
    if mask.bounded or length <= rows:
        return of_rows(q)
    batch = max(x.shape[0] for x in q)
    whole = (jnp.broadcast_to(x, (batch, length)) for x in q)
    cut = (jnp.pad(x, [(0, 0), (0, -length % rows)], mode="edge").reshape(batch, -1, rows) for x in whole)
    words = jax.lax.map(of_rows, Coordinates(*(jnp.swapaxes(x, 0, 1) for x in cut)))
    return jnp.swapaxes(words, 0, 1).reshape(words.shape[1], -1, words.shape[3])[:, :length]


def of_dense(block: Block) -> UInt32[Array, "b n T W"]:
    """The words of the dense mask."""
    assert block.mask is not None
    return _packed(_by_word(block.mask, "constant"), (1, block.q_length, -(-block.kv_length // BITS), BITS))


def _by_word(x: Array, mode: str) -> Array:
    """The last axis cut into words; what fills the last word is never read."""
    more = -x.shape[-1] % BITS
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)], mode=mode) if more else x
    return padded.reshape(*x.shape[:-1], -1, BITS)


def _packed(seen: Any, shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """Bits summed where they are computed: XLA fuses both, and no array of single truth values comes to be."""
    bits = jnp.uint32(1) << jnp.arange(BITS, dtype=jnp.uint32)
    seen = jnp.broadcast_to(seen, jnp.broadcast_shapes(jnp.shape(seen), shape))
    return jnp.where(seen, bits, jnp.uint32(0)).sum(-1, dtype=jnp.uint32)
