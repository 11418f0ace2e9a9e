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


def results(layers: Callable[..., Any], weights: Any, x: jax.Array, positions: jax.Array, **ring: Any) -> Any:
    """The output of the layers, an array or several, and the gradients of a loss in their weights and input."""

    def loss(weights: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        out = layers(weights, x, positions, **ring)
        return sum((jnp.sum(jnp.sin(array)) for array in jax.tree.leaves(out)), jnp.zeros(())), out

    (_, out), (dweights, dx) = jax.value_and_grad(loss, (0, 1), has_aux=True)(weights, x)
    return out, dx, dweights


def compare(
    layers: Callable[..., Any],
    shapes: Mapping[str, tuple[int, ...]],
    mesh: dict[str, int],
    layout: str,
    tolerance: float = 1e-4,
    dense: Callable[..., Any] | None = None,
    **ring: Any,
) -> None:
    """Ends with status 1 unless both results agree. `layers` is called with weights, input, positions and the ring.

    On one device, `dense` computes in float64 in place of `layers`.
    """
    *keys, last = jax.random.split(jax.random.key(0), len(shapes) + 1)
    weights = {name: jax.random.normal(key, shapes[name]) / WIDTH**0.5 for name, key in zip(shapes, keys, strict=True)}
    x, positions = jax.random.normal(last, (BATCH, LENGTH, WIDTH)), jnp.arange(LENGTH)[None]
    with jax.enable_x64(dense is not None):
        inputs = jax.tree.map(lambda array: array.astype(float), (weights, x))  # float32 without 64 bits
        one = jax.jit(functools.partial(results, dense or layers))(*inputs, positions)

    devices = jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=(jax.sharding.AxisType.Auto,) * len(mesh))
    ring |= {"mesh": devices, "axis_name": "sp", "layout": layout}
    reordered = (to_layout(array, layout, mesh["sp"]) for array in (x, positions))
    out, dx, dweights = jax.jit(functools.partial(results, layers, **ring))(weights, *reordered)
    out, dx = jax.tree.map(lambda array: from_layout(array, layout, mesh["sp"]) if array.ndim else array, (out, dx))

    pairs = list(zip(*map(jax.tree.leaves, (one, (out, dx, dweights))), strict=True))
    # A weight that only makes choices has the gradient 0.
    errors = [np.abs(got - want).max() / (np.abs(want).max() or 1) for want, got in map(jax.device_get, pairs)]
    if not max(errors) < tolerance:
        sys.exit(f"the results on {mesh} differ from those of one device by {max(errors):.1e}")
    arrays = f"the output and {len(jax.tree.leaves((dx, dweights)))} gradients"
    exact = " with dense masks in float64" if dense else ""
    print(f"on {mesh}, {arrays} equal those of one device{exact} within {max(errors):.1e}")
