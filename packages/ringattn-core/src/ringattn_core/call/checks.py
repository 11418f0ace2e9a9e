# SPDX-License-Identifier: Apache-2.0
"""Checks the value of one argument at a time, and converts it to its canonical form."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from ..contract.call import ARRAYS
from ..errors import InputError, did_you_mean
from ..integers import INT32, POSITION, SEED, Limits, as_int32, integers, static, whole
from ..masks import Reach
from ..masks.builder import Built, build
from ..placement import arrays, axes
from ..strategies import STRATEGIES

MOST_POSITION: Final = POSITION[1] + 1
LARGEST, LEAST_NORMAL = (float(x) for x in (np.finfo(np.float32).max, np.finfo(np.float32).tiny))
LARGEST_CAP: Final = 1e30
PRECISIONS: Final = ("default", "high", "highest")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of query, key and value, against which other arguments are checked.

    `of` is the size of each axis letter, in capitals, in the arrays as passed. `lengths` and `heads` are the global
    sizes, of queries and of keys. Inside a `shard_map`, `head_axes` are the mesh axes that split the heads.
    """

    of: Mapping[str, int]
    lengths: tuple[int, int]
    heads: tuple[int, int]
    head_axes: tuple[str, ...] = ()


def array(argument: str, x: Any, sizes: Sizes, limits: Limits = INT32) -> jax.Array:
    """Converts `x` to an array with the axes and the kind of numbers of its field in `Call`; integers become int32."""
    wanted = ARRAYS[argument]
    found = as_int32(argument, x, limits) if wanted.dtype is Int else typed(argument, x, wanted)
    refuse_misfit(argument, found, wanted, sizes.of)
    return found


def refuse_misfit(argument: str, x: jax.Array, wanted: Any, sizes: Mapping[str, int]) -> None:
    """Raises unless the shape of `x` agrees with the axis letters of `wanted` and the sizes that are known."""
    if not arrays.fits(wanted, x.shape, sizes):
        names = arrays.letters(wanted)
        each = [(name, sizes.get(name.upper(), name)) for name in names]
        shape = ", ".join(f"1|{n}" if arrays.broadcasts(name) and n != 1 else str(n) for name, n in each)
        whole = ", and its last axis counts the keys of the whole sequence" if "S_global" in names else ""
        meant = f": ({', '.join(names)})" if shape != ", ".join(names) else ""
        raise InputError(argument, f"has shape {x.shape}", f"It needs ({shape}){meant}{whole}")


def typed(argument: str, x: Any, wanted: Any) -> jax.Array:
    """Converts `x` to an array of floating-point numbers or of booleans, as `wanted` says; raises for other dtypes."""
    found = arrays.as_array(argument, x)
    if wanted.dtype is Float and not jnp.issubdtype(found.dtype, jnp.floating):
        raise InputError(argument, f"has dtype {found.dtype}", "It needs floating-point numbers")
    if wanted.dtype is Bool and found.dtype != jnp.bool_:
        raise InputError(argument, f"has dtype {found.dtype}", "It needs booleans, true where a query may see a key")
    return found


def positions(argument: str, x: Any, sizes: Sizes) -> jax.Array:
    """Checks positions: integers below 2^30 in magnitude."""
    return array(argument, x, sizes, POSITION)


def key_range(argument: str, x: Any, sizes: Sizes) -> tuple[jax.Array, jax.Array] | None:
    """Checks the first and the last position that each query sees; returns both as int32 `[b, n, T]`.

    An end is a number, or an array of one, two or three axes: `[T]`, `[b, T]` or `[b, n, T]`.
    """
    if x is None:
        return None
    ends = tuple(x) if isinstance(x, (tuple, list)) else ()
    if len(ends) != 2 or ends[0] is None or ends[1] is None:
        got = "lacks an end" if len(ends) == 2 else f"got {len(ends)} ends" if ends else f"got {type(x).__name__}"
        remedy = f"Pass (first, last): the least int32, {INT32[0]}, and the largest, {INT32[1]}, bound nothing"
        raise InputError(argument, got, remedy)
    first, last = jnp.broadcast_arrays(*(_end_of_range(argument, end, sizes) for end in ends))
    return first, last


def _end_of_range(argument: str, x: Any, sizes: Sizes) -> jax.Array:
    found = as_int32(argument, x)
    if found.ndim == 0:
        return jnp.broadcast_to(found, (1, 1, sizes.of["T"]))
    rows, *of_heads = (1, *found.shape[:-1]) if found.ndim == 1 else found.shape[:-1]
    whole = found.reshape(rows, *(of_heads or (1,)), found.shape[-1])
    if whole.ndim != 3 or not arrays.fits(arrays.KeyRange, whole.shape, sizes.of):
        shapes = "({T},), (1|{B}, {T}) or (1|{B}, 1|{N}, {T})".format(**sizes.of)
        raise InputError(argument, f"has an end of shape {found.shape}", f"It needs a number, or {shapes}")
    return whole


def selected(argument: str, x: Any, sizes: Sizes) -> jax.Array:
    """Checks the ids of chosen keys: integers `[B, T, groups, chosen]`, with 1, `K` or `N` groups."""
    found = as_int32(argument, x)
    rows, tokens, heads, key_heads = (sizes.of[letter] for letter in "BTNK")
    if found.ndim != 4 or found.shape[:2] != (rows, tokens) or found.shape[2] not in (1, key_heads, heads):
        groups = "|".join(str(number) for number in dict.fromkeys((1, key_heads, heads)))
        remedy = f"It needs ({rows}, {tokens}, {groups}, n): n ids a query, of all heads, key heads or heads"
        raise InputError(argument, f"has shape {found.shape}", remedy)
    return found


def selected_size(argument: str, x: Any, _: Sizes) -> int:
    return whole(argument, static(argument, x), 1, remedy="It needs an integer of at least 1: the keys of a block")


def query_offset(argument: str, x: Any, sizes: Sizes) -> jax.Array:
    """Checks an offset, one integer or one for each batch row: no query may get a position of 2^30 or beyond."""
    least, most, _ = POSITION
    most -= max(sizes.lengths[0] - 1, 0)
    remedy = f"Pass offsets from {least} to {most}: query i has the position query_offset + i, which must be below 2^30"
    found, rows = as_int32(argument, x, (least, most, remedy)), sizes.of["B"]
    if found.shape not in ((), (1,), (rows,)):
        raise InputError(argument, f"has shape {found.shape}", f"Pass one integer, or {rows}, one for each row")
    return found


def sinks(argument: str, x: Any, sizes: Sizes) -> jax.Array:
    """Converts sinks to `[N, n]` in float32, a row for each head of this rank.

    An array of one axis has a sink for each head if it is as long as there are heads on all ranks; otherwise all heads
    share its sinks. If JAX knows that the array is split like the heads, it has one sink for each head of this rank.
    """
    found, heads = typed(argument, x, arrays.Sinks).astype(jnp.float32), sizes.of["N"]
    if found.ndim == 2 and found.size and found.shape[0] == heads:
        return found
    every = sizes.heads[0]
    if found.ndim != 1 or not found.size:
        raise InputError(
            argument,
            f"has shape {found.shape}",
            f"It needs ({every},) for one sink a head, (n,) for n shared ones, or ({heads}, n)",
        )
    if found.shape[0] == heads and set(sizes.head_axes) & axes.varying(found):
        return found[:, None]  # JAX knows, by `check_vma`, that each rank has the sinks of its own heads
    if found.shape[0] != every:
        return jnp.broadcast_to(found, (heads, found.shape[0]))
    if every != heads:
        found = jax.lax.dynamic_slice_in_dim(found, axes.coordinate(sizes.head_axes) * heads, heads)
    return found[:, None]


def float32_array(argument: str, x: Any, sizes: Sizes) -> jax.Array:
    """Converts `x` to float32, so that ranks add up its gradient in float32 and round it once."""
    return array(argument, x, sizes).astype(jnp.float32)


def mask_builder(argument: str, builder: Any, sizes: Sizes) -> Built:
    """Calls the builder for every head; equal masks are kept once."""
    if not callable(builder):
        raise InputError(
            argument,
            f"got {type(builder).__name__}",
            "It needs a function (q_len, kv_len, num_heads, head_idx, num_reps) -> mask",
        )
    return build(builder, *sizes.lengths, *sizes.heads)


def window(argument: str, x: Any, _: Sizes) -> tuple[int | None, int | None]:
    """Checks a window; returns `(left, right)`. A side as wide as any distance of two positions becomes `None`."""
    sides = tuple(x) if isinstance(x, (tuple, list)) else (x, x)
    if len(sides) != 2:
        raise InputError(argument, f"got {x!r}", "Pass one width, or (left, right)")
    remedy = "It needs an integer of at least 0, or None"
    left, right = (None if s is None else whole(argument, static(argument, s), 0, math.inf, remedy) for s in sides)
    return tuple(None if s is None or s >= 2 * MOST_POSITION else s for s in (left, right))  # pyright: ignore[reportReturnType]


def promise(argument: str, x: Any, sizes: Sizes) -> Reach:
    """The reach within which the caller promises that every query sees its keys."""
    return Reach() if x is None else Reach(False, *window(argument, x, sizes))


def chunk(argument: str, x: Any, _: Sizes) -> int:
    """Checks a chunk size. Sizes above 2^30 become 2^30: with either, chunks meet only at position 0."""
    return min(
        whole(argument, static(argument, x), 1, math.inf, "It needs an integer of at least 1, or None"), MOST_POSITION
    )


def axis_names(argument: str, x: Any, _: Sizes) -> tuple[str, ...]:
    return axes.names(x, argument)


def _number(argument: str, x: Any, wanted: str, accepts: Callable[[Any], bool]) -> float | None:
    if x is None:
        return None
    x = static(argument, x)
    size: Any = abs(x) if isinstance(x, numbers.Real) else None
    if isinstance(x, bool) or size is None or not size <= LARGEST or not accepts(x):
        raise InputError(argument, f"got {x!r}", f"It must be {wanted}")
    return float(x)


def soft_cap(argument: str, x: Any, _: Sizes) -> float | None:
    """Checks a soft cap. Above `LARGEST_CAP`, `score / cap` would be so small that float32 loses its digits."""
    wanted = f"from {LEAST_NORMAL:.3g} to {LARGEST_CAP:.0e}, or None for no cap"
    return _number(argument, x, wanted, lambda c: LEAST_NORMAL <= c <= LARGEST_CAP)


def scale(argument: str, x: Any, sizes: Sizes) -> float:
    """Checks the scale, by default `H ** -0.5`. A subnormal float32 becomes 0 here, as only some kernels would do."""
    found = _number(argument, x, "a finite float32", lambda _: True)
    if found is None:
        return sizes.of["H"] ** -0.5
    return found if abs(found) >= LEAST_NORMAL else 0.0


def probability(argument: str, x: Any, _: Sizes | None = None) -> float:
    """Checks a dropout probability. Its resolution is 2^-16: a smaller one would drop nothing, and raises."""
    wanted = "0, or a probability of at least 2^-16 and below 1"
    return _number(argument, x, wanted, lambda p: p == 0 or 2**-16 <= p < 1) or 0.0


def seed(argument: str, x: Any, _: Sizes) -> jax.Array:
    """The dropout seed as uint32; a negative integer gets 2^32 added."""
    given = integers(argument, x, SEED)
    if given.ndim:
        raise InputError(argument, f"has shape {given.shape}", "It needs one integer")
    return jnp.asarray(given if isinstance(given, jax.Array) else np.uint32(int(given) % 2**32)).astype(jnp.uint32)


def flag(argument: str, x: Any, _: Sizes | None = None) -> bool:
    x = static(argument, x)
    if not isinstance(x, numbers.Integral) or x not in (0, 1):
        raise InputError(argument, f"got {x!r}", "It must be True or False")
    return bool(x)


def strategy(argument: str, x: Any, _: Sizes) -> str:
    if not isinstance(x, str) or x not in STRATEGIES:
        known = ", ".join(map(repr, STRATEGIES))
        raise InputError(argument, f"got {x!r}{did_you_mean(x, STRATEGIES)}", f"Known strategies: {known}")
    return x


def balance(argument: str, x: Any, _: Sizes) -> str:
    if x != "zigzag":
        raise InputError(argument, f"got {x!r}", "Pass 'zigzag', or None to compute in the order of the layout")
    return x


def precision(argument: str, x: Any, _: Sizes) -> str:
    name = x.name.lower() if isinstance(x, jax.lax.Precision) else x
    if not isinstance(name, str) or name not in PRECISIONS:
        known = ", ".join(repr(p) for p in PRECISIONS)
        raise InputError(argument, f"got {x!r}", f"Known precisions: None, {known}, jax.lax.Precision")
    return name
