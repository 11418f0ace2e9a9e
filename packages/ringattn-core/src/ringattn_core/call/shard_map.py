# SPDX-License-Identifier: Apache-2.0
"""Checks a call inside the caller's own `shard_map`: its tokens are sharded, and it names the axes that matter."""

from collections.abc import Mapping
from typing import Any

import jax

from ..contract.call import Call
from ..errors import InputError
from ..placement import axes

_OF_TOKENS = ("query", "key", "value", "q_positions", "kv_positions")


def refuse_replicated(call: Call, given: Mapping[str, Any] | None = None) -> None:
    """Raises if tokens are replicated over the ring: each rank would take them for its own shard.

    Checks the arrays `given` by the names of their arguments; by default all arrays of tokens in the call.

    JAX tracks this under `check_vma=True` only. Segment ids are not checked: a constant id on all ranks is usual.
    """
    tracked = _tracked(call)
    for argument, x in (given or {name: getattr(call, name) for name in _OF_TOKENS}).items():
        missing = () if x is None else tuple(sorted(tracked - axes.varying(x)))
        if missing:
            raise InputError(
                argument,
                f"is replicated over {missing}, over which axis_name={call.axis_name} spreads the sequence",
                "Shard its length over the ring in in_specs, or compute it from jax.lax.axis_index",
            )


def refuse_sharded(call: Call, given: Mapping[str, Any]) -> None:
    """Raises if arrays that all ranks of the ring must have alike differ between them, as far as JAX tracks that."""
    for argument, x in given.items():
        over = tuple(sorted(_tracked(call) & axes.varying(x)))
        if over:
            raise InputError(
                argument,
                f"differs between the ranks of {over}, but all ranks of axis_name={call.axis_name} need the same",
                "Do not shard it over the ring in in_specs",
            )


def _tracked(call: Call) -> frozenset[str]:
    """The axes of the ring for which JAX tracks which arrays vary over them."""
    ring = {name for name in call.axis_name or () if axes.size("axis_name", (name,)) > 1}
    return axes.tracked() & ring if ring else frozenset()


def refuse_unnamed_axes(call: Call) -> None:
    """Raises for dropout, or masks that differ between heads, if the call does not name the axes that split these.

    Both need the global indices of batch rows or heads. Under `check_vma=False` JAX does not say over which axes the
    query varies; then any axis of the mesh that the call does not name may split it.
    """
    of_heads = call.mask_builder is not None and len(call.mask_builder.masks) > 1
    unsaid = [name for name in ("batch_axis_name", "head_axis_name") if getattr(call, name) is None]
    asked = "dropout_prob" if call.dropout_prob else "mask_builder"
    if not unsaid or not (call.dropout_prob or (of_heads and "head_axis_name" in unsaid)):
        return
    split = axes.varying(call.query) if axes.tracked() else axes.manual()
    named = {*(call.axis_name or ()), *(call.batch_axis_name or ()), *(call.head_axis_name or ())}
    over = tuple(name for name in sorted(split - named) if jax.lax.axis_size(name) > 1)
    if over:
        raise InputError(
            asked,
            f"needs the global indices of batch and heads, and the mesh axes {over} may split them",
            f"Name the axes that split them in {' and '.join(unsaid)}; () means none",
        )
