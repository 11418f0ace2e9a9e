# SPDX-License-Identifier: Apache-2.0
"""What of a block the kernels read: arrays with heads before tokens, and what is fixed when they compile.

All that numbers say of a query or a key (its bounds, position, index, segment) is a row of one array for each side.
"""

import dataclasses
import math
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Int32
from ringattn_core.contract import dropout
from ringattn_core.contract.protocol import Block

from . import words
from .block_sizes import Sizes
from .launch import At, Operand

LOG2_E: Final = math.log2(math.e)
_NOWHERE: Final = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a kernel is compiled for. `q_rows` and `kv_rows` name the rows of numbers that come with each side.

    Scores are in units of log2: `bend` is what a product is multiplied by before the soft cap bends it (or at all), and
    `unbend` by what after. `below` and `above` say that a query sees no key before, or behind, some position.
    """

    q_rows: tuple[str, ...]
    kv_rows: tuple[str, ...]
    precision: Any
    scale: float
    capped: bool
    bend: float
    unbend: float
    below: bool
    above: bool
    segments: bool
    words: bool
    bias: bool
    bias_rows: bool
    slopes: bool
    dropout: bool
    threshold: int
    keep_weight: float


class Operands(NamedTuple):
    """A block whose lengths divide by the tiles, and what every kernel takes of it."""

    block: Block
    facts: Facts
    sizes: Sizes
    arrays: dict[str, jax.Array]

    @property
    def group(self) -> int:
        return self.block.group


def of(block: Block, sizes: Sizes) -> Operands:
    """The block as operands, grown to the lengths of `sizes`."""
    rule = block.rule
    block = block.padded_to(sizes.q_length, sizes.kv_length)
    q_side, kv_side = _numbers(block)
    facts = Facts(
        q_rows=tuple(q_side),
        kv_rows=tuple(kv_side),
        precision=_precision(rule.precision, block.q.dtype),
        scale=rule.scale,
        capped=rule.soft_cap is not None,
        bend=rule.scale * LOG2_E if rule.soft_cap is None else rule.scale / rule.soft_cap,
        unbend=1.0 if rule.soft_cap is None else rule.soft_cap * LOG2_E,
        below="low" in q_side,
        above="high" in q_side,
        segments="segment" in q_side,
        words=bool(rule.masks) or block.mask is not None,
        bias=block.bias is not None,
        bias_rows=block.bias is not None and block.bias.shape[2] > 1,
        slopes=block.slopes is not None,
        dropout=bool(rule.dropout),
        threshold=dropout.threshold(rule.dropout),
        keep_weight=1.0 / (1.0 - rule.dropout),
    )
    arrays = {"q": jnp.swapaxes(block.q, 1, 2)}
    if block.kv.ndim == 5:
        arrays["kv"] = jnp.swapaxes(block.kv, 2, 3)
    else:
        arrays["k"], arrays["v"] = jnp.swapaxes(block.k, 1, 2), jnp.swapaxes(block.v, 1, 2)
    for name, side in (("q_numbers", q_side), ("kv_numbers", kv_side)):
        if side:
            arrays[name] = _stacked(side)
    if block.bias is not None:
        arrays["bias"] = block.bias
    if block.slopes is not None:
        arrays["slopes"] = block.slopes
    if rule.dropout:
        arrays["seed"] = jax.lax.bitcast_convert_type(jnp.asarray(block.seed), jnp.int32)
        arrays["batch_index"], arrays["head_index"] = block.batch_index, block.head_index
    return Operands(block, facts, sizes, arrays)


def _numbers(block: Block) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """The rows of numbers of queries and of keys, `[b, T]` and `[b, S]`, that some score depends on."""
    rule = block.rule
    q: dict[str, jax.Array] = {}
    kv: dict[str, jax.Array] = {}
    low, high = bounds(block)
    if low is not None:
        q["low"] = low
    if high is not None:
        q["high"] = high
    if block.slopes is not None:
        q["position"] = block.q_positions
    if q:
        kv["position"] = block.kv_positions
    if rule.dropout:
        q["index"], kv["index"] = block.q_index, block.kv_index
    if block.q_segments is not None or block.padded:
        # Negative ids are padding, that never sees and is never seen: one that no key has, one that no query has.
        ids, kv_ids = block.q_segments, block.kv_segments
        ids = jnp.zeros_like(block.q_index) if ids is None else jnp.where(ids < 0, -1, ids)
        kv_ids = jnp.zeros_like(block.kv_index) if kv_ids is None else jnp.where(kv_ids < 0, -2, kv_ids)
        q["segment"], kv["segment"] = ids, jnp.where(block.kv_index < 0, -2, kv_ids)
    return q, kv


def bounds(block: Block) -> tuple[Int32[Array, "b T"] | None, Int32[Array, "b T"] | None]:
    """The first and the last position that each query sees, `None` where nothing bounds it; no sum leaves int32."""
    rule, position = block.rule, block.q_positions
    lows, highs = [], []
    left, right = (None, None) if rule.window is None else rule.window
    if left is not None:
        left = min(left, _NOWHERE)
        lows.append(jnp.maximum(position, left - _NOWHERE) - left)
    if right is not None:
        right = min(right, _NOWHERE)
        highs.append(jnp.minimum(position, _NOWHERE - right) + right)
    if rule.causal or rule.chunk is not None:
        highs.append(position)
    if rule.chunk is not None:
        lows.append(position - jnp.remainder(position, min(rule.chunk, _NOWHERE)))
    return _folded(jnp.maximum, lows), _folded(jnp.minimum, highs)


def _folded(combine: Any, parts: list[jax.Array]) -> jax.Array | None:
    if not parts:
        return None
    total = parts[0]
    for part in parts[1:]:
        total = combine(total, part)
    return total


def _stacked(side: dict[str, jax.Array]) -> Int32[Array, "b rows T"]:
    batch = max(x.shape[0] for x in side.values())
    return jnp.stack([jnp.broadcast_to(x, (batch, x.shape[1])) for x in side.values()], 1)


def _precision(asked: str | None, dtype: Any) -> Any:
    """Products of bfloat16 are exact as they are; of float32 they are unless the caller asks for less."""
    if dtype != jnp.float32:
        return None
    return {"default": jax.lax.Precision.DEFAULT, "high": jax.lax.Precision.HIGH}.get(
        asked or "", jax.lax.Precision.HIGHEST
    )


def inputs(given: Operands, by_keys: bool) -> dict[str, Operand]:
    """The operands of every kernel. A tile of the own side is that of the queries, or of the keys where `by_keys`.

    So are the heads of the grid; those of the queries that read a head of keys are the members of its group.
    """
    sizes, group = given.sizes, given.group
    q_tile, kv_tile = sizes.q_tile, sizes.kv_tile
    arrays = given.arrays

    def q_at(at: At) -> Any:
        return at.visiting if by_keys else at.own

    def kv_at(at: At) -> Any:
        return at.own if by_keys else at.visiting

    def kv_head(at: At) -> Any:
        return at.head if by_keys or group == 1 else jax.lax.div(at.head, np.int32(group))

    def q_head(at: At) -> Any:
        return at.head * group + at.member if by_keys and group > 1 else at.head

    found = {
        "q": Operand(
            arrays["q"], (None, None, q_tile, arrays["q"].shape[-1]), lambda at: (at.batch, q_head(at), q_at(at), 0)
        )
    }
    for number, name in enumerate(("k", "v")):
        if "kv" in arrays:
            block = (None, None, None, kv_tile, arrays["kv"].shape[-1])
            index = _of_pair(number, kv_head, kv_at)
            found[name] = Operand(arrays["kv"], block, index)
        else:
            block = (None, None, kv_tile, arrays[name].shape[-1])
            found[name] = Operand(arrays[name], block, lambda at: (at.batch, kv_head(at), kv_at(at), 0))
    for name, tile, where in (("q_numbers", q_tile, q_at), ("kv_numbers", kv_tile, kv_at)):
        if name in arrays:
            found[name] = _rows(arrays[name], tile, where)
    if given.facts.words:
        packed = words.of(given.block, by_keys, kv_tile if by_keys else q_tile)
        height, width = (kv_tile, q_tile) if by_keys else (q_tile, kv_tile)
        batch, heads = (packed.shape[axis] > 1 for axis in (0, 1))
        found["words"] = Operand(
            packed,
            (None, None, height // words.bits(height), width),
            lambda at: (at.batch if batch else 0, q_head(at) if heads else 0, at.own, at.visiting),
        )
    if "bias" in arrays:
        bias = arrays["bias"]
        block = (None, None, q_tile if given.facts.bias_rows else 1, kv_tile)
        of_batch, of_head, of_row = (bias.shape[axis] > 1 for axis in range(3))
        found["bias"] = Operand(
            bias,
            block,
            lambda at: (
                at.batch if of_batch else 0,
                q_head(at) if of_head else 0,
                q_at(at) if of_row else 0,
                kv_at(at),
            ),
        )
    for name in ("slopes", "seed", "batch_index", "head_index"):
        if name in arrays:
            found[name] = _number(name, arrays[name], q_head)
    return found


def _of_pair(number: int, head: Any, tile: Any) -> Any:
    return lambda at: (number, at.batch, head(at), tile(at), 0)


def _rows(x: jax.Array, tile: int, where: Any) -> Operand:
    batched = x.shape[0] > 1
    return Operand(x, (None, x.shape[1], tile), lambda at: (at.batch if batched else 0, 0, where(at)))


def _number(name: str, x: jax.Array, head: Any) -> Operand:
    """One number of a batch row or head, alone in a tile of its own."""
    if name == "slopes":
        batched = x.shape[0] > 1
        return Operand(x[:, :, None, None], (None, None, 1, 1), lambda at: (at.batch if batched else 0, head(at), 0, 0))
    by_head = name == "head_index"
    return Operand(x[:, None, None], (None, 1, 1), lambda at: (head(at) if by_head else at.batch, 0, 0))


def cost(given: Operands, products: int) -> pl.CostEstimate:
    """What XLA plans with where it hides transfers behind the kernel: as much as if all tiles were visited."""
    batch, q_length, heads, head_dim = given.block.q.shape
    pairs = batch * heads * q_length * given.block.kv_length
    moved = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(given.arrays))
    return pl.CostEstimate(
        flops=products * pairs * (head_dim + given.block.value_dim), transcendentals=pairs, bytes_accessed=moved
    )
