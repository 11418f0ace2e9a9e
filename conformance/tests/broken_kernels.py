# SPDX-License-Identifier: Apache-2.0
"""Kernels and ring functions in JAX that are each wrong in one way; the docstring of each says how."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from reference_kernels import Dense, Gathered, Gathering
from ringattn_core import Block, Gradients, Partial


class Changed(Dense):
    """A kernel that computes another block than the one it gets, in both passes."""

    def change(self, block: Block) -> Block:
        raise NotImplementedError

    def forward(self, block: Block, partial: Partial | None) -> Partial:
        return super().forward(self.change(block), partial)

    def backward(self, block: Block, *arrays: Any) -> Gradients:
        return super().backward(self.change(block), *arrays)


class ChangedForward(Changed):
    """A kernel that computes another block than the one it gets, in the forward pass."""

    def backward(self, block: Block, *arrays: Any) -> Gradients:
        return Dense.backward(self, block, *arrays)


class CausalLostUnderGrad(Dense):
    """The backward pass forgets the causal mask."""

    def backward(self, block: Block, *arrays: Any) -> Gradients:
        return super().backward(_with_rule(block, causal=False), *arrays)


class StaleKeys(Gathering):
    """At the second hop a rank still works on the keys of the first."""

    def prepare(self, gathered: Gathered) -> Gathered:
        block, ranks = gathered.block, gathered.ranks
        axis = block.kv.ndim - 3
        shards = block.kv.reshape(*block.kv.shape[:axis], ranks, -1, *block.kv.shape[axis + 1 :])
        own = jax.lax.dynamic_index_in_dim(shards, gathered.rank, axis, keepdims=False)
        stale = jax.lax.dynamic_update_index_in_dim(shards, own, (gathered.rank - 1) % ranks, axis)
        return dataclasses.replace(gathered, block=dataclasses.replace(block, kv=stale.reshape(block.kv.shape)))


class LogTwo(Gathering):
    """The lse comes back as a logarithm to base 2."""

    def finish(self, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
        return out, lse / jnp.log(2.0)


class MaxLogitsOfTheLastHop(Dense):
    """`max_logits` are those of the last hop alone."""

    def forward(self, block: Block, partial: Partial | None) -> Partial:
        return dataclasses.replace(super().forward(block, partial), max_logits=super().forward(block, None).max_logits)


class NarrowLse(Dense):
    """The lse is bfloat16 from hop to hop."""

    def forward(self, block: Block, partial: Partial | None) -> Partial:
        found = super().forward(block, partial)
        return dataclasses.replace(found, lse=_narrow(found.lse))


class NarrowOut(Dense):
    """The partial output is rounded to the input's dtype at every hop."""

    def forward(self, block: Block, partial: Partial | None) -> Partial:
        found = super().forward(block, partial)
        return dataclasses.replace(found, out=found.out.astype(block.q.dtype).astype(jnp.float32))


class Swapped(Dense):
    """dk and dv change places."""

    def backward(self, block: Block, *arrays: Any) -> Gradients:
        found = super().backward(block, *arrays)
        return dataclasses.replace(found, dk=found.dv, dv=found.dk) if found.dk.shape == found.dv.shape else found


class GradientsSummedInHalf(Gathering):
    """JAX sums the gradients that keys have from tiles of queries, in the dtype of the keys."""

    def attended(self, block: Block, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        block = dataclasses.replace(block, kv=jax.tree.map(lambda x: x.astype(block.q.dtype), block.kv))
        tile = next(size for size in range(32, 0, -1) if block.q_length % size == 0)
        tiles = [super(GradientsSummedInHalf, self).attended(block.tile(start, tile, 0, block.kv_length), sinks)
                 for start in range(0, block.q_length, tile)]  # fmt: skip
        outs, each_lse = zip(*tiles, strict=True)
        return jnp.concatenate(outs, 1), jnp.concatenate(each_lse, 2)


class SinksEveryHop(Gathering):
    """The sinks enter the denominator once a hop."""

    def prepare(self, gathered: Gathered) -> Gathered:
        if gathered.sinks is None:
            return gathered
        return dataclasses.replace(gathered, sinks=gathered.sinks + jnp.log(float(gathered.ranks)))


class SegmentsNotRotated(Gathering):
    """Keys of all ranks are judged by the segment ids of the own shard."""

    def prepare(self, gathered: Gathered) -> Gathered:
        block, ranks = gathered.block, gathered.ranks
        if block.kv_segments is None:
            return gathered
        shards = block.kv_segments.reshape(block.kv_segments.shape[0], ranks, -1)
        own = jax.lax.dynamic_index_in_dim(shards, gathered.rank, 1, keepdims=False)
        return dataclasses.replace(gathered, block=dataclasses.replace(block, kv_segments=jnp.tile(own, (1, ranks))))


class MeanOfGroup(Dense):
    """dk and dv of a key head are the mean over its query heads, not the sum."""

    def grouped(self, x: jax.Array, block: Block) -> jax.Array:
        return super().grouped(x, block) / block.group


class NanInEmptyRows(Dense):
    """A row that sees nothing is 0 divided by 0."""

    def forward(self, block: Block, partial: Partial | None) -> Partial:
        found = super().forward(block, partial)
        empty = jnp.isneginf(found.lse)
        return dataclasses.replace(found, out=jnp.where(jnp.swapaxes(empty, 1, 2)[..., None], jnp.nan, found.out))


class PaddingSeen(Changed):
    """Padding sees padding: a negative id is an id like any other."""

    def change(self, block: Block) -> Block:
        if block.q_segments is None or block.kv_segments is None:
            return block
        q_ids, kv_ids = (jnp.where(ids < 0, 99, ids) for ids in (block.q_segments, block.kv_segments))
        return dataclasses.replace(block, q_segments=q_ids, kv_segments=kv_ids)


class LowBiasIsANumber(Dense):
    """A bias forbids only where it is -inf, so rows of nothing but -1e9 weigh their keys."""

    def scores(self, block: Block) -> tuple[jax.Array, jax.Array]:
        if block.bias is None:
            return super().scores(block)
        bias = block.bias.astype(jnp.float32)
        finite = jnp.where(jnp.isneginf(bias), bias, jnp.maximum(bias, -9e4))
        return super().scores(dataclasses.replace(block, bias=finite))


class WindowOffByOne(Changed):
    """The left end of a window is exclusive."""

    def change(self, block: Block) -> Block:
        left, right = block.rule.sliding_window or (None, None)
        return _with_rule(block, sliding_window=(left - 1, right)) if left else block


class PositionsRestart(Gathering):
    """Positions count from 0 on every shard."""

    def prepare(self, gathered: Gathered) -> Gathered:
        block = gathered.block
        each = block.kv_length // gathered.ranks
        return dataclasses.replace(
            gathered,
            block=dataclasses.replace(
                block,
                q_positions=jnp.arange(block.q_length)[None],
                kv_positions=(jnp.arange(block.kv_length) % each)[None],
            ),
        )


class LocalDropout(Changed):
    """Dropout counts queries from the start of the shard."""

    def change(self, block: Block) -> Block:
        return dataclasses.replace(block, q_index=jnp.arange(block.q_length, dtype=jnp.int32)[None])


class OtherDropoutInHalf(Changed):
    """Dropout draws other bits for narrow numbers."""

    def change(self, block: Block) -> Block:
        if block.seed is None or block.q.dtype == jnp.float32:
            return block
        return dataclasses.replace(block, seed=block.seed + jnp.uint32(1))


class BiasGradientDropped(Dense):
    """The bias has no gradient."""

    def backward(self, block: Block, *arrays: Any) -> Gradients:
        found = super().backward(block, *arrays)
        return found if found.dbias is None else dataclasses.replace(found, dbias=jnp.zeros_like(found.dbias))


class FixedBiasForgotten(Dense):
    """The backward pass forgets a bias that is not differentiated."""

    def backward(self, block: Block, *arrays: Any) -> Gradients:
        return super().backward(dataclasses.replace(block, bias=None) if block.bias_fixed else block, *arrays)


class HashOfTheMoment(Dense):
    """The hash of the kernel changes at every call, so that everything is compiled anew."""

    count = 0

    def __hash__(self) -> int:
        self.count += 1
        return self.count


class LastHopMissing(Gathering):
    """The keys of the next rank, which arrive last, are never seen."""

    def prepare(self, gathered: Gathered) -> Gathered:
        if gathered.ranks == 1:
            return gathered
        block = gathered.block
        there = (gathered.origin() != (gathered.rank + 1) % gathered.ranks)[None, None, None, :]
        mask = there if block.mask is None else block.mask & there
        mask = jnp.broadcast_to(mask, (*mask.shape[:2], block.q_length, block.kv_length))
        return dataclasses.replace(gathered, block=dataclasses.replace(block, mask=mask))


class NanHidden(ChangedForward):
    """NaN in keys and values counts as zero."""

    def change(self, block: Block) -> Block:
        return dataclasses.replace(block, kv=jax.tree.map(jnp.nan_to_num, block.kv))


class SoftCapIgnored(ChangedForward):
    """The soft cap is ignored, silently."""

    def change(self, block: Block) -> Block:
        return _with_rule(block, logits_soft_cap=None)


class HalfPrecisionProducts(ChangedForward):
    """Products of float32 are made in bfloat16."""

    def change(self, block: Block) -> Block:
        return dataclasses.replace(block, q=_narrow(block.q), kv=jax.tree.map(_narrow, block.kv))


class PositionsOfTheFirstRow(Changed):
    """All batch rows have the positions of the first."""

    def change(self, block: Block) -> Block:
        return dataclasses.replace(block, q_positions=block.q_positions[:1])


class AtMostAsManyQueries(Dense):
    """Queries beyond the number of keys see no key."""

    def forward(self, block: Block, partial: Partial | None) -> Partial:
        found = super().forward(block, partial)
        beyond = jnp.arange(block.q_length) >= block.kv_length
        out = jnp.where(beyond[:, None, None], 0.0, found.out)
        return dataclasses.replace(found, out=out, lse=jnp.where(beyond, -jnp.inf, found.lse))


class OneQueryAfterAnother(ChangedForward):
    """Every query is one position after the query before it."""

    def change(self, block: Block) -> Block:
        counted = block.q_positions[:, :1] + jnp.arange(block.q_length, dtype=jnp.int32)
        return dataclasses.replace(block, q_positions=counted)


class NarrowDq(Dense):
    """dq is rounded to the input's dtype at every hop."""

    def backward(self, block: Block, *arrays: Any) -> Gradients:
        found = super().backward(block, *arrays)
        return dataclasses.replace(found, dq=found.dq.astype(block.q.dtype).astype(jnp.float32))


class MaskedByALowNumber(Dense):
    """In half precision the scores of masked keys are -10000."""

    def scores(self, block: Block) -> tuple[jax.Array, jax.Array]:
        s, slope = super().scores(block)
        return jnp.where(jnp.isneginf(s) & (block.q.dtype != jnp.float32), -1e4, s), slope


class BuilderByLocalHead(Dense):
    """The masks of `mask_builder` are those of the heads from 0 on, also where the mesh splits the heads."""

    def scores(self, block: Block) -> tuple[jax.Array, jax.Array]:
        local = jnp.arange(block.q.shape[2], dtype=jnp.int32)
        return super().scores(dataclasses.replace(block, head_index=local))


class SeedOfTheFirstRow(Changed):
    """All rows of the batch have the dropout seed of the first."""

    def change(self, block: Block) -> Block:
        return dataclasses.replace(block, seed=None if block.seed is None else jnp.full_like(block.seed, block.seed[0]))


def _with_rule(block: Block, **changes: Any) -> Block:
    return dataclasses.replace(block, rule=dataclasses.replace(block.rule, **changes))


def _narrow(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(x.dtype)
