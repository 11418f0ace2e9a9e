# SPDX-License-Identifier: Apache-2.0
"""Promises on a bias in the one-pass backward kernel for Hopper: its gradient, which is kept in strips of keys."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ringattn_core import ring_attention
from ringattn_core.contract.protocol import Block, Gradients
from ringattn_testing.exhaustive import in_tests
from ringattn_testing.triton.compile_reports import launches
from ringattn_testing.triton.given_blocks import after_bias_sums, bias, forbidding, make_block, with_option
from ringattn_testing.triton.given_blocks import half_bias as half
from ringattn_testing.triton.one_pass import HALF, computed, gradients, launched, prepared, within_budget
from ringattn_triton import block_kernel
from ringattn_triton.hopper import backward as one_pass
from ringattn_triton.launch.target import Target

OPTIONS = (
    "plain", "causal", "window", "causal segments", "padding", "positions", "ranges of heads in segments",
    "masks of heads", "negative scale",
)  # fmt: skip


def with_bias(option: str, *shape: int, **fields: Any) -> Block:
    """Ragged tiles, grouped heads and a bias of this shape."""
    return with_option(option, 200, 264, **{"dim": 128, "dtype": HALF, "bias": half(*shape, 200, 264), **fields})


@pytest.fixture
def short_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips of one tile of keys each, however few turns that makes; in order only where the caller wants it."""
    monkeypatch.setattr(one_pass.plans, "PROGRAMS", 3)
    monkeypatch.setattr(one_pass, "_TURNS_IN_STRIP", 0)
    monkeypatch.setattr(one_pass.bias_gradient, "MOST_STRIPS", 99)
    monkeypatch.setattr(one_pass.turn_order, "enough_heads", lambda *_: False)


def equal(got: Gradients, want: Gradients) -> None:
    """Both have the same gradients, bit by bit."""
    for field in dataclasses.fields(want):
        found, right = getattr(got, field.name), getattr(want, field.name)
        assert (found is None) == (right is None), field.name
        if right is not None:
            np.testing.assert_array_equal(found, right, field.name)


@pytest.mark.parametrize(
    ("option", "ordered"), [(option, True) for option in OPTIONS] + [("plain", False), ("causal segments", False)]
)
def test_a_bias_goes_with_every_mask(option: str, ordered: bool) -> None:
    computed(with_bias(option, 1, 1), ordered)


@pytest.mark.parametrize(
    ("shape", "ordered"), [((2, 4), True), ((2, 1), False), ((1, 4), True), ((1, 1), True), ((1, 1), False)], ids=str
)
def test_its_gradient_is_summed_over_heads_and_batch_rows_that_share_it(
    shape: tuple[int, int], ordered: bool, short_strips: None
) -> None:
    computed(with_bias("causal segments", *shape), ordered)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=str)
def test_any_grouping_of_heads_is_right_in_strips(heads: tuple[int, int], short_strips: None) -> None:
    given: dict[str, Any] = {"heads": heads[0], "kv_heads": heads[1], "causal": True}
    computed(with_bias("causal", 1, 1, **given))


@pytest.mark.parametrize("dims", [(96, 96), (72, 120)], ids=str)
def test_smaller_heads_are_filled_up(dims: tuple[int, int]) -> None:
    computed(with_bias("causal", 1, 4, dim=dims[0], value_dim=dims[1]))


def test_whole_tiles_are_right_without_a_mask() -> None:
    computed(make_block(1, 128, 256, dim=128, dtype=HALF, bias=half(1, 2, 128, 256)))


def test_strips_change_no_bit_of_any_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    block = with_bias("causal", 1, 1)
    rows = prepared(block)
    whole = gradients(block, *rows)
    monkeypatch.setattr(one_pass.plans, "PROGRAMS", 8)
    monkeypatch.setattr(one_pass, "_TURNS_IN_STRIP", 2)
    assert one_pass._strips(block, _constants(block)["T"]).rows == 2  # so the last one has fewer
    equal(gradients(block, *rows), whole)


def _constants(block: Block) -> dict[str, Any]:
    """The constants of a block's launch."""
    rows = jax.ShapeDtypeStruct((len(block.q), block.q.shape[2], block.q_length), jnp.float32)
    program = jax.make_jaxpr(lambda *x: one_pass.backward(*x, None))(block, block.q, rows, rows)
    return next(dict(call.constants) for call, _ in launches(program.jaxpr) if call.name == "ringattn_hopper_backward")


def test_no_strip_is_kept_before_the_one_before_it_is_summed(short_strips: None) -> None:
    """Otherwise ds of two strips would be in memory at once."""
    block = with_bias("causal", 1, 1)
    program = jax.make_jaxpr(lambda *x: one_pass.backward(*x, None))(block, *prepared(block))
    assert after_bias_sums(program.jaxpr, "ringattn_hopper_backward") == [False, True, True]


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
def test_dq_continues_what_other_keys_gave(ordered: bool, short_strips: None) -> None:
    block = with_bias("causal", 1, 4, fused_backward=not ordered)
    assert _constants(block)["PLAN"].ordered == ordered
    rows = prepared(block)
    whole = gradients(block, *rows)
    dq, parts = None, []
    for start, size in ((128, 136), (0, 128)):
        got = gradients(block.tile(0, 200, start, size), *rows, dq=dq)
        dq, parts = got.dq, [got.dbias, *parts]
    np.testing.assert_allclose(dq, whole.dq, atol=1e-5)
    np.testing.assert_array_equal(jnp.concatenate(parts, -1), whole.dbias)


def test_strips_are_traced_in_a_ring_that_checks_what_varies(
    short_strips: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_kernel, "target", lambda: Target("cuda", 90))
    strips: list[int] = []
    usual = one_pass._launch_kernel

    def counted(*given: Any) -> tuple[jax.Array, ...]:
        strips.append(given[3].strip_rows)
        return usual(*given)

    monkeypatch.setattr(one_pass, "_launch_kernel", counted)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("ring",))
    rows, columns = P(None, "ring"), P(None, None, "ring")

    def gradients(q: jax.Array, bias: jax.Array) -> tuple[jax.Array, ...]:
        def attended(q: jax.Array, bias: jax.Array) -> jax.Array:
            return ring_attention(q, q, q, None, bias, axis_name="ring", fused_backward=True, backend="triton")

        out, pullback = jax.vjp(attended, q, bias)
        return pullback(out)

    ring = jax.shard_map(gradients, mesh=mesh, in_specs=(rows, columns), out_specs=(rows, columns), check_vma=True)
    shapes = (1, 512, 2, 128), (1, 1, 512, 512)
    dq, dbias = jax.eval_shape(ring, *(jax.ShapeDtypeStruct(shape, HALF) for shape in shapes))
    assert (dq.shape, dbias.shape) == shapes and set(strips) == {1}


def test_a_bias_may_forbid_pairs_and_whole_rows() -> None:
    got = computed(with_bias("plain", 2, 4, bias=jnp.asarray(forbidding(2, 4, 200, 264), HALF)))
    assert got.dbias is not None and not np.asarray(got.dbias)[..., ::3, :].any()


def test_a_bias_without_a_gradient_keeps_no_ds() -> None:
    block = with_bias("causal", 1, 1)
    fixed = dataclasses.replace(block, bias_fixed=True)
    assert "ringattn_bias_sums" in launched(block) and "ringattn_bias_sums" not in launched(fixed)
    got = computed(fixed)
    assert got.dbias is None
    equal(got, dataclasses.replace(computed(block), dbias=None))


def test_a_fixed_bias_in_float16_is_right() -> None:
    added = jnp.asarray(bias(1, 1, 200, 264), jnp.float16)
    computed(dataclasses.replace(with_bias("causal", 1, 1, dtype=jnp.float16, bias=added), bias_fixed=True))


def test_a_final_block_has_gradients_in_the_dtype_of_its_inputs(short_strips: None) -> None:
    final = computed(dataclasses.replace(with_bias("causal", 1, 1), final=True))
    assert {x.dtype for x in jax.tree.leaves(final)} == {jnp.dtype(HALF)}


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("another dtype", {"bias": bias(1, 2, 200, 200)}),
        ("rows that are not of whole 16 bytes", {"kv_length": 204, "bias": half(1, 2, 200, 204)}),
        ("one row for all queries", {"bias": half(1, 2, 1, 200)}),
        ("a soft cap", {"logits_soft_cap": 3.0}),
        ("slopes", {"slopes": np.array([[0.5, 0.1]], np.float32)}),
        ("dropout", {"dropout_prob": 0.1, "seed": np.array([5], np.uint32)}),
        ("heads of 64", {"dim": 64}),
        ("heads of 256", {"dim": 256}),
        ("a gradient in float16", {"dtype": jnp.float16, "bias": jnp.asarray(bias(1, 2, 200, 200), jnp.float16)}),
    ],
)
def test_other_biases_take_two_passes(case: str, fields: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"q_length": 200, "kv_length": 200, "dim": 128, "dtype": HALF, "fused_backward": True}
    usual["bias"] = half(1, 2, 200, 200)
    assert "ringattn_hopper_backward" in launched(make_block(1, **usual))
    assert "ringattn_backward_keys" in launched(make_block(1, **(usual | fields))), case


COMPILED: list[tuple[str, dict[str, Any]]] = [
    *((option, {}) for option in ("plain", "ranges of heads in segments", "dense mask")),
    ("causal segments", {}),
    ("causal segments", {"fused_backward": True}),
    ("plain", {"final": False}),
    ("plain", {"dim": 72, "final": False}),
    ("causal segments", {"dim": 72}),
    ("causal segments", {"dim": 96}),
    ("causal segments", {"bias_fixed": True, "dtype": jnp.float16}),
]


@pytest.mark.parametrize(
    ("option", "fields"),
    # Heads of 128 with masks (ranges in segments stand for causal segments), a hop of a ring with other heads, and a
    # bias without a gradient.
    in_tests(lambda option, fields: len(fields) == 2 or (not fields and option != "causal segments"), COMPILED),
)
def test_it_compiles_fits_and_spills_no_more_than_its_budget(option: str, fields: dict[str, Any]) -> None:
    length = 1000 if "segments" in option else 1024
    given: dict[str, Any] = {"dim": 128, "dtype": HALF, "final": True} | fields
    fixed = given.pop("bias_fixed", False)
    block = with_option(option, length, length, **given)
    added = jnp.zeros((1, 1, length, length), block.q.dtype)
    block = dataclasses.replace(block, bias=added, bias_fixed=fixed)
    found = within_budget(block, " with a bias" if option == "plain" else " with a bias and masks")
    assert fixed != ("ringattn_bias_sums" in found) and (fixed or found["ringattn_bias_sums"].spilled == 0)
