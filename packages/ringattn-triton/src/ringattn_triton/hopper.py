# SPDX-License-Identifier: Apache-2.0
"""The family of kernels that are written for Hopper: which blocks they take, and how they are launched."""

import dataclasses
import math
from typing import Final

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from ringattn_core import FwdParams
from ringattn_core.contract.protocol import Block, Own, Partial

from . import compiled, tables
from .availability import TRITON_FLOOR
from .launch import launch
from .operands import Facts, Operands, results
from .schedules import Target

PLACES: Final = 132
"""How many programs run at a time: one on each multiprocessor of the largest Hopper. Others find nothing left to do."""
COUNTS: Final = 5
"""How many counters the programs of a launch share; all begin at zero. What they count, by place:"""
FOUND_AT: Final = tl.constexpr(0)
"""Where K and V hold what is no number, as for every kernel that looks."""
SHARES_AT: Final = tl.constexpr(1)
"""The shares of K and V that are taken to look at."""
TURNS_AT: Final = tl.constexpr(2)
"""The turns that are taken, and behind them those of a second launch."""
ROWS_AT: Final = tl.constexpr(4)
"""The tiles of queries with a row that the kernel of dk and dv may not read as it came."""
CONSUMED: Final = tl.constexpr(64)
"""How many queries a consumer has: as many rows as the product of a warpgroup."""
_TRITON_CEILING: Final = (3, 10)
"""Before which version these kernels have been compiled: Gluon may change with each."""
_TOGETHER: Final = 512
"""How many tiles of queries of some heads make enough work for no place to be left alone with a long one."""
_BOUND: Final = 73.0
"""Up to which soft cap, in units of log2, scores need no maximum taken from them: 50 is 72.2 of those. The exponentials
of half of that, up or down, leave 2^90 for how many keys there are and how large values may be."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a kernel of this family runs; `ordered` lets one consumer multiply at a time."""

    consumers: int
    kv_tile: int
    stages: int
    ordered: bool
    limit: int
    """Registers of a thread when a program begins."""
    registers: int
    """Registers of a consumer's thread, which it takes over from the producer's."""

    @property
    def q_tile(self) -> int:
        return self.consumers * CONSUMED.value


_FORWARD: Final = {
    (64, False): Plan(3, 128, 2, True, 128, 160),
    (128, False): Plan(2, 128, 2, False, 168, 240),
    (128, True): Plan(3, 64, 3, True, 128, 160),
}
"""By head size, and whether there is a soft cap: the fastest of those timed."""


def takes(block: Block, facts: Facts, target: Target) -> bool:
    """Whether this family computes the output of a block, where the caller fixed nothing: where it is faster.

    Of slopes and dropout it has no kernels: those that were tried were no faster than many programs at a time, which do
    something else while one of them draws numbers.
    """
    plan = _FORWARD.get((facts.head_dim, facts.capped))
    if (
        target != Target("cuda", 90)
        or not _known_triton()
        or plan is None
        or block.q.dtype.itemsize != 2
        or block.kv.ndim != 5
    ):
        return False
    fixed = block.rule.fwd_params != FwdParams()
    short = facts.q_length < plan.q_tile or facts.kv_length < plan.kv_tile
    simple = facts.plain or (facts.bias and _fetched(block, facts))
    return simple and not (facts.slopes or facts.dropout or fixed or short or _too_little(facts))


def _fetched(block: Block, facts: Facts) -> bool:
    """Whether the bias comes to a kernel in tiles, as it is: TMA wants rows of whole 16 bytes; and fits beside keys."""
    assert block.bias is not None
    aligned = facts.bias_query == facts.kv_length and facts.kv_length % 8 == 0
    return aligned and block.bias.dtype == block.q.dtype and facts.head_dim == 128 and not facts.capped


def _known_triton() -> bool:
    return TRITON_FLOOR <= compiled.version(triton) < _TRITON_CEILING


def _too_little(facts: Facts) -> bool:
    """Whether a turn has so little to do that its beginning and end count: few tiles, or short products to mask."""
    right = 0 if facts.causal or facts.chunked else facts.right if facts.bounded_right else math.inf
    window = facts.left + right if facts.bounded_left else math.inf
    seen = min(window, facts.chunk if facts.chunked else math.inf)
    if facts.head_dim == 128:
        return seen < 1024
    return seen < 2048 or facts.q_length < 4096 or facts.segments or facts.masks or facts.dense


def looks(facts: Facts, partial: Partial) -> bool:
    """Whether a kernel that may read K and V as they came looks at them meanwhile: a bias leaves no room for that."""
    return facts.own and partial.empty and not facts.bias


def forward(given: Operands, block: Block, partial: Partial) -> Partial:
    """`partial` continued with the keys of a block that this family takes."""
    return _launched(given, block, partial, _table(given, block), jnp.zeros(COUNTS, jnp.int32))[0]


def looking(given: Operands, block: Block, partial: Partial, own: Own) -> Partial:
    """The same of K and V as they came, by a kernel that looks at them meanwhile; once more if it found anything.

    It hardly ever does. The second launch then ends at once, and what the first one wrote stays.
    """
    table = _table(given, block)
    first, counts = _launched(given, block, partial, table, own.found, looks=True)
    packed = given.mended(own._replace(found=counts), poison=True).packed()
    done, counts = _launched(packed, block, first, table, counts, again=True)
    return dataclasses.replace(done, found=counts)


def _table(given: Operands, block: Block) -> tables.Table:
    plan = _FORWARD[given.facts.head_dim, given.facts.capped]
    return tables.table(given, block, plan.q_tile, plan.kv_tile, programs=_TOGETHER)


def _launched(
    given: Operands,
    block: Block,
    partial: Partial,
    table: tables.Table,
    counts: jax.Array,
    looks: bool = False,
    again: bool = False,
) -> tuple[Partial, jax.Array]:
    """What a launch makes of a partial result, and of the counts."""
    from .kernels.hopper_forward import forward as kernel
    from .kernels.hopper_look import shares

    facts = given.facts
    plan = _FORWARD[facts.head_dim, facts.capped]
    before = [None] * 3 if partial.empty else [partial.out, partial.lse, partial.rest]
    arrays = [*given.arrays, table.bounds, table.tiles, *before, counts]
    last = len(arrays) - 1
    batch, _, heads, _ = block.q.shape
    turns = table.visits.rows * batch * heads
    masked = any((facts.below, facts.above, facts.segments, facts.padded, facts.masks, facts.dense))
    out, lse, rest, counts = launch(
        kernel,
        arrays,
        [*results(partial), jax.ShapeDtypeStruct(counts.shape, counts.dtype)],
        grid=(min(PLACES, max(turns, shares(block.k.size)) if looks else turns),),
        warps=4,
        stages=1,
        registers=plan.limit,
        aliases={last: 3} | {last - 3 + i: i for i, x in enumerate(before) if x is not None},
        name="ringattn_hopper_again" if again else "ringattn_hopper_forward",
        F=facts,
        V=table.visits,
        BATCH=batch,
        CONSUMERS=plan.consumers,
        KV_TILE=plan.kv_tile,
        STAGES=plan.stages,
        ORDERED=plan.ordered,
        MASKED=masked or facts.kv_length % plan.kv_tile != 0,
        FRESH=partial.empty or again,
        SPLIT=partial.rest is not None,
        BOUNDED=facts.capped and block.q.dtype == jnp.bfloat16 and facts.fold <= _BOUND,
        REGISTERS=plan.registers,
        LOOKS=looks,
        AGAIN=again,
    )
    return Partial(out, lse, rest=rest if partial.rest is not None else None), counts
