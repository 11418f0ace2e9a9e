# SPDX-License-Identifier: Apache-2.0
"""Checks that the arguments of a call fit together, and makes the call in canonical form."""

import inspect
from typing import Any, Final

import jax

from ..contract.call import Call
from ..contract.signature import SIGNATURE
from ..errors import InputError
from ..placement import axes
from ..placement import layout as layouts
from .checks import Sizes, as_array
from .options import DEFAULTS, OPTIONS, refuse_unknown
from .shard_map import refuse_replicated, refuse_unnamed_axes

DTYPES: Final = ("float32", "float16", "bfloat16")
_POSITIONAL: Final = [p.name for p in SIGNATURE.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
_PAIRS: Final = (("q_segment_ids", "kv_segment_ids"), ("q_positions", "kv_positions"))
_ALIASES: Final = {"q_position_ids": "q_positions", "kv_position_ids": "kv_positions"}


def validated(*arguments: Any, ranks: int | None = None, **options: Any) -> Call:
    """The call in canonical form, from the arguments of the per-shard signature. Raises if they do not fit together.

    By default the call is made inside a `shard_map`, and arrays are those of one rank of `axis_name`. Outside, `ranks`
    is the number of shards of the sequence, and the arrays are one of these shards; 1 means global arrays.
    """
    given = _named(arguments, options)
    q, k, v = operands({name: given.pop(name) for name in ("query", "key", "value")})
    ring = axes.names(given["axis_name"], "axis_name")
    batch, heads = (axes.names(given[name], name) for name in ("batch_axis_name", "head_axis_name"))
    refuse_overlaps(ring, batch, heads)
    inside, copies = ranks is None, 1
    if inside:
        ranks = axes.size("axis_name", ring)
        axes.size("batch_axis_name", batch)
        copies = axes.size("head_axis_name", heads)
        _layout_fits(layouts.canonical(given["layout"]), q, k, ranks)
    assert ranks is not None
    sizes = Sizes(
        of=dict(zip("BTNHSK", (*q.shape, *k.shape[1:3]), strict=True)) | {"S_GLOBAL": k.shape[1] * ranks},
        lengths=(q.shape[1] * ranks, k.shape[1] * ranks),
        heads=(q.shape[2] * copies, k.shape[2] * copies),
        head_axes=heads if inside else (),
    )
    found = {option.name: option.canonical(given[option.name], sizes) for option in OPTIONS}
    for names in _PAIRS:
        _pair(found, names, q, k)
    if found["dropout_prob"] and found["dropout_seed"] is None:
        raise InputError(
            "dropout_seed",
            f"is missing with dropout_prob={found['dropout_prob']}",
            "Pass an integer, a new one each step",
        )
    if not found["dropout_prob"]:
        found["dropout_seed"] = None
    call = Call(query=q, key=k, value=v, **found)
    if inside:
        refuse_replicated(call)
        refuse_unnamed_axes(call)
    return call


def _named(arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Every argument under its canonical name, with defaults for arguments that are not given."""
    refuse_unknown(options, DEFAULTS)
    by_position = dict(zip(_POSITIONAL, arguments, strict=False))
    given = DEFAULTS | by_position | options
    missing = any(given[name] is inspect.Parameter.empty for name in ("query", "key", "value"))
    if missing or len(by_position) < len(arguments) or by_position.keys() & options:
        raise _unbound(arguments, options)
    for alias, name in _ALIASES.items():
        other = given.pop(alias)
        if other is not None and given[name] is not None:
            raise InputError(alias, f"is another name of {name}, which is given too", "Pass one of them")
        given[name] = given[name] if other is None else other
    return given


def _unbound(arguments: tuple[Any, ...], options: dict[str, Any]) -> InputError:
    """An error with Python's own message about missing, repeated or surplus arguments."""
    try:
        SIGNATURE.bind(*arguments, **options)
    except TypeError as error:
        remedy = f"Pass query, key and value, and whatever follows {_POSITIONAL[-1]} by name"
        return InputError("ring_attention", str(error), remedy)
    raise AssertionError("the arguments bind")


def operands(given: dict[str, Any]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value as arrays that fit together; errors call them by the names in `given`."""
    q, k, v = (as_array(name, x) for name, x in given.items())
    query, key, value = given
    for name, x in zip(given, (q, k, v), strict=True):
        if x.ndim != 4:
            raise InputError(name, f"has shape {x.shape}", "Its four axes are (batch, length, heads, head size)")
        if 0 in x.shape:
            raise InputError(name, f"has shape {x.shape}, which is empty", "Every axis must be at least 1")
    if q.dtype.name not in DTYPES:
        raise InputError(query, f"has dtype {q.dtype}", f"Cast query, key and value to one of {', '.join(DTYPES)}")
    for name, x in ((key, k), (value, v)):
        if x.dtype != q.dtype:
            raise InputError(name, f"has dtype {x.dtype} but {query} has {q.dtype}", "Cast all three to one dtype")
        if x.shape[0] != q.shape[0]:
            raise InputError(name, f"has batch {x.shape[0]} but {query} has {q.shape[0]}", "They must be equal")
    if k.shape[3] != q.shape[3]:
        raise InputError(key, f"has head size {k.shape[3]} but {query} has {q.shape[3]}", "They must be equal")
    if v.shape[1:3] != k.shape[1:3]:
        raise InputError(
            value, f"has (length, heads) {v.shape[1:3]} but {key} has {k.shape[1:3]}", "They must be equal"
        )
    if q.shape[2] % k.shape[2]:
        raise InputError(
            key,
            f"has {k.shape[2]} heads, which do not divide the {q.shape[2]} of {query}",
            "Query heads share key heads in equal groups",
        )
    return q, k, v


def refuse_overlaps(ring: tuple[str, ...], batch: tuple[str, ...], heads: tuple[str, ...]) -> None:
    """Raises if one mesh axis would split two axes of an array."""
    for argument, names, other, taken in (
        ("batch_axis_name", batch, "the ring's axis_name", ring),
        ("head_axis_name", heads, "the ring's axis_name", ring),
        ("head_axis_name", heads, "batch_axis_name", batch),
    ):
        if set(names) & set(taken):
            raise InputError(argument, f"{names} overlaps {other} {taken}", "Name other axes")


def _layout_fits(layout: str, q: jax.Array, k: jax.Array, ranks: int) -> None:
    parts = layouts.pieces(layout)
    for name, x in (("query", q), ("key", k)):
        if x.shape[1] % parts:
            raise InputError(
                "layout",
                f"{layout!r} needs an even local length, but {name} has {x.shape[1]} tokens on each rank",
                f"Pad the sequence to {(x.shape[1] + 1) * ranks} tokens, or use 'contiguous' or 'striped'",
            )


def _pair(found: dict[str, Any], names: tuple[str, str], q: jax.Array, k: jax.Array) -> None:
    """If one array of a pair is given, uses it for queries and keys; raises unless they have equal lengths."""
    missing = [name for name in names if found[name] is None]
    if len(missing) != 1:
        return
    (other,) = missing
    (given,) = set(names) - {other}
    if q.shape[1] != k.shape[1]:
        raise InputError(
            given, f"is given alone, but there are {q.shape[1]} queries and {k.shape[1]} keys", f"Pass {other} too"
        )
    found[other] = found[given]
