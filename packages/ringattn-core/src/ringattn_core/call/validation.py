# SPDX-License-Identifier: Apache-2.0
"""Checks that the arguments of a call fit together, and makes the call in canonical form."""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp

from ..contract.call import Call
from ..contract.signature import SIGNATURE
from ..errors import InputError
from ..placement import arrays, axes
from ..placement import layout as layouts
from .checks import Sizes, refuse_misfit
from .options import OPTIONS, refuse_unknown
from .shard_map import own_key_heads, refuse_replicated, refuse_unnamed_axes

DTYPES: Final = ("float32", "float16", "bfloat16")
_ALIASES: Final = {"q_position_ids": "q_positions", "kv_position_ids": "kv_positions"}


def validated(*arguments: Any, ranks: int | None = None, **options: Any) -> Call:
    """The call in canonical form, from the arguments of the per-shard signature. Raises if they do not fit together.

    By default the call is made inside a `shard_map`, and arrays are those of one rank of `axis_name`. Outside, `ranks`
    is the number of shards of the sequence, and the arrays are one of these shards; 1 means global arrays.
    """
    given = _named(arguments, options)
    ring = axes.names(given["axis_name"], "axis_name")
    batch, heads = (axes.names(given[name], name) for name in ("batch_axis_name", "head_axis_name"))
    refuse_shared_axes(ring, batch, heads)
    q, k, v = (arrays.as_array(name, given.pop(name)) for name in ("query", "key", "value"))
    inside, copies = ranks is None, 1
    if inside and heads and q.ndim == k.ndim == v.ndim == 4:
        k, v = (own_key_heads(q, x, heads) for x in (k, v))
    check_operands({"query": q, "key": k, "value": v})
    if inside:
        ranks = axes.size("axis_name", ring)
        axes.size("batch_axis_name", batch)
        copies = axes.size("head_axis_name", heads)
        for name, x in (("query", q), ("key", k)):
            layouts.refuse_indivisible(name, x.shape[1] * ranks, layouts.canonical(given["layout"]), ranks)
    assert ranks is not None
    lengths = q.shape[1] * ranks, k.shape[1] * ranks
    sizes = Sizes.of_operands(q, k, lengths, copies, heads if inside else ())
    found = {option.name: option.canonical(given[option.name], sizes) for option in OPTIONS}
    _pair(found, ("q_segment_ids", "kv_segment_ids"), q, k)
    if found["query_offset"] is None:
        _pair(found, ("q_positions", "kv_positions"), q, k)
    elif found["q_positions"] is not None:
        raise InputError("query_offset", "is given beside q_positions", "Add it to the positions, or leave these out")
    if found["dropout_prob"] and found["dropout_seed"] is None:
        raise InputError(
            "dropout_seed",
            f"is missing with dropout_prob={found['dropout_prob']}",
            "Pass an integer, a new one each step",
        )
    if not found["dropout_prob"]:
        found["dropout_seed"] = None
    if ring and found["bias"] is not None and found["bias"].shape[2] == 1:
        # All ranks share its row: their gradients are added in float32, and rounded once.
        found["bias"] = found["bias"].astype(jnp.float32)
    call = Call(query=q, key=k, value=v, **found)
    if inside:
        refuse_replicated(call)
        refuse_unnamed_axes(call)
        return dataclasses.replace(call, axis_name=ring or None)
    return call


def _named(arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Every argument under its canonical name, with defaults for arguments that are not given."""
    refuse_unknown(options, SIGNATURE.parameters)
    try:
        bound = SIGNATURE.bind(*arguments, **options)
    except TypeError as error:
        remedy = "Pass query, key and value, and whatever follows fused_backward by name"
        raise InputError("ring_attention", str(error), remedy) from None
    bound.apply_defaults()
    given = dict(bound.arguments)
    for alias, name in _ALIASES.items():
        other = given.pop(alias)
        if other is not None and given[name] is not None:
            raise InputError(alias, f"is another name of {name}, which is given too", "Pass one of them")
        given[name] = given[name] if other is None else other
    return given


def check_operands(given: dict[str, jax.Array]) -> None:
    """Raises unless query, key and value fit together. Errors call them by their names in `given`."""
    (query, q), (key, k), _ = given.items()
    if q.dtype.name not in DTYPES:
        raise InputError(query, f"has dtype {q.dtype}", f"Cast query, key and value to one of {', '.join(DTYPES)}")
    sizes: dict[str, int] = {}
    for (name, x), wanted in zip(given.items(), (arrays.Query, arrays.Key, arrays.Value), strict=True):
        if not all(isinstance(size, int) for size in x.shape):
            remedy = "Export one program for each shape: kernels must know all sizes"
            raise InputError(name, f"has shape {x.shape}, with symbolic sizes", remedy)
        refuse_misfit(name, x, wanted, sizes)
        if 0 in x.shape:
            raise InputError(name, f"has shape {x.shape}, which is empty", "Every axis must be at least 1")
        if x.dtype != q.dtype:
            raise InputError(name, f"has dtype {x.dtype} but {query} has {q.dtype}", "Cast all three to one dtype")
        sizes |= zip(arrays.letters(wanted), x.shape, strict=True)
    if q.shape[2] % k.shape[2]:
        raise InputError(
            key,
            f"has {k.shape[2]} heads, which do not divide the {q.shape[2]} of {query}",
            "Query heads share key heads in equal groups",
        )


def refuse_shared_axes(ring: tuple[str, ...], batch: tuple[str, ...], heads: tuple[str, ...]) -> None:
    """Raises if one mesh axis would split two axes of an array."""
    if len({*ring, *batch, *heads}) < len(ring) + len(batch) + len(heads):
        raise InputError(
            "axis_name",
            f"{ring}, batch_axis_name {batch} and head_axis_name {heads} share a mesh axis",
            "Each mesh axis splits one axis of the arrays",
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
