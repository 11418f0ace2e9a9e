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
from ..contract.call import ARRAYS, Call
from ..contract.varying import align
from ..placement import arrays, axes
from ..placement.arrays import broadcasts
from ..placement.layout import of_neighbours, to_neighbours

HEADS, TOKENS = ("N", "n", "K", "groups"), ("T", "t", "S")


def by_heads(call: Call) -> Call:
    """The call with this rank's share of the heads, and the tokens of all ranks along the last axis of `axis_name`.

    Keys and values are float32 if ranks share key heads, so that their gradients are float32 too.
    """
    *outer, inner = call.placement.roles.sequence  # on one rank there is nothing to exchange
    ranks = axes.size((inner,))
    copies = math.lcm(call.key.shape[2], ranks) // call.key.shape[2]
    # Keys and values travel as one array.
    packed: Any = packing.pack(call.key, call.value)
    tokens, heads, layout = packed.ndim - 3, packed.ndim - 2, call.placement.layout

    def move(x: jax.Array) -> jax.Array:
        return _exchanged(jnp.repeat(x, copies, heads), tokens, heads, layout, inner, ranks)

    packed = _widened(packed, move, packed.dtype, inner) if copies > 1 else move(packed)
    key, value = packing.unpack(packed, call.key.shape[-1])
    rest = dataclasses.replace(call, key=None, value=None, selected=call.selected_by(copies)).arrays
    moved: dict[str, Any] = {name: _moved_array(call, name, x, inner, ranks) for name, x in rest.items()}
    by_rank = (*call.placement.roles.heads, inner)
    moved |= {"key": key, "value": value}
    wide = {name: x for name, x in moved.items() if x.dtype != getattr(call, name).dtype}
    call = dataclasses.replace(call.widened(**wide), **moved)
    return call.placed(axis_name=(*outer,) or None, head_axis_name=by_rank, strategy="ring")


def by_tokens(call: Call, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The results of `call`, from those of `by_heads(call)`. Without `return_lse`, `lse` is not exchanged."""
    inner = call.placement.roles.sequence[-1]
    ranks = axes.size((inner,))

    def back(x: jax.Array, kind: Any) -> jax.Array:
        names = arrays.letters(kind)
        tokens, heads = names.index("T"), names.index("N")
        in_rank_order = to_neighbours(x, call.placement.layout, ranks, tokens)
        return jax.lax.all_to_all(in_rank_order, inner, tokens, heads, tiled=True)

    lse = back(lse, arrays.LogSumExp) if call.return_lse else lse
    return back(out, arrays.Output), lse


def of_all_heads(call: Call, max_logits: jax.Array) -> jax.Array:
    """`max_logits` of this rank's heads, with an entry for every head of `call`: -inf for heads of other ranks."""
    all_heads = jnp.full(call.query.shape[2], -jnp.inf, jnp.float32)
    first = jax.lax.axis_index(call.placement.roles.sequence[-1]) * len(max_logits)
    return jax.lax.dynamic_update_slice(all_heads, max_logits, (first,))


def _moved_array(call: Call, name: str, x: jax.Array, axis: str, ranks: int) -> jax.Array:
    """The array `x` of the call with this rank's share of heads and all tokens of the group, if it has such axes."""
    heads, tokens = (axis_of(call, name, x, letters) for letters in (HEADS, TOKENS))
    layout = call.placement.layout
    if tokens is None and heads is not None:
        share = x.shape[heads] // ranks
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * share, share, heads)
    if tokens is None:
        return x

    def move(x: jax.Array) -> jax.Array:
        """Gives `x` all tokens of the group, and this rank's share of the heads if `x` has an axis of heads."""
        if heads is not None:
            return _exchanged(x, tokens, heads, layout, axis, ranks)
        return of_neighbours(jax.lax.all_gather(x, axis, axis=tokens, tiled=True), layout, ranks, tokens)

    # The gradient of a bias is a sum over ranks: over this group if all heads share the bias, and over other mesh axes
    # if the bias is named in `call.wide`.
    if name == "bias" and (heads is None or name in call.wide):
        return _widened(x, move, call.query.dtype if name in call.wide else x.dtype, axis)
    return move(x)


def _widened(x: jax.Array, move: Callable[[jax.Array], jax.Array], narrow: Any, axis: str) -> jax.Array:
    """`move(x)` in float32. Its gradient stays float32 through the transpose of `move`, and is then rounded once.

    So all sums of the gradient are sums in float32, also those in the transpose of `move`. `move` is linear and closes
    over no array. It sends along the mesh axis `axis`; in the forward pass it sends the dtype `narrow`.
    """
    dtype = x.dtype
    if axis not in axes.manual():
        # A `vmap` plays the ranks: nothing travels, and `back` could not use its axis name.
        return move(x.astype(jnp.float32))
    x = align(x, axes.tracked() & {axis})  # the gradient varies over `axis`, so `x` must too
    # Not in `back`, which would hold `x` until the backward pass.
    wide = jax.typeof(x).update(dtype=jnp.dtype(jnp.float32))

    def back(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        (found,) = jax.linear_transpose(move, wide)(gradient)
        return (found.astype(dtype),)

    moved = jax.custom_vjp(lambda x: move(x.astype(narrow)).astype(jnp.float32))
    moved.defvjp(lambda x: (moved(x), None), back)
    return moved(x)


def _exchanged(x: jax.Array, tokens: int, heads: int, layout: str, axis: str, ranks: int) -> jax.Array:
    """Sends each rank its share of the heads of this rank's tokens; returns this rank's heads of all tokens."""
    return of_neighbours(jax.lax.all_to_all(x, axis, heads, tokens, tiled=True), layout, ranks, tokens)


def axis_of(call: Call, name: str, x: Any, wanted: tuple[str, ...]) -> int | None:
    """The number of the axis of `x` with one of these letters; `None` if it has none, or broadcasts over that axis.

    An axis `t` of length 1 does not broadcast if the shard has only one query.
    """
    for number, letter in enumerate(arrays.letters(ARRAYS[name], x.ndim)):
        whole = x.shape[number] > 1 or not broadcasts(letter) or (letter == "t" and call.query.shape[1] == 1)
        if letter in wanted and whole:
            return number
    return None
