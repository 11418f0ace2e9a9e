# SPDX-License-Identifier: Apache-2.0
"""Reads and changes over which mesh axes values vary, as `shard_map(check_vma=True)` tracks."""

from typing import Any

import jax

from ..placement.axes import varying


def axes_of(*trees: Any) -> frozenset[str]:
    """The mesh axes that any array in `trees` varies over; empty under `check_vma=False`."""
    return frozenset().union(*map(varying, jax.tree.leaves(trees)))


def align(tree: Any, axes: frozenset[str]) -> Any:
    """Marks the arrays in `tree` as varying over all of `axes`; their values stay the same.

    Done before a `custom_vjp`, this makes JAX sum the gradient of a replicated input over the ring.
    """

    def spread(leaf: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - varying(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(spread, tree)
