# SPDX-License-Identifier: Apache-2.0
"""How a kernel or a ring function in JAX is broken in one way; `saboteurs.py` lists the faults."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from ringattn_core import Block, Gradients, Partial
from ringattn_core.contract.bits import packed, unpacked
from ringattn_core.masks.reach import INT32_MAX, INT32_MIN, moved

from ringattn_testing.conformance.reference_kernels import Dense, Gathered, Gathering, of_pairs

Change = Callable[[Block], Block]
Bound = Callable[[jax.Array], Any]
FORWARD: Final = ("forward",)
BACKWARD: Final = ("backward",)
but = dataclasses.replace


class Broken(Dense):
    """A kernel whose passes compute another block than the one they get, or return another result."""

    def __init__(
        self,
        fault: str,
        block: Change = lambda block: block,
        passes: tuple[str, ...] = FORWARD + BACKWARD,
        partial: Callable[[Block, Partial], Partial] = lambda block, right: right,
        gradients: Callable[[Block, Gradients], Gradients] = lambda block, right: right,
    ) -> None:
        self.fault, self.passes, self.block, self.partial, self.gradients = fault, passes, block, partial, gradients

    def forward(self, block: Block, partial: Partial | None) -> Partial:
        block = self.block(block) if "forward" in self.passes else block
        return self.partial(block, super().forward(block, partial))

    def backward(self, block: Block, *arrays: Any) -> Gradients:
        block = self.block(block) if "backward" in self.passes else block
        return self.gradients(block, super().backward(block, *arrays))


class BegunElsewhere(Broken):
    """A kernel that begins from another partial result than the sinks that it gets."""

    def __init__(self, fault: str, begin: Callable[[Partial], Partial | None]) -> None:
        super().__init__(fault)
        self.begin = begin

    def forward(self, block: Block, partial: Partial | None) -> Partial:
        begins = partial is not None and partial.out is None
        return super().forward(block, self.begin(partial) if begins else partial)


class HashOfTheMoment(Broken):
    count = 0

    def __hash__(self) -> int:
        self.count += 1
        return self.count


class KeptUnderTooShortAKey(Broken):
    """A kernel that computes with the dropout of the first call of each shape."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault, self.as_kept)
        self.kept: dict[Any, float] = {}

    def as_kept(self, block: Block) -> Block:
        if not block.rule.dropout_prob:
            return block
        first = self.kept.setdefault((block.q.shape, block.k.shape, block.q.dtype), block.rule.dropout_prob)
        return with_rule(dropout_prob=first)(block)


class MaskedByALowNumber(Broken):
    def scores(self, block: Block) -> tuple[jax.Array, jax.Array]:
        s, slope = super().scores(block)
        return jnp.where(jnp.isneginf(s) & (block.q.dtype != jnp.float32), -1e4, s), slope


class TilesOfTheFirstHead(Broken):
    def visible(self, block: Block) -> jax.Array | None:
        right = super().visible(block)
        return right if right is None else right & of_pairs(seen(block, lambda x: x[:, :1], lambda x: x[:, :1]))[0]


def with_rule(**changes: Any) -> Change:
    return lambda block: but(block, rule=but(block.rule, **changes))


def narrow(x: jax.Array, dtype: Any = jnp.bfloat16) -> jax.Array:
    return x.astype(dtype).astype(x.dtype)


def swapped(block: Block, right: Gradients) -> Gradients:
    return but(right, dk=right.dv, dv=right.dk) if right.dk.shape == right.dv.shape else right


def nan_in_empty_rows(block: Block, right: Partial) -> Partial:
    empty = jnp.swapaxes(jnp.isneginf(right.lse), 1, 2)[..., None]
    return but(right, out=jnp.where(empty, jnp.nan, right.out))


def padding_seen(block: Block) -> Block:
    if block.q_segments is None or block.kv_segments is None:
        return block
    q_ids, kv_ids = (jnp.where(ids < 0, 99, ids) for ids in (block.q_segments, block.kv_segments))
    return but(block, q_segments=q_ids, kv_segments=kv_ids)


def low_bias_is_a_number(block: Block) -> Block:
    if block.bias is None:
        return block
    bias = block.bias.astype(jnp.float32)
    return but(block, bias=jnp.where(jnp.isneginf(bias), bias, jnp.maximum(bias, -9e4)))


def seen(block: Block, first: Bound = lambda first: first, last: Bound = lambda last: last) -> Block:
    """The block with other first and last keys; a side without a bound stays so."""
    bounds = ((block.first, first), (block.last, last))
    ends = (None if x is None else change(x) for x, change in bounds)
    return but(block, **dict(zip(("first", "last"), ends, strict=True)))


def by(step: int) -> Bound:
    """Bounds so many positions later; those that are no bound stay so."""
    return lambda x: moved(x, step)


def one_for_all(axis: int) -> Bound:
    """The bounds that are first along this axis, for all others too."""
    return lambda x: jnp.broadcast_to(jax.lax.slice_in_dim(x, 0, 1, axis=axis), x.shape)


def empty_seen(block: Block) -> Block:
    """Ranges that see nothing see everything."""
    if block.first is None or block.last is None:
        return block
    empty = block.first > block.last
    return seen(block, lambda first: jnp.where(empty, INT32_MIN, first), lambda last: jnp.where(empty, INT32_MAX, last))


def own_keys(block: Block) -> jax.Array:
    """Whether the keys are those of the rank itself."""
    return jnp.min(block.kv_index) == jnp.min(block.q_index)


def ranges_of_own_keys(block: Block) -> Block:
    """On keys of other ranks, queries see what `reach` alone allows."""
    first, last = (None if x is None else x[:, None] for x in block.reach.bounds(block.q_positions))
    here = own_keys(block)
    return seen(
        block,
        lambda own: jnp.where(here, own, INT32_MIN if first is None else first),
        lambda own: jnp.where(here, own, INT32_MAX if last is None else last),
    )


def range_by_key_head(block: Block) -> Block:
    """The heads of a group see what its first head sees."""
    of_head = jnp.arange(block.q.shape[2]) // block.group * block.group
    return seen(block, *[lambda x: x if x.shape[1] == 1 else x[:, of_head]] * 2)


def bits_of_the_first_head(block: Block) -> Block:
    return block if block.bits_of_head is None else but(block, bits_of_head=0 * block.bits_of_head)


def bits_of_the_block_before(block: Block) -> Block:
    if block.bits is None:
        return block
    seen = unpacked(block.bits, -(-block.kv_length // block.grain))
    return but(block, bits=packed(jnp.roll(seen, 1, -1)))


def bits_of_the_next_set(block: Block) -> Block:
    return block if block.bits is None else but(block, bits=jnp.roll(block.bits, -1, 1))


def bits_by_key_head(block: Block) -> Block:
    """The heads of a group have the bits of its first head."""
    if block.bits_of_head is None:
        return block
    return but(block, bits_of_head=block.bits_of_head[jnp.arange(block.q.shape[2]) // block.group * block.group])


def clipped_to_the_shard(block: Block) -> Block:
    """Ranges end where the shard of the queries ends."""
    least, greatest = block.q_positions.min(), block.q_positions.max()
    return seen(block, lambda first: jnp.maximum(first, least), lambda last: jnp.minimum(last, greatest))


def local_dropout(block: Block) -> Block:
    return but(block, q_index=jnp.arange(block.q_length, dtype=jnp.int32)[None])


def other_dropout_in_half(block: Block) -> Block:
    if block.seed is None or block.q.dtype == jnp.float32:
        return block
    return but(block, seed=block.seed + jnp.uint32(1))


def other_dropout_under_x64(block: Block) -> Block:
    wide = block.seed is not None and jax.config.read("jax_enable_x64")
    return but(block, seed=block.seed + jnp.uint32(1)) if wide else block


def seed_of_the_first_row(block: Block) -> Block:
    return but(block, seed=None if block.seed is None else jnp.full_like(block.seed, block.seed[0]))


def slopes_of_the_first_row(block: Block) -> Block:
    return block if block.slopes is None else but(block, slopes=jnp.repeat(block.slopes[:1], len(block.slopes), 0))


def no_bias_gradient(block: Block, right: Gradients) -> Gradients:
    return right if right.dbias is None else but(right, dbias=jnp.zeros_like(right.dbias))


def nothing_beyond_the_number_of_keys(block: Block, right: Partial) -> Partial:
    beyond = jnp.arange(block.q_length) >= block.kv_length
    out = jnp.where(beyond[:, None, None], 0.0, right.out)
    return but(right, out=out, lse=jnp.where(beyond, -jnp.inf, right.lse))


def one_query_after_another(block: Block) -> Block:
    after = jnp.arange(block.q_length, dtype=jnp.int32)
    return seen(block, last=lambda last: last[..., :1] + after)


class Regathered(Gathering):
    """The ring function with other operands than the gathered ones, or another lse."""

    def __init__(
        self,
        fault: str,
        prepare: Callable[[Gathered], Gathered] = lambda gathered: gathered,
        finish: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]] = lambda out, lse: (out, lse),
    ) -> None:
        self.fault, self.prepare, self.finish = fault, prepare, finish


class GradientsSummedInHalf(Regathered):
    def attended(self, block: Block, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        block = but(block, kv=jax.tree.map(lambda x: x.astype(block.q.dtype), block.kv))
        tile = next(size for size in range(32, 0, -1) if block.q_length % size == 0)
        tiles = [super(GradientsSummedInHalf, self).attended(block.tile(start, tile, 0, block.kv_length), sinks)
                 for start in range(0, block.q_length, tile)]  # fmt: skip
        outs, each_lse = zip(*tiles, strict=True)
        return jnp.concatenate(outs, 1), jnp.concatenate(each_lse, 2)


def stale_keys(gathered: Gathered) -> Gathered:
    block, ranks = gathered.block, gathered.ranks
    axis = block.kv.ndim - 3
    shards = block.kv.reshape(*block.kv.shape[:axis], ranks, -1, *block.kv.shape[axis + 1 :])
    own = jax.lax.dynamic_index_in_dim(shards, gathered.rank, axis, keepdims=False)
    stale = jax.lax.dynamic_update_index_in_dim(shards, own, (gathered.rank - 1) % ranks, axis)
    return but(gathered, block=but(block, kv=stale.reshape(block.kv.shape)))


def sinks_at_every_hop(gathered: Gathered) -> Gathered:
    if gathered.sinks is None:
        return gathered
    return but(gathered, sinks=gathered.sinks + jnp.log(float(gathered.ranks)))


def segments_not_rotated(gathered: Gathered) -> Gathered:
    block, ranks = gathered.block, gathered.ranks
    if block.kv_segments is None:
        return gathered
    shards = block.kv_segments.reshape(block.kv_segments.shape[0], ranks, -1)
    own = jax.lax.dynamic_index_in_dim(shards, gathered.rank, 1, keepdims=False)
    return but(gathered, block=but(block, kv_segments=jnp.tile(own, (1, ranks))))


def positions_restart(gathered: Gathered) -> Gathered:
    block = gathered.block
    q, kv = jnp.arange(block.q_length), jnp.arange(block.kv_length) % (block.kv_length // gathered.ranks)
    later = (block.q_positions - q)[:, None]
    restarted = seen(block, lambda first: first - later, lambda last: last - later)
    return but(gathered, block=but(restarted, q_positions=q[None], kv_positions=kv[None]))


def last_hop_missing(gathered: Gathered) -> Gathered:
    if gathered.ranks == 1:
        return gathered
    block = gathered.block
    there = (gathered.origin() != (gathered.rank + 1) % gathered.ranks)[None, None, None, :]
    words = packed(jnp.broadcast_to(there, (1, 1, block.q_length, block.kv_length)))
    return but(gathered, block=but(block, bits=words if block.bits is None else block.bits & words))
