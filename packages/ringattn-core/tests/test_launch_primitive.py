# SPDX-License-Identifier: Apache-2.0
"""A kernel launch is one operation of a JAX program: eager, jitted and sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ringattn_core.contract.launch import Interpreter, launch_primitive
from ringattn_core.contract.varying import align, axes_of

X = jnp.arange(8, dtype=jnp.float32)
INTERPRETER = Interpreter("RINGATTN_MADE_UP_INTERPRET", "Mosaic", "TPU", "jax[tpu]", values=("1", "simulate"))


def on_cpu(x: jax.Array, y: jax.Array, factor: int) -> list[jax.Array]:
    INTERPRETER.check("sums")
    assert axes_of(x, y) == frozenset()
    return [x * factor + y, x - y]


SUMS = launch_primitive("made_up_launch", lambda x, y, factor: [x, x], {"cpu": on_cpu})


def sums(x: jax.Array, y: jax.Array) -> jax.Array:
    first, second = SUMS.bind(x, y, factor=3)
    assert axes_of(first, second) == frozenset()
    return align(first + second, axes_of(x, y))


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(INTERPRETER.variable, "1")


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_a_launch_sees_no_mesh_and_its_results_are_aligned_with_all_operands(wrap, check_vma):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("ring",))

    def shard(x, y):
        found = sums(x, y)
        assert axes_of(found) == axes_of(sums(y, x)) == ({"ring"} if check_vma else set())
        return found

    run = wrap(jax.shard_map(shard, mesh=mesh, in_specs=(P("ring"), P()), out_specs=P("ring"), check_vma=check_vma))
    np.testing.assert_array_equal(run(X, jnp.ones(4, jnp.float32)), 4 * X)


def test_a_cpu_without_the_variable_is_told_what_to_do(monkeypatch):
    monkeypatch.delenv(INTERPRETER.variable)
    with pytest.raises(RuntimeError, match=r"kernel sums was launched on a CPU.*set RINGATTN_MADE_UP_INTERPRET=1"):
        jax.jit(lambda x: sums(x, x) + 1)(X)
