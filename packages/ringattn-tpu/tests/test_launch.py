# SPDX-License-Identifier: Apache-2.0
"""A kernel is one operation of a JAX program: jitted, sharded, in a loop, in a derivative, on a CPU or for a TPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
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


def test_each_batch_row_makes_the_steps_of_its_own_list():
    x = jnp.asarray(np.random.default_rng(1).integers(-9, 9, (2, HEADS, 8, LENGTH)), jnp.float32)
    documents = np.int32([[0] * LENGTH, [0] * TILE + [1] * TILE + [2] * TILE])
    given = steps(batch=2, q_segments=documents, kv_segments=documents)
    assert given.rows == 2 and int(given.length) == TILES**2 + TILES
    np.testing.assert_array_equal(sums(x, given), expected(x, [np.ones((TILES, TILES)), np.eye(TILES)]))


def test_one_list_serves_every_batch_row():
    x = jnp.asarray(np.random.default_rng(1).integers(-9, 9, (2, HEADS, 8, LENGTH)), jnp.float32)
    given = steps(batch=2, causal=True)
    assert given.rows == 1
    np.testing.assert_array_equal(sums(x, given), expected(x, TRIANGLE))


def test_an_own_tile_without_steps_keeps_what_the_aliased_input_held(x):
    late = np.arange(LENGTH, dtype=np.int32)[None] + TILE
    before = jnp.full_like(x, 7)
    given = steps(causal=True, kv_positions=late)
    kept = jax.jit(lambda x, before: sums(x, given, before))(x, before)
    want = expected(x, np.tril(np.ones((TILES, TILES)), -1))
    want[..., :TILE] = 7
    np.testing.assert_array_equal(kept, want)
    np.testing.assert_array_equal(before, jnp.full_like(x, 7))


def test_an_idle_step_writes_and_visits_nothing(x):
    late = np.arange(LENGTH, dtype=np.int32)[None] + LENGTH
    given = steps(every_own=True, causal=True, kv_positions=late)
    np.testing.assert_array_equal(sums(x, given, jnp.full_like(x, 7)), jnp.zeros_like(x))


@pytest.mark.parametrize("members_inside", [False, True])
def test_members_of_a_group_come_inside_the_steps_or_round_them(members_inside: bool):
    """Each writes the order in which it came to its own place."""
    members = 3
    given = steps(causal=True)

    def kernel(step: Step, inputs: Any, outputs: Any, scratch: Any) -> None:
        @launching.pl.when((step.at.own == 0) & (step.at.member == 0))
        def _():
            scratch["clock"][0] = 0

        scratch["clock"][0] += 1
        outputs["came"][...] = jnp.full((8, TILE), scratch["clock"][0])
        assert step.members == members

    found = launch(
        kernel,
        given,
        Grid(1, 1, members, members_inside),
        {},
        {
            "came": Operand(
                jax.ShapeDtypeStruct((TILES, TILES, members, 8, TILE), jnp.int32),
                (None, None, None, 8, TILE),
                lambda at: (at.own, at.visiting, at.member, 0, 0),
            )
        },
        scratch={"clock": pltpu.SMEM((1,), jnp.int32)},
        name="clocked",
    )["came"][..., 0, 0]
    places = [(own, visiting) for own in range(TILES) for visiting in range(own + 1)]
    order = [(*place, m) for place in places for m in range(members)]
    if not members_inside:
        order = [(*place, m) for m in range(members) for place in places]
    came = [int(found[place]) for place in order]
    assert came[-1] > 0 and came == sorted(came)


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_ring_of_launches_and_permutes_runs(check_vma: bool):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("ring",))
    whole = jnp.asarray(np.random.default_rng(2).integers(-9, 9, (1, HEADS, 8, 4 * LENGTH)), jnp.float32)

    def shard(x):
        def step(_, carry):
            total, x = carry
            return total + sums(x, steps()), jax.lax.ppermute(x, "ring", [(i, (i + 1) % 4) for i in range(4)])

        return jax.lax.fori_loop(0, 4, step, (jnp.zeros_like(x), x))[0]

    split = P(None, None, None, "ring")
    ring = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=split, out_specs=split, check_vma=check_vma))
    every = np.asarray(whole).reshape(1, HEADS, 8, -1, TILE).sum(3)
    np.testing.assert_array_equal(ring(whole), np.tile(every, (1, 1, 1, 4 * TILES)))


def test_outputs_vary_over_the_mesh_axes_of_the_inputs_and_of_the_steps():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("ring",))

    def varies(x: jax.Array) -> frozenset[str]:
        return jax.typeof(x).manual_axis_type.varying

    def shard(x, documents):
        here = steps(q_segments=documents, kv_segments=documents)
        fixed = jnp.ones((1, HEADS, 8, LENGTH), jnp.float32)
        assert varies(sums(fixed, steps())) == frozenset()
        assert varies(sums(x, steps())) == varies(sums(fixed, here)) == {"ring"}
        return sums(x, here)

    specs = (P(None, None, None, "ring"), P(None, "ring"))
    run = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=specs[0]))
    x = jnp.ones((1, HEADS, 8, 2 * LENGTH), jnp.float32)
    together, apart = jnp.zeros(LENGTH, jnp.int32), jnp.arange(LENGTH, dtype=jnp.int32) // TILE
    found = run(x, jnp.concatenate([together, apart])[None])
    np.testing.assert_array_equal(found, jnp.where(jnp.arange(2 * LENGTH) < LENGTH, TILES * x, x))


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
