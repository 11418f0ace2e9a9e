# SPDX-License-Identifier: Apache-2.0
"""A tie gives back its array: on a TPU by a kernel that only orders sends."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ringattn_core.contract.ordering import tie


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("token", [P(None, "ring"), P()], ids=["sharded token", "replicated token"])
def test_a_tie_of_shards_is_one_kernel_on_a_tpu(token, check_vma: bool):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("ring",))
    x = jnp.arange(256, dtype=jnp.float32).reshape(1, 8, 2, 16)
    specs = (P(None, "ring"), token)
    tied = jax.jit(jax.shard_map(tie, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=check_vma))
    np.testing.assert_array_equal(tied(x, x), x)
    assert tied.trace(x, x).lower(lowering_platforms=("tpu",)).as_text().count("@tpu_custom_call") == 1


def test_a_tie_of_vmapped_arrays_keeps_their_axis():
    x = jnp.arange(768, dtype=jnp.float32).reshape(1, 8, 2, 3, 16)
    np.testing.assert_array_equal(jax.vmap(tie, (3, None), 3)(x, jnp.ones(1)), x)


def test_a_program_with_a_tie_exports_for_several_platforms_at_once():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("ring",))
    x = jnp.ones((1, 8, 2, 16))
    tied = jax.jit(jax.shard_map(tie, mesh=mesh, in_specs=(P(None, "ring"),) * 2, out_specs=P(None, "ring")))
    assert set(jax.export.export(tied, platforms=["cpu", "cuda", "tpu"])(x, x).platforms) == {"cpu", "cuda", "tpu"}


def test_where_xla_partitions_an_axis_a_tie_is_a_barrier():
    mesh = jax.make_mesh((2, 2), ("data", "ring"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x, spec = jnp.ones((2, 8, 2, 16)), P(None, "ring")
    tied = jax.jit(jax.shard_map(tie, mesh=mesh, in_specs=(spec, spec), out_specs=spec, axis_names={"ring"}))
    assert "@tpu_custom_call" not in tied.trace(x, x).lower(lowering_platforms=("tpu",)).as_text()
