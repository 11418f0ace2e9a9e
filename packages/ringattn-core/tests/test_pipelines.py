# SPDX-License-Identifier: Apache-2.0
"""A pipeline is manual over its own axis, scans microbatches and layers, and calls the ring over the other axes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ringattn_core import remat_policy, ring_attention

STAGES, MICROBATCHES, LAYERS = 2, 2, 2
WHOLE = {"batch_axis_name": (), "head_axis_name": ()}


def arrays() -> tuple[jax.Array, ...]:
    """The weights of each layer of each stage; then queries, keys and values of the microbatches."""
    shapes = (STAGES, LAYERS, 8, 8), *((MICROBATCHES, 2, 16, heads, 8) for heads in (4, 2, 2))
    return tuple(jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(shapes))


def stage(weights: jax.Array, x: jax.Array, key: jax.Array, value: jax.Array, policy: Any, **named: Any) -> jax.Array:
    """Layers with weights of their own. All of them attend to the same keys, which are constants of the scan."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return ring_attention(0.3 * x @ w, key, value, causal=True, **named), None

    body = layer if policy is None else jax.checkpoint(layer, policy=policy)
    return jax.lax.scan(body, x, weights)[0]


def pipeline(mesh: Any, policy: Any, check_vma: bool) -> Any:
    """Every microbatch goes through the stages; a stage passes it on to the next rank of the axis `pp`."""

    def of_rank(weights: jax.Array, x: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        rank = jax.lax.axis_index("pp")

        def tick(carry: Any, time: jax.Array) -> Any:
            arrived, done = carry
            now = jnp.clip(time - rank, 0, MICROBATCHES - 1)
            given = jnp.where(rank == 0, x[now], arrived)
            made = stage(weights[0], given, keys[now], values[now], policy, axis_name="sp", **WHOLE)
            last = (rank == STAGES - 1) & (time >= rank)
            return (jax.lax.ppermute(made, "pp", [(0, 1)]), jnp.where(last, done.at[now].set(made), done)), None

        start = (jnp.zeros_like(x[0]), jnp.zeros_like(x))
        if check_vma:
            start = jax.lax.pcast(start, "pp", to="varying")
        done = jax.lax.scan(tick, start, jnp.arange(MICROBATCHES + STAGES - 1))[0][1]
        return jax.lax.psum(jnp.where(rank == STAGES - 1, done, 0), "pp")

    in_specs = (P("pp"), P(), P(), P())
    return jax.shard_map(of_rank, mesh=mesh, in_specs=in_specs, out_specs=P(), axis_names={"pp"}, check_vma=check_vma)


def without_pipeline(weights: jax.Array, x: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    for number in range(STAGES):
        x = jax.vmap(lambda *each, number=number: stage(weights[number], *each, None))(x, keys, values)
    return x


def gradients(function: Any) -> Any:
    return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(function(*x))), (0, 1, 2, 3)))


def mesh_of(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((STAGES, 4), ("pp", "sp"), axis_types=(kind, kind))


@pytest.mark.parametrize(
    ("kind", "policy", "check_vma"),
    [
        (AxisType.Auto, None, True),
        (AxisType.Auto, remat_policy(), False),
        (AxisType.Explicit, remat_policy(), True),
    ],
)
def test_a_pipeline_with_scans_and_checkpoints_has_the_gradients_of_one_device(
    kind: AxisType, policy: Any, check_vma: bool
) -> None:
    mesh = mesh_of(kind)
    weights, *x = arrays()
    with jax.set_mesh(mesh):
        # `jax.shard_map` takes explicit arrays only in the sharding that its `in_specs` name.
        placed = jax.device_put(weights, P("pp")), *(jax.device_put(array, P(None, None, "sp")) for array in x)
        found = gradients(pipeline(mesh, policy, check_vma))(*placed)
    for mine, wanted in zip(
        jax.tree.leaves(found), jax.tree.leaves(gradients(without_pipeline)(*arrays())), strict=True
    ):
        np.testing.assert_allclose(mine, wanted, atol=2e-5 * float(1 + jnp.abs(wanted).max()))
