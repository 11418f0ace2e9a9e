# SPDX-License-Identifier: Apache-2.0
"""Over which mesh axes values vary, as `shard_map(check_vma=True)` tracks it."""

from typing import Any

import jax


def axes_of(*trees: Any) -> frozenset[str]:
    """The mesh axes that any array in `trees` varies over; empty under `check_vma=False`."""
    found = (jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(trees))
    return frozenset().union(*found)


def align(tree: Any, axes: frozenset[str]) -> Any:
    """Marks the arrays in `tree` as varying over all of `axes`; their values stay the same.

    Done before a `custom_vjp`, this makes JAX sum the gradient of a replicated input over the ring.
    """

    def spread(leaf: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - axes_of(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(spread, tree)
