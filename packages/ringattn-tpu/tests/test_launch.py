# SPDX-License-Identifier: Apache-2.0
"""A kernel is one operation of a JAX program: jitted, sharded, in a loop, in a derivative, on a CPU or for a TPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from ringattn_tpu import launch as launching
from ringattn_tpu import steps as listing
from ringattn_tpu.launch import At, Grid, Operand, Step, launch
from ringattn_tpu.steps import FIRST, IDLE, LAST
from tpu_blocks import make_block

TILE, TILES, HEADS = 128, 3, 2
LENGTH = TILE * TILES


def steps(every_own: bool = False, **options: Any) -> listing.Steps:
    options = {"q_length": LENGTH, "kv_length": LENGTH, **options}
    return listing.steps(make_block(**{"batch": 1, **options}), TILE, TILE, every_own=every_own)


def summed(step: Step, inputs: Any, outputs: Any, scratch: Any) -> None:
    """Adds up the tiles that visit; an own tile that nothing visits is 0."""

    @launching.pl.when(step.has(FIRST))
    def _():
        scratch["total"][...] = jnp.zeros_like(scratch["total"])

    @launching.pl.when(~step.has(IDLE))
    def _():
        scratch["total"][...] += inputs["x"][...]

    @launching.pl.when(step.has(LAST))
    def _():
        outputs["y"][...] = scratch["total"][...]


def own(at: At) -> Any:
    return at.batch, at.head, 0, at.own


def sums(x: jax.Array, given: listing.Steps, before: jax.Array | None = None) -> jax.Array:
    """For each own tile the sum of the tiles of `x [B, N, 8, T]` that visit it; where none does, what was `before`."""
    tile = (None, None, 8, TILE)
    inputs = {"x": Operand(x, tile, lambda at: (at.batch, at.head, 0, at.visiting))}
    if before is not None:
        inputs["y"] = Operand(before)
    return launch(
        summed,
        given,
        Grid(x.shape[0], x.shape[1]),
        inputs,
        {"y": Operand(jax.ShapeDtypeStruct(x.shape, x.dtype), tile, own)},
        scratch={"total": pltpu.VMEM((8, TILE), jnp.float32)},
        name="summed",
    )["y"]


def expected(x: Any, sees: Any) -> np.ndarray:
    """The same by NumPy; `sees[own, visiting]`, for all rows or each."""
    cut = np.asarray(x).reshape(*x.shape[:3], TILES, TILE)
    sees = np.broadcast_to(np.asarray(sees, np.float32), (x.shape[0], TILES, TILES))
    return np.einsum("bov,bnsvt->bnsot", sees, cut).reshape(x.shape)


TRIANGLE = np.tril(np.ones((TILES, TILES)))


@pytest.fixture
def x() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(-9, 9, (1, HEADS, 8, LENGTH)), jnp.float32)


def test_one_traced_program_is_interpreted_here_and_compiled_for_a_tpu(x):
    traced = jax.jit(lambda x: sums(x, steps(causal=True)) * 3).trace(x)
    np.testing.assert_array_equal(traced.lower().compile()(x), 3 * expected(x, TRIANGLE))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text and 'kernel_name = "summed"' in text
    assert "tpu_custom_call" not in traced.lower().as_text()


def test_an_alias_is_one_buffer_of_the_program_for_a_tpu(x):
    traced = jax.jit(lambda x, before: sums(x, steps(causal=True), before)).trace(x, x)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    (line,) = [line for line in text.splitlines() if "@tpu_custom_call" in line]
    assert "output_operand_alias<output_tuple_indices = [], operand_index = 3" in line
