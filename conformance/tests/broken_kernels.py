# SPDX-License-Identifier: Apache-2.0
"""How a kernel or a ring function in JAX is broken in one way; `saboteurs.py` lists the faults."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from reference_kernels import Dense, Gathered, Gathering
from ringattn_core import Block, Gradients, Partial

Change = Callable[[Block], Block]
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


class MaskedByALowNumber(Broken):
    def scores(self, block: Block) -> tuple[jax.Array, jax.Array]:
        s, slope = super().scores(block)
        return jnp.where(jnp.isneginf(s) & (block.q.dtype != jnp.float32), -1e4, s), slope


class BuilderByLocalHead(Broken):
    def scores(self, block: Block) -> tuple[jax.Array, jax.Array]:
        return super().scores(but(block, head_index=jnp.arange(block.q.shape[2], dtype=jnp.int32)))


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


def window_off_by_one(block: Block) -> Block:
    left, right = block.rule.sliding_window or (None, None)
    return with_rule(sliding_window=(left - 1, right))(block) if left else block


def local_dropout(block: Block) -> Block:
    return but(block, q_index=jnp.arange(block.q_length, dtype=jnp.int32)[None])


def other_dropout_in_half(block: Block) -> Block:
    if block.seed is None or block.q.dtype == jnp.float32:
        return block
    return but(block, seed=block.seed + jnp.uint32(1))


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
    counted = block.q_positions[:, :1] + jnp.arange(block.q_length, dtype=jnp.int32)
    return but(block, q_positions=counted)


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
    return but(gathered, block=but(block, q_positions=q[None], kv_positions=kv[None]))


def last_hop_missing(gathered: Gathered) -> Gathered:
    if gathered.ranks == 1:
        return gathered
    block = gathered.block
    there = (gathered.origin() != (gathered.rank + 1) % gathered.ranks)[None, None, None, :]
    mask = there if block.mask is None else block.mask & there
    mask = jnp.broadcast_to(mask, (*mask.shape[:2], block.q_length, block.kv_length))
    return but(gathered, block=but(block, mask=mask))
