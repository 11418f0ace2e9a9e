# SPDX-License-Identifier: Apache-2.0
"""Checks a call inside the caller's own `shard_map`: its tokens are sharded, and it names the axes that matter."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..contract.call import Call
from ..contract.varying import axes_of
from ..errors import InputError, MeshError
from ..placement import axes

AXIS_NAMES = ("axis_name", "batch_axis_name", "head_axis_name")


def refuse_replicated(ring: tuple[str, ...], given: Mapping[str, Any]) -> None:
    """Raises if an array of tokens is replicated over the `ring`: each rank would take it for its own shard.

    JAX tracks this under `check_vma=True` only. Segment ids are not checked: the same ids on all ranks are usual.
    """
    tracked = _tracked(ring)
    for argument, x in given.items():
        missing = () if x is None else tuple(sorted(tracked - axes.varying(x)))
        if missing:
            raise InputError(
                argument,
                f"is replicated over {missing}, over which axis_name={ring} spreads the sequence",
                "Shard its length over the ring in in_specs, or compute it from jax.lax.axis_index",
            )


def refuse_sharded(ring: tuple[str, ...], given: Mapping[str, Any]) -> None:
    """Raises if an array that must be equal on all ranks of the ring differs between them, as far as JAX tracks it."""
    for argument, x in given.items():
        over = tuple(sorted(_tracked(ring) & axes.varying(x)))
        if over:
            raise InputError(
                argument,
                f"differs between the ranks of {over}, but all ranks of axis_name={ring} need the same",
                "Do not shard it over the ring in in_specs",
            )


def _tracked(ring: tuple[str, ...]) -> frozenset[str]:
    """The axes of the ring over which JAX tracks whether an array varies. Axes of size 1 do not count."""
    large = {name for name in ring if axes.size((name,)) > 1}
    return axes.tracked() & large if large else frozenset()


def refuse_unnamed_axes(call: Call, around: bool = False) -> None:
    """Raises if a mesh axis may split the arrays, and the call does not say what the axis splits.

    A forgotten `axis_name` would be local attention, and forgotten axes of batch or heads would pair query heads with
    wrong key heads, and repeat dropout bits. A call that gives all three names passes. `axis_name=()` says that
    attention is local; then, or where the `shard_map` is `around` a call on global arrays, only dropout and masks that
    differ between heads need the other names. Under `check_vma=False` JAX does not say over which axes arrays vary;
    then any axis counts.
    """
    unsaid = [
        name for name in AXIS_NAMES if getattr(call.placement, name) is None and not (around and name == "axis_name")
    ]
    indexed = call.rule.dropout_prob or (call.mask_builder is not None and len(call.mask_builder.masks) > 1)
    if not unsaid or ((around or call.placement.axis_name == ()) and not indexed):
        return
    split = axes_of(call.query, call.key, call.value) if axes.tracked() else axes.manual()
    named = {name for argument in AXIS_NAMES for name in getattr(call.placement, argument) or ()}
    over = tuple(name for name in sorted(split - named) if jax.lax.axis_size(name) > 1)
    if over:
        local = ", and axis_name=() that attention is local" if "axis_name" in unsaid else ""
        raise MeshError(
            f"the mesh axes {over} of the surrounding shard_map may split the arrays, and the call does not say what "
            f"they split. Name them in {' or '.join(unsaid)}; () means none{local}"
        )


def own_key_heads(query: jax.Array, x: jax.Array, head_axes: tuple[str, ...]) -> jax.Array:
    """Selects the key heads that this rank's query heads read, if every rank holds all of them; else returns `x`.

    Under `check_vma=True` JAX says whether every rank holds all key heads. Otherwise this assumes so only if their
    number does not divide the number of this rank's query heads. Every head of the result serves
    equally many query heads.
    """
    ranks, heads, given = axes.size(head_axes, "head_axis_name"), query.shape[2], x.shape[2]
    over = axes.tracked() & set(head_axes)
    whole = over & axes.varying(query) and not over & axes.varying(x) if over else heads % given
    if not whole or heads * ranks % given:
        return x
    group = heads * ranks // given
    run = math.gcd(heads, group)
    first = axes.coordinate(head_axes) * heads
    return jnp.take(x, (first + jnp.arange(0, heads, run)) // group, axis=2)
