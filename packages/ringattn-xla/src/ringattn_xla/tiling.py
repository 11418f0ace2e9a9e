# SPDX-License-Identifier: Apache-2.0
"""How a block is cut into steps: tile sizes, the number of heads of a step, and which steps have work."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ringattn_core import BwdParams, FwdParams
from ringattn_core.contract.bits import WORD, of_parts, words_of
from ringattn_core.contract.protocol import LETTERS, Block
from ringattn_core.contract.tiles import near_equal, tiles

Arrays = dict[str, jax.Array]
"""Arrays by name. The name of a gradient is "d" and the name of its array."""

_LONGEST: Final = 512
_SHORTEST: Final = 128
_SCORES_ON_CPU: Final = 2**17
_SCORES_ELSEWHERE: Final = 2**22


class Cut(NamedTuple):
    """The sizes, or else the starts, of the part of a block that a step works on. `heads` are key heads."""

    batch: Any
    heads: Any
    q: Any
    kv: Any


BLOCK_AXES: Final = {name: "".join(letter[0] for letter in letters).upper() for name, letters in LETTERS.items()}
"""For each array of a block, a letter for each axis. `kv` is left out, because its form varies."""


def choose(block: Block, params: FwdParams | BwdParams) -> Cut:
    """The sizes of a step: as `params` asks, and a choice for each size that `params` leaves open.

    Tiles have nearly equal sizes, so that padding wastes little. They are long, so that matrix products dominate, but
    at most a quarter of a window, because tiles at its edges are half masked. The rows of a tile are its queries times
    the heads of a group. A step computes as many heads and batch rows as keep its scores below a limit: on CPU, so that
    they fit a cache.
    """
    q, kv = longest(block.reach.span, block.group)
    q = cut(block.q_length, params.q_blocksize or q)
    kv = cut(block.kv_length, params.kv_blocksize or kv, _keys_apart(block))
    room = (_SCORES_ON_CPU if jax.default_backend() == "cpu" else _SCORES_ELSEWHERE) // (q * kv * block.group)
    heads = largest_divisor(block.kv_heads, room)
    batch = largest_divisor(block.q.shape[0], room // heads) if heads == block.kv_heads else 1
    return Cut(batch, heads, q, kv)


def longest(span: int, group: int) -> tuple[int, int]:
    """`(queries, keys)`: the longest tiles that `choose` takes by itself, if `group` query heads read a key head.

    `span` is the largest number of keys that positions let a query see.
    """
    target = max(_SHORTEST, min(_LONGEST, span // 4 // 64 * 64))
    return max(target // group, 16), target


def _keys_apart(block: Block) -> int:
    """If there are several key tiles, their length is a multiple of this: then no two share a bit, or a word of single
    keys.
    """
    return 1 if block.bits is None else WORD if block.grain == 1 else block.grain


def cut(length: int, longest: int, multiple: int = 1) -> int:
    """The tile size that cuts `length` into the fewest nearly equal tiles of at most `longest`.

    If there are several tiles, their size is a multiple of 8 if `longest` is, and always a multiple of `multiple`, if
    need be above `longest`.
    """
    longest = -(-longest // multiple) * multiple
    whole = multiple if multiple > 1 else 8
    return near_equal(length, longest, whole if length > longest and longest % whole == 0 else 1)


def largest_divisor(number: int, most: int) -> int:
    return next(n for n in range(max(min(number, most), 1), 0, -1) if number % n == 0)


def pad(block: Block, size: Cut) -> Block:
    """The block, padded to whole tiles of `size`."""
    return block.padded_to(-(-block.q_length // size.q) * size.q, -(-block.kv_length // size.kv) * size.kv)


def _with_words_of_tiles(block: Block, size: Cut) -> Block:
    """The block with words of its own for each key tile, so that a step reads whole words (only `_tile` reads them)."""
    count = block.kv_length // size.kv
    if block.bits is None or block.grain == 1 or count == 1:
        return block
    words = of_parts(block.bits, count, size.kv // block.grain)
    return dataclasses.replace(block, bits=words.reshape(*block.bits.shape[:3], -1))


def over_visible_tiles(
    block: Block,
    size: Cut,
    body: Callable[[Block, Arrays, Arrays], Arrays],
    read: Arrays,
    carried: Arrays,
    axes: dict[str, str],
) -> Arrays:
    """Runs `body` for every visible tile, query tile by query tile; returns the `carried` arrays after the last step.

    `body(tile, read, carried)` gets the parts of the arrays that belong to a step, and returns new parts of `carried`.
    `axes` has the letters of all arrays, by name (`_take`). An invisible tile has no step, so it costs nothing.
    """
    some, _ = tiles(block, size.q, size.kv)
    block = _with_words_of_tiles(block, size)
    if some.shape[0] > 1:
        size = size._replace(batch=1)
    if some.shape[1] > 1:  # a step has several key heads
        some = some.reshape(len(some), -1, size.heads, *some.shape[2:]).any(2)
    some = jnp.swapaxes(some, 0, 1)
    some = jnp.broadcast_to(some, (some.shape[0], block.q.shape[0] // size.batch, *some.shape[2:]))
    number = jnp.arange(some.size, dtype=jnp.int32)
    listed = jnp.sort(jnp.where(some.reshape(-1), number, some.size))
    count = some.sum(dtype=jnp.int32)
    # How many times the list is run: key heads without lists of their own share one.
    alike = block.kv_heads // (size.heads * some.shape[0])

    def step(at: Any, carried: Arrays) -> Arrays:
        again, nth = _divided(at, count)
        tile = jax.lax.dynamic_index_in_dim(listed, nth, keepdims=False, allow_negative_indices=False)
        row, column = _divided(tile, some.shape[3])
        batch, row = _divided(row, some.shape[2])
        head, batch = _divided(batch, some.shape[1])
        head = head if alike == 1 else again
        start = Cut(batch * size.batch, head * size.heads, row * size.q, column * size.kv)
        parts = [{n: _take(x, axes[n], block, start, size) for n, x in arrays.items()} for arrays in (read, carried)]
        after = body(_tile(block, start, size), *parts)
        return {n: _put(x, after[n], axes[n], block, start, size) for n, x in carried.items()}

    return jax.lax.fori_loop(0, count * alike, step, carried)


def _words(block: Block, start: Cut, size: Cut) -> tuple[int, Any, int]:
    """The number of words of bits of the whole block, and the first and the number of those of a step."""
    if block.grain == 1:
        return words_of(block.kv_length), _divided(start.kv, WORD)[0], words_of(size.kv)
    each = words_of(size.kv, block.grain)
    return each * (block.kv_length // size.kv), _divided(start.kv, size.kv)[0] * each, each


def _divided(number: Any, by: Any) -> tuple[Any, Any]:
    """Quotient and remainder of numbers that are never negative.

    `//` and `%` also handle negative numbers, which takes XLA many more instructions.
    """
    by = jnp.asarray(by, number.dtype)  # with `jax_enable_x64`, Python's integers have 64 bits
    return jax.lax.div(number, by), jax.lax.rem(number, by)


def _tile(block: Block, start: Cut, size: Cut) -> Block:
    """Slices every array of the block to the tile that begins at `start`."""
    names = [(name, axes) for name, axes in BLOCK_AXES.items() if getattr(block, name) is not None]
    return dataclasses.replace(
        block,
        kv=jax.tree.map(lambda x: _take(x, ".BSK."[5 - x.ndim :], block, start, size), block.kv),
        **{name: _take(getattr(block, name), axes, block, start, size) for name, axes in names},
    )


def _take(x: jax.Array, axes: str, block: Block, start: Cut, size: Cut) -> jax.Array:
    """The part of `x` that belongs to a step. `axes` has a letter for each axis; an axis of length 1 is taken whole."""
    starts, sizes = _window(x, axes, block, start, size)
    if sizes == x.shape:
        return x
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return jax.lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)
    # Sliced as integers: to slice 16-bit floats, XLA on CPU would convert all of `x` to float32.
    whole = jax.lax.bitcast_convert_type(x, jnp.uint16)
    cut = jax.lax.dynamic_slice(whole, starts, sizes, allow_negative_indices=False)
    return jax.lax.bitcast_convert_type(cut, x.dtype)


def _put(x: jax.Array, part: jax.Array, axes: str, block: Block, start: Cut, size: Cut) -> jax.Array:
    """`x`, with `part` in place of what `_take` returns for the same arguments."""
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
        "W": _words(block, start, size),
    }
    if block.bits is not None and block.bits_of_head is None and block.bits.shape[1] > 1:
        sets = block.bits.shape[1] // block.kv_heads
        of["M"] = (sets * block.kv_heads, start.heads * sets, size.heads * sets)
    starts, sizes = [], []
    for axis, length in zip(axes, x.shape, strict=True):
        whole, at, many = of.get(axis, (length, 0, length))
        full = length != whole or many == whole
        starts.append(np.int32(0) if full else at)
        sizes.append(length if full else many)
    return starts, tuple(sizes)
