# SPDX-License-Identifier: Apache-2.0
"""The check of every recipe: on a mesh of eight CPU devices, layers give the output and gradients of one device."""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ringattn_core import from_layout, to_layout

jax.config.update("jax_num_cpu_devices", 8)
BATCH, LENGTH, WIDTH = 2, 256, 32


def results(layers: Callable[..., jax.Array], weights: Any, x: jax.Array, positions: jax.Array, **ring: Any) -> Any:
    """The output of the layers, and the gradients of a loss in their weights and input."""

    def loss(weights: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = layers(weights, x, positions, **ring)
        return jnp.sum(jnp.sin(out)), out

    (_, out), (dweights, dx) = jax.value_and_grad(loss, (0, 1), has_aux=True)(weights, x)
    return out, dx, dweights


def compare(
    layers: Callable[..., jax.Array],
    shapes: Mapping[str, tuple[int, ...]],
    mesh: dict[str, int],
    layout: str,
    tolerance: float = 1e-4,
    **ring: Any,
) -> None:
    """Ends with status 1 unless both results agree. `layers` is called with weights, input, positions and the ring."""
    *keys, last = jax.random.split(jax.random.key(0), len(shapes) + 1)
    weights = {name: jax.random.normal(key, shapes[name]) / WIDTH**0.5 for name, key in zip(shapes, keys, strict=True)}
    x, positions = jax.random.normal(last, (BATCH, LENGTH, WIDTH)), jnp.arange(LENGTH)[None]
    one = jax.jit(functools.partial(results, layers))(weights, x, positions)

    devices = jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=(jax.sharding.AxisType.Auto,) * len(mesh))
    ring |= {"mesh": devices, "axis_name": "sp", "layout": layout}
    reordered = (to_layout(array, layout, mesh["sp"]) for array in (x, positions))
    out, dx, dweights = jax.jit(functools.partial(results, layers, **ring))(weights, *reordered)
    many = *(from_layout(array, layout, mesh["sp"]) for array in (out, dx)), dweights

    pairs = list(zip(*map(jax.tree.leaves, (one, many)), strict=True))
    errors = [np.abs(got - want).max() / np.abs(want).max() for want, got in pairs]
    if not max(errors) < tolerance:
        sys.exit(f"the results on {mesh} differ from those of one device by {max(errors):.1e}")
    print(f"on {mesh}, the output and {len(pairs) - 1} gradients equal those of one device within {max(errors):.1e}")
