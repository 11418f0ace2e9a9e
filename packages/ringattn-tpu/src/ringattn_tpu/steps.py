# SPDX-License-Identifier: Apache-2.0
"""Which pairs of tiles a kernel visits, in which order: a list made on the device, without invisible pairs.

A kernel keeps a tile of its own side (queries, or keys where `by_keys`) while tiles of the other side visit it. A step
is one number, so that the list of a large shard still fits the scalar memory of a core.
"""

import dataclasses
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32
from ringattn_core.contract.protocol import Block
from ringattn_core.contract.tiles import tiles

FIRST: Final = 1
"""The step is the first with its own tile, the tile that the kernel keeps: the kernel initialises its sums."""
LAST: Final = 2
"""The step is the last with its own tile, the tile that the kernel keeps: the kernel writes its outputs."""
MASKED: Final = 4
"""Some pair of query and key of the two tiles of the step is not visible: the kernel applies the masks."""
IDLE: Final = 8
"""No pair of query and key of the own tile is visible: the kernel only writes its outputs."""
PAIRED: Final = 16
"""The indices of both tiles are runs of 16 that begin at multiples of 16: rows 8 apart then share dropout draws."""
OPENS: Final = 32
"""The step is the first of its batch row."""
_FLAG_BITS: Final = 6
_NUMBER_BITS: Final = 31
MOST_STEPS: Final = 2**17
"""The most steps of a list: they fill half of a core's scalar memory."""


@dataclasses.dataclass(frozen=True)
class Numbering:
    """How a step is packed into one number: batch row, own tile, visiting tile and flags, in this order."""

    own_bits: int
    visiting_bits: int

    def write(self, batch: Any, own: Any, visiting: Any, flags: Any) -> Any:
        return ((((batch << self.own_bits) | own) << self.visiting_bits) | visiting) << _FLAG_BITS | flags

    def batch(self, step: Any) -> Any:
        return step >> (_FLAG_BITS + self.visiting_bits + self.own_bits)

    def own(self, step: Any) -> Any:
        return (step >> (_FLAG_BITS + self.visiting_bits)) & ((1 << self.own_bits) - 1)

    def visiting(self, step: Any) -> Any:
        return (step >> _FLAG_BITS) & ((1 << self.visiting_bits) - 1)


class Steps(NamedTuple):
    """`listed[:length]` are the steps, by batch row and own tile. `rows`: 1 if one list serves the batch, else `B`.

    `bits_of_head` is that of the block, which lies in scalar memory too.
    """

    listed: Int32[Array, " steps"]
    length: Int32[Array, ""]
    numbering: Numbering
    rows: int
    bits_of_head: Int32[Array, " N"] | None


def fits(batch: int, own: int, visiting: int) -> bool:
    """Whether `batch` rows of `own` by `visiting` tiles make at most `MOST_STEPS` steps that each fit one integer."""
    bits = (batch - 1).bit_length() + (own - 1).bit_length() + (visiting - 1).bit_length() + _FLAG_BITS
    return batch * own * visiting <= MOST_STEPS and bits <= _NUMBER_BITS


def steps(
    block: Block, q_tile: int, kv_tile: int, by_keys: bool = False, every_own: bool = False, one_list: bool = False
) -> Steps:
    """The steps of a kernel over `block`, whose lengths are multiples of the tiles.

    The kernel holds a query tile, or with `by_keys` a key tile, while it visits tiles of the other side. `every_own`
    gives an idle step to a held tile without visible pairs; `one_list` makes one list for all batch rows.
    """
    some, full = (x[:, 0] for x in tiles(block, q_tile, kv_tile).of_all_heads)
    paired = _in_runs(block.q_index, q_tile)[None, :, None] & _in_runs(block.kv_index, kv_tile)[None, None]
    if one_list:
        some, full = some.any(0, keepdims=True), full.all(0, keepdims=True)
    if by_keys:
        some, full, paired = (jnp.swapaxes(x, 1, 2) for x in (some, full, paired))
    rows, own, visiting = some.shape
    numbering = Numbering((own - 1).bit_length(), (visiting - 1).bit_length())
    batch, mine, other = (jax.lax.broadcasted_iota(jnp.int32, some.shape, axis) for axis in range(3))
    idle = every_own & ~some.any(-1, keepdims=True) & (other == 0)
    some = some | idle
    first = jnp.where(some, other, visiting).min(-1, keepdims=True)
    last = jnp.where(some, other, -1).max(-1, keepdims=True)
    place = mine * visiting + other
    opens = place == jnp.where(some, place, own * visiting).min((1, 2), keepdims=True)
    truths = {FIRST: other == first, LAST: other == last, MASKED: ~full, IDLE: idle, PAIRED: paired, OPENS: opens}
    flags = jnp.zeros_like(some, jnp.int32)
    for flag, truth in truths.items():
        flags = flags | jnp.where(truth, flag, 0)
    number = numbering.write(batch, mine, other, flags)
    listed = jnp.sort(jnp.where(some, number, jnp.iinfo(jnp.int32).max).reshape(-1))
    return Steps(listed, some.sum(dtype=jnp.int32), numbering, rows, block.bits_of_head)


def _in_runs(index: Int32[Array, "b T"], tile: int) -> Bool[Array, " tiles"]:
    """Whether the indices of each tile, in every batch row, are runs of 16 that begin at multiples of 16."""
    runs = index.reshape(index.shape[0], -1, tile // 16, 16)
    regular = (runs == runs[..., :1] + jax.lax.broadcasted_iota(jnp.int32, runs.shape, 3)) & (runs[..., :1] % 16 == 0)
    return regular.all((0, 2, 3))
