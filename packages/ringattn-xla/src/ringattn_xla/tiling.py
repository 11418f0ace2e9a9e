# SPDX-License-Identifier: Apache-2.0
"""How a block is cut into steps: tile sizes, heads a step, and which steps have work."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from ringattn_core import BwdParams, FwdParams
from ringattn_core.contract.protocol import Block
from ringattn_core.contract.rule import Rule
from ringattn_core.contract.tiles import near_equal, tiles
from ringattn_core.contract.visibility import span
from ringattn_core.tuning import Problem

Carry = TypeVar("Carry")

_LONGEST: Final = 512
_SHORTEST: Final = 128
_SCORES_ON_CPU: Final = 2**17
_SCORES_ELSEWHERE: Final = 2**22


class Cut(NamedTuple):
    """Some of each axis of a block: batch rows, key heads, queries and keys. As sizes or as starts."""

    batch: Any
    heads: Any
    q: Any
    kv: Any


def _letters(annotation: Any) -> str | None:
    """The axes that the type of an array names, a letter each."""
    named = [part.dim_str for part in (annotation, *get_args(annotation)) if hasattr(part, "dim_str")]
    return "".join(axis[0].upper() for axis in named[0].split()) if named else None


_AXES: Final = {
    field.name: letters
    for field in dataclasses.fields(Block)
    if field.name not in ("kv", "shift") and (letters := _letters(field.type)) is not None
}


def choose(block: Block, params: FwdParams | BwdParams) -> Cut:
    """The sizes of a step, those that `params` leaves open.

    Tiles are near equal, so that padding wastes little; long, so that products of matrices dominate; but at most a
    quarter of a window, so that its edges do not. Rows of a tile are queries times heads of a group. As many heads and
    batch rows go together as keep the scores of a step few: on CPU they should stay in the cache of a core.
    """
    q, kv = longest(block.rule, block.group)
    q = cut(block.q_length, params.q_blocksize or q)
    kv = cut(block.kv_length, params.kv_blocksize or kv)
    room = (_SCORES_ON_CPU if jax.default_backend() == "cpu" else _SCORES_ELSEWHERE) // (q * kv * block.group)
    heads = largest_divisor(block.kv_heads, room)
    batch = largest_divisor(block.q.shape[0], room // heads) if heads == block.kv_heads else 1
    return Cut(batch, heads, q, kv)


def longest(rule: Rule | Problem, group: int) -> tuple[int, int]:
    """The longest tile of queries, and of keys, where nobody says otherwise."""
    target = max(_SHORTEST, min(_LONGEST, span(rule.causal, rule.window, rule.chunk) // 4 // 64 * 64))
    return max(target // group, 16), target


def cut(length: int, longest: int) -> int:
    """The size of the fewest near-equal tiles: a multiple of 8 where there are several and `longest` is one."""
    return near_equal(length, longest, 8 if length > longest and longest % 8 == 0 else 1)


def largest_divisor(number: int, most: int) -> int:
    return next(n for n in range(max(min(number, most), 1), 0, -1) if number % n == 0)


def pad(block: Block, size: Cut) -> Block:
    """The block grown to whole tiles."""
    return block.padded_to(-(-block.q_length // size.q) * size.q, -(-block.kv_length // size.kv) * size.kv)


def over_visible_tiles(block: Block, size: Cut, body: Callable[[Cut, Cut, Carry], Carry], carry: Carry) -> Carry:
    """`body(start, size, carry)` over every step that any query can use, query tile by query tile.

    Tiles where nothing is visible are not in the list, so they cost nothing, and a block without any is an empty loop.
    """
    some, _ = tiles(block, size.q, size.kv)
    per_batch, q_count, kv_count = some.shape
    if per_batch > 1:
        size = size._replace(batch=1)
    batch_steps = 1 if per_batch > 1 else block.q.shape[0] // size.batch
    head_steps = block.kv_heads // size.heads
    number = jnp.arange(some.size, dtype=jnp.int32)
    listed = jnp.sort(jnp.where(some.reshape(-1), number, some.size))
    count = some.sum(dtype=jnp.int32)

    def step(at: Any, carry: Carry) -> Carry:
        unit, nth = _divided(at, count)
        tile = jax.lax.dynamic_index_in_dim(listed, nth, keepdims=False, allow_negative_indices=False)
        group, tile = _divided(tile, q_count * kv_count)
        batch, head = _divided(unit, head_steps)
        row, column = _divided(tile, kv_count)
        batch = group if per_batch > 1 else batch
        return body(Cut(batch * size.batch, head * size.heads, row * size.q, column * size.kv), size, carry)

    return jax.lax.fori_loop(0, count * (batch_steps * head_steps), step, carry)


def _divided(number: Any, by: Any) -> tuple[Any, Any]:
    """Quotient and remainder of what is never negative: Python's signs cost a page of instructions."""
    by = jnp.asarray(by, jnp.int32)
    return jax.lax.div(number, by), jax.lax.rem(number, by)


def part(block: Block, start: Cut, size: Cut) -> Block:
    """The block of one step."""
    names = [(name, axes) for name, axes in _AXES.items() if getattr(block, name) is not None]
    return dataclasses.replace(
        block,
        kv=jax.tree.map(lambda x: take(x, ".BSK."[5 - x.ndim :], block, start, size), block.kv),
        **{name: take(getattr(block, name), axes, block, start, size) for name, axes in names},
    )


def take(x: jax.Array, axes: str, block: Block, start: Cut, size: Cut) -> jax.Array:
    """The part of `x` that belongs to a step; its axes are named by letters, and those of length 1 broadcast."""
    starts, sizes = _window(x, axes, block, start, size)
    if sizes == x.shape:
        return x
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return jax.lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)
    # As integers: XLA on CPU cuts no narrow floats, and would keep all of `x` as float32 to cut from.
    whole = jax.lax.bitcast_convert_type(x, jnp.uint16)
    cut = jax.lax.dynamic_slice(whole, starts, sizes, allow_negative_indices=False)
    return jax.lax.bitcast_convert_type(cut, x.dtype)


def put(x: jax.Array, part: jax.Array, axes: str, block: Block, start: Cut, size: Cut) -> jax.Array:
    """`x` with the part that `take` gives replaced."""
    starts, sizes = _window(x, axes, block, start, size)
    return part if sizes == x.shape else jax.lax.dynamic_update_slice(x, part, starts, allow_negative_indices=False)


def _window(x: jax.Array, axes: str, block: Block, start: Cut, size: Cut) -> tuple[list[Any], tuple[int, ...]]:
    group = block.group
    of = {
        "B": (block.q.shape[0], start.batch, size.batch),
        "K": (block.kv_heads, start.heads, size.heads),
        "N": (block.q.shape[2], start.heads * group, size.heads * group),
        "T": (block.q_length, start.q, size.q),
        "R": (block.q_length * group, start.q * group, size.q * group),
        "S": (block.kv_length, start.kv, size.kv),
    }
    starts, sizes = [], []
    for axis, length in zip(axes, x.shape, strict=True):
        whole, at, many = of.get(axis, (None, 0, length))
        full = whole is None or length != whole or many == whole
        starts.append(np.int32(0) if full else at)
        sizes.append(length if full else many)
    return starts, tuple(sizes)
