# SPDX-License-Identifier: Apache-2.0
"""The strategy "ulysses": ranks exchange heads for tokens, so that fewer ranks, or one, share the sequence of a head.

The ranks of the last axis of `axis_name` are a group. They split the heads between them, and each gets all tokens of
the group, whose shards are consecutive. The result is the same call with the last mesh axis moved from `axis_name` to
`head_axis_name`: a ring over the axes before the last one, or one rank.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..contract import packing
from ..contract.call import Call
from ..contract.varying import align
from ..placement import arrays, axes
from ..placement.arrays import broadcasts, letters_of
from ..placement.layout import of_neighbours, to_neighbours

HEADS, TOKENS = ("N", "n", "K"), ("T", "t", "S")


def by_heads(call: Call) -> Call:
    """The call with this rank's share of the heads, and the tokens of all ranks along the last axis of `axis_name`.

    Keys and values are float32 if ranks share key heads, so that their gradients are float32 too.
    """
    assert call.axis_name is not None  # on one rank there is nothing to exchange
    outer, inner = call.axis_name[:-1], call.axis_name[-1]
    ranks = axes.size("axis_name", (inner,))
    copies = math.lcm(call.key.shape[2], ranks) // call.key.shape[2]
    # Keys and values travel as one array.
    packed: Any = packing.pack(call.key, call.value)
    place = packed.ndim - 3, packed.ndim - 2, call.layout, inner, ranks
    packed = _exchanged_wide(packed, *place, packed.dtype, copies) if copies > 1 else _exchanged(packed, *place)
    key, value = packing.unpack(packed, call.key.shape[-1])
    rest = dataclasses.replace(call, key=None, value=None).arrays
    moved: dict[str, Any] = {name: _moved(call, name, x, inner, ranks) for name, x in rest.items()}
    heads = (*(call.head_axis_name or ()), inner)
    if call.bias is not None and moved["bias"].dtype != call.bias.dtype:
        moved["bias_dtype"] = call.bias.dtype.name
    moved |= {"key": key, "value": value, "axis_name": outer or None, "head_axis_name": heads, "strategy": "ring"}
    return dataclasses.replace(call, **moved)


def by_tokens(call: Call, result: tuple[jax.Array, jax.Array]) -> Any:
    """The output of `call`, or its `(out, lse)`, from the result of `by_heads(call)`."""
    assert call.axis_name is not None
    inner = call.axis_name[-1]
    ranks = axes.size("axis_name", (inner,))

    def back(x: jax.Array, kind: Any) -> jax.Array:
        names = arrays.letters(kind)
        tokens, heads = names.index("T"), names.index("N")
        in_rank_order = to_neighbours(x, call.layout, ranks, tokens)
        return jax.lax.all_to_all(in_rank_order, inner, tokens, heads, tiled=True)

    out, lse = result
    return (back(out, arrays.Output), back(lse, arrays.LogSumExp)) if call.return_lse else back(out, arrays.Output)


def _moved(call: Call, name: str, x: jax.Array, axis: str, ranks: int) -> jax.Array:
    """One array of the call, with this rank's share of the heads and all tokens of the group, if it has such axes."""
    heads, tokens = (_axis_of(call, name, x, letters) for letters in (HEADS, TOKENS))
    # The gradient of a bias is a sum over ranks: over this group if all heads share the bias, and over others if core
    # made it float32 (`Call.with_wide_bias`). Such a bias is sent in the dtype that the caller gave.
    narrow = call.bias_dtype or x.dtype
    if heads is not None and tokens is not None:
        place = tokens, heads, call.layout, axis, ranks
        return _exchanged(x, *place) if name != "bias" or narrow == x.dtype else _exchanged_wide(x, *place, narrow)
    if tokens is not None:
        place = tokens, call.layout, axis, ranks
        return _gathered(x, *place) if name != "bias" else _gathered_wide(x, *place, narrow)
    if heads is not None:
        share = x.shape[heads] // ranks
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * share, share, heads)
    return x


def _exchanged(x: jax.Array, tokens: int, heads: int, layout: str, axis: str, ranks: int) -> jax.Array:
    """Sends each rank its share of the heads of this rank's tokens; returns this rank's heads of all tokens."""
    return of_neighbours(jax.lax.all_to_all(x, axis, heads, tokens, tiled=True), layout, ranks, tokens)


def _exchanged_wide(
    x: jax.Array, tokens: int, heads: int, layout: str, axis: str, ranks: int, narrow: Any, copies: int = 1
) -> jax.Array:
    """`_exchanged` of `copies` of every head: sent as `narrow`, returned in float32 (`_with_wide_gradient`)."""

    def move(x: jax.Array) -> jax.Array:
        return _exchanged(jnp.repeat(x, copies, heads), tokens, heads, layout, axis, ranks)

    def back(gradient: jax.Array) -> jax.Array:
        in_rank_order = to_neighbours(gradient, layout, ranks, tokens)
        parts = jax.lax.all_to_all(in_rank_order, axis, tokens, heads, tiled=True)
        return parts.reshape(*parts.shape[:heads], -1, copies, *parts.shape[heads + 1 :]).sum(heads + 1)

    return _with_wide_gradient(move, back, x, axis, narrow)


def _gathered(x: jax.Array, tokens: int, layout: str, axis: str, ranks: int) -> jax.Array:
    """The tokens of all ranks of the group."""
    return of_neighbours(jax.lax.all_gather(x, axis, axis=tokens, tiled=True), layout, ranks, tokens)


def _gathered_wide(x: jax.Array, tokens: int, layout: str, axis: str, ranks: int, narrow: Any) -> jax.Array:
    """`_gathered`, but sent as `narrow` and returned in float32 (`_with_wide_gradient`)."""

    def back(gradient: jax.Array) -> jax.Array:
        in_rank_order = to_neighbours(gradient, layout, ranks, tokens)
        return jax.lax.psum_scatter(in_rank_order, axis, scatter_dimension=tokens, tiled=True)

    return _with_wide_gradient(lambda x: _gathered(x, tokens, layout, axis, ranks), back, x, axis, narrow)


def _with_wide_gradient(
    move: Callable[[jax.Array], jax.Array],
    back: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    axis: str,
    narrow: Any,
) -> jax.Array:
    """`move(x)`, sent in the dtype `narrow` and returned in float32; `back` is its transpose.

    The gradient is a sum over ranks. It is sent in float32, and rounded once, after the sum.
    """
    if axis not in axes.manual():  # a `vmap` plays the ranks: nothing travels, and `back` could not use its axis name
        return move(x.astype(jnp.float32))
    dtype = x.dtype  # a rule that read it from `x` would keep `x`
    moved = jax.custom_vjp(lambda x: move(x.astype(narrow)).astype(jnp.float32))
    moved.defvjp(lambda x: (moved(x), None), lambda _, gradient: (back(gradient).astype(dtype),))
    return moved(align(x, axes.tracked() & {axis}))  # the gradient varies over `axis`, so `x` must too


def _axis_of(call: Call, name: str, x: Any, wanted: tuple[str, ...]) -> int | None:
    """The number of the axis with one of these letters, if the array has one and does not broadcast over it.

    An axis `t` of length 1 does not broadcast if the shard has only one query.
    """
    names = letters_of(Call)[name][-x.ndim :] if x.ndim else ()
    for number, letter in enumerate(names):
        whole = x.shape[number] > 1 or not broadcasts(letter) or (letter == "t" and call.query.shape[1] == 1)
        if letter in wanted and whole:
            return number
    return None


def misfit(heads: int, key_heads: int, ranks: int, groups: int, two_way: bool) -> str | None:
    """Why groups of `ranks` ranks, in a ring of `groups`, cannot split the heads of a call; `None` if they can."""
    if heads % ranks:
        return f"{heads} query heads do not divide by {ranks} ranks"
    if groups > 1 and two_way and math.lcm(key_heads, ranks) // ranks % 2:
        return "two_way needs an even number of key heads on each rank"
    return None
