# SPDX-License-Identifier: Apache-2.0
"""Promises on the kernels for Hopper: which blocks they take, and that their results are those of the XLA backend."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ringattn_xla.block
from ringattn_core import ring_attention
from ringattn_core.config import FwdParams
from ringattn_core.contract.protocol import Block, Partial
from ringattn_core.contract.visibility import visible
from ringattn_testing.triton.compile_reports import launches
from ringattn_testing.triton.given_blocks import (
    OPTIONS,
    SEEDS,
    SLOPES,
    TOLERANCE,
    bias,
    forbidding,
    half_bias,
    make_block,
    mask_in_tiles,
    near,
    spreads_nan,
    with_option,
)
from ringattn_triton.block_kernel import _forward
from ringattn_triton.hopper import family, forward, plans
from ringattn_triton.launch import compiling_for
from ringattn_triton.launch.target import Target

NAN = float("nan")
TARGET = Target("cuda", 90)
DIMS = (64, 128)
HALF = jnp.bfloat16
DROPPED: dict[str, Any] = {"dropout_prob": 0.3, "seed": SEEDS}
# The kernel does not take the first two; the third is bits, like any other mask.
LEFT_OUT = ("bias", "all at once", "mask of the algebra")
CASES = [(option, 128) for option in OPTIONS if option not in LEFT_OUT] + [
    (option, 64) for option in ("window", "causal segments", "masks of heads", "slopes", "negative scale")
]


@pytest.fixture(autouse=True)
def short_blocks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be slow on a device is right all the same, and a test cannot have long blocks."""
    monkeypatch.setattr(forward, "_too_little", lambda *_: False)


def traced(block: Block, partial: Partial | None = None, target: Target = TARGET) -> Any:
    """The forward program of a block, traced anew: tests change what it is traced from."""
    return jax.jit(lambda b, p: _forward.__wrapped__(b, p, target)).trace(block, partial)


def launched(program: Any) -> list[str]:
    """The names of what a traced program launches after its table."""
    table, *names = (call.name for call, _ in launches(program.jaxpr.jaxpr))
    assert table == "ringattn_table"
    return names


def computed(block: Block, partial: Partial | None = None) -> Any:
    """The result of the kernel for Hopper, if it is what is launched."""
    program = traced(block, partial)
    assert launched(program) == ["ringattn_hopper_forward"]
    return program.lower().compile()(block, partial)


def check(block: Block, case: str, partial: Partial | None = None) -> Any:
    """The result, if it is that of the XLA backend."""
    got, want = computed(block, partial), ringattn_xla.block.KERNEL.forward(block, partial)
    near(f"{case}: out", got.out, want.out, TOLERANCE[str(block.q.dtype)])
    near(f"{case}: lse", got.lse, want.lse, TOLERANCE["float32"])
    return got


def half(option: str, dim: int, q_length: int = 200, kv_length: int = 150, **fields: Any) -> Block:
    return with_option(option, q_length, kv_length, **{"dim": dim, "dtype": HALF, **fields})


@pytest.mark.parametrize(("option", "dim"), CASES)
def test_every_option_it_takes_is_right_in_ragged_tiles(option: str, dim: int) -> None:
    check(half(option, dim), option)


@pytest.mark.parametrize(
    ("option", "dim"), [("plain", 64), ("causal", 64), ("causal", 128), ("soft cap", 128), ("slopes", 64)]
)
def test_whole_tiles_are_right(option: str, dim: int) -> None:
    check(half(option, dim, 384, 256), option)


@pytest.mark.parametrize(("heads", "dim"), [((4, 4), 128), ((6, 2), 128), ((4, 1), 64)], ids=str)
def test_any_grouping_of_heads_in_float16(heads: tuple[int, int], dim: int) -> None:
    given: dict[str, Any] = {"heads": heads[0], "kv_heads": heads[1], "dtype": jnp.float16, "causal": True}
    check(make_block(2, 200, 140, dim=dim, **given), str(heads))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 4), HALF), ((2, 1), jnp.float16), ((1, 4), jnp.float16), ((1, 1), HALF)], ids=str
)
def test_a_bias_of_any_heads_and_rows_is_added(shape: tuple[int, int], dtype: Any) -> None:
    added = jnp.asarray(bias(*shape, 200, 152), dtype)
    check(half("causal", 128, 200, 152, bias=added, dtype=dtype), str(shape))


@pytest.mark.parametrize("option", ["plain", "segments", "scale of zero", "masks of heads"])
def test_a_bias_goes_with_every_other_option(option: str) -> None:
    added = half_bias(2, 4, 200, 264)
    check(half(option, 128, 200, 264, bias=added), option)


@pytest.mark.parametrize("kv_length", [152, 256])
def test_a_bias_may_forbid_pairs_and_whole_rows(kv_length: int) -> None:
    got = check(half("plain", 128, 200, kv_length, bias=jnp.asarray(forbidding(2, 4, 200, kv_length), HALF)), "some")
    assert np.isneginf(got.lse[..., ::3]).all() and np.isfinite(got.lse[..., 1::3]).all()


def test_a_bias_of_minus_90000_on_a_whole_row_allows_its_keys() -> None:
    low = np.where(np.arange(200) % 2, -9e4, 0.0)[:, None]
    block = make_block(
        2, 200, 152, dim=128, dtype=HALF, bias=jnp.broadcast_to(jnp.asarray(low, HALF), (2, 2, 200, 152))
    )
    near("out", computed(block).out, computed(dataclasses.replace(block, bias=None)).out, 2e-2)


def test_a_turn_that_sees_nothing_may_come_before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "PROGRAMS", 1)
    mask = np.arange(512)[None, None, :, None] // 128 % 2 == 0
    mask = np.broadcast_to(mask, (1, 1, 512, 256))
    block = make_block(1, 512, 256, heads=1, kv_heads=1, dim=128, dtype=HALF, mask=mask)
    check(block, "every other tile of queries sees nothing")


def test_whole_tiles_that_lie_here_and_there_are_all_visited() -> None:
    check(make_block(1, 512, 512, dim=128, dtype=HALF, mask=mask_in_tiles(512, 128)), "scattered")


@pytest.mark.parametrize("option", ["negative scale", "soft cap", "slopes", "segments", "plain"])
def test_the_largest_scores_of_continued_blocks_are_exact(option: str) -> None:
    """The kernel's own maxima are not: it updates them lazily, or with a soft cap has none."""
    block, partial = half(option, 128, 200, 300, return_max_logits=True), None
    for start, size in ((0, 172), (172, 128)):
        partial = computed(block.tile(0, 200, start, size), partial)
    assert partial is not None
    want = ringattn_xla.block.KERNEL.forward(block, None)
    near("max_logits", partial.max_logits, want.max_logits, TOLERANCE["float32"])
    near("out", partial.out, want.out, TOLERANCE["bfloat16"])


@pytest.mark.parametrize(("cap", "dtype"), [(0.5, HALF), (50.0, jnp.float16), (300.0, HALF), (300.0, jnp.float16)])
def test_capped_scores_at_both_ends_and_the_largest_values_are_right(cap: float, dtype: Any) -> None:
    """Some rows see nothing but the least score there can be, some nothing but the largest, some both."""
    block = make_block(
        1, 200, 256, heads=1, kv_heads=1, dim=128, dtype=dtype, logits_soft_cap=cap, softmax_scale=1e3, causal=True
    )
    sign = jnp.where(jnp.arange(256) < 99, -1, 1).astype(dtype)[None, :, None, None]
    k = jnp.abs(block.k) * sign * jnp.where(jnp.arange(256) % 9 < 8, 1, 0).astype(dtype)[None, :, None, None]
    size = 2.0**60 if dtype == HALF else 2.0**9
    block = dataclasses.replace(block, q=jnp.abs(block.q), kv=jnp.stack([k, block.v * size]))
    got, want = computed(block), ringattn_xla.block.KERNEL.forward(block, None)
    near("out", got.out / size, want.out / size, TOLERANCE[str(block.q.dtype)])
    near("lse", got.lse, want.lse, TOLERANCE["float32"] * cap)
    assert float(got.lse.min()) < 0.9 * (1 - cap) and float(got.lse.max()) > 0.9 * cap


@pytest.mark.parametrize(
    ("first", "kv_index"),
    [(4000, np.arange(150) + 32), (4008, np.arange(150)), (4000, np.arange(150) + 8), (0, np.arange(150) * 4 + 1)],
)
def test_entries_share_a_draw_only_where_the_indices_of_both_sides_count_on(first: int, kv_index: np.ndarray) -> None:
    block = half("dropout", 96, kv_index=kv_index[None].astype(np.int32))
    check(dataclasses.replace(block, q_index=block.q_index + first), "dropout")


@pytest.mark.parametrize("added", [DROPPED, {"slopes": SLOPES}], ids=["dropout", "slopes"])
def test_dropout_and_slopes_go_with_a_soft_cap(added: dict[str, Any]) -> None:
    check(half("soft cap", 128, **added), "with a soft cap")


def test_slopes_are_exact_far_from_position_zero() -> None:
    block = half("slopes", 128)
    far = {name: getattr(block, name) + 2**29 for name in ("q_positions", "kv_positions", "last")}
    near("out", computed(dataclasses.replace(block, **far)).out, check(block, "slopes").out, 0)


@pytest.mark.parametrize(
    ("dim", "added"),
    [
        (64, {}),
        (128, {}),
        (128, {"logits_soft_cap": 40.0}),
        (128, {"bias": half_bias(2, 4, 330, 384)}),
        (128, DROPPED),
        (128, {"slopes": SLOPES}),
    ],
)
def test_the_keys_may_come_in_parts(dim: int, added: dict[str, Any]) -> None:
    block = half("causal", dim, 330, 384, **added)
    whole, partial = check(block, "whole"), None
    for start, size in ((128, 256), (0, 128)):
        partial = computed(block.tile(0, 330, start, size), partial)
    near("out", partial.out, whole.out, TOLERANCE["bfloat16"])
    near("lse", partial.lse, whole.lse, TOLERANCE["float32"])


@pytest.mark.parametrize("dim", DIMS)
def test_what_keys_that_nobody_sees_continue_stays_as_it_was(dim: int) -> None:
    block = half("causal", dim)
    before = computed(block)
    after = computed(dataclasses.replace(block, kv_positions=block.kv_positions + 999), before)
    np.testing.assert_array_equal(after.out, before.out)
    np.testing.assert_array_equal(after.lse, before.lse)


SINKS = jnp.asarray([0.3, 200.0, -300.0, -np.inf])
CAPPED: dict[str, Any] = {"logits_soft_cap": 30.0, "causal": True, "offset": 140}


@pytest.mark.parametrize(
    ("dim", "fields"),
    [
        (64, {"sliding_window": (40, 0), "causal": True, "offset": 90}),
        (128, {"return_max_logits": True}),
        (128, CAPPED),
        (128, CAPPED | DROPPED | {"return_max_logits": True}),
        (192, {"causal": True, "slopes": SLOPES}),
    ],
    ids=str,
)
def test_the_softmax_begins_from_sinks_and_goes_on_with_the_next_block(dim: int, fields: dict[str, Any]) -> None:
    """Where keys have an offset, the first rows see nothing. A soft cap is no bound for sinks."""
    block = make_block(2, 200, 264, heads=4, kv_heads=2, dim=dim, dtype=HALF, **fields)
    lse = jnp.broadcast_to(SINKS[None, :, None], (2, 4, 200))
    least = jnp.full_like(lse, -jnp.inf) if block.rule.return_max_logits else None
    partial = want = Partial(None, lse, least)
    for start, size in ((128, 136), (0, 128)):
        part = block.tile(0, 200, start, size)
        partial, want = check(part, str(start), partial), ringattn_xla.block.KERNEL.forward(part, want)
        if least is not None:
            near("max_logits", partial.max_logits, want.max_logits, TOLERANCE["float32"])
    unseen = block.kv_index[0, 0] if "causal" in fields else 0
    assert not np.asarray(partial.out[:, :unseen]).any()
    np.testing.assert_allclose(partial.lse[..., :unseen], lse[..., :unseen], rtol=1e-5)
    first = block.tile(0, 200, 128, 136)
    final = computed(dataclasses.replace(first, kv=(first.k, first.v), final=True), Partial(None, lse, least))
    assert final.out.dtype == HALF


@pytest.mark.parametrize("fields", [{}, {"logits_soft_cap": 30.0}, {"padded": True}], ids=str)
def test_nan_of_sinks_reaches_rows_that_see_no_key(fields: dict[str, Any]) -> None:
    block = make_block(1, 200, 150, heads=4, kv_heads=2, dim=128, dtype=HALF, causal=True, offset=140, **fields)
    spreads_nan(computed, block)


def test_rows_that_see_nothing_are_zero_with_an_lse_of_minus_infinity() -> None:
    got = check(make_block(1, 300, 300, dim=128, dtype=HALF, causal=True, offset=150), "half see nothing")
    assert not np.asarray(got.out[:, :150]).any()
    assert np.isneginf(got.lse[..., :150]).all() and np.isfinite(got.lse[..., 150:]).all()


@pytest.mark.parametrize("option", ["causal", "segments", "dense mask"])
def test_a_nan_in_a_key_or_query_reaches_every_row_that_sees_it(option: str) -> None:
    block = half(option, 128)
    seen = np.broadcast_to(visible(block), (2, 4, 200, 150))
    of_key = computed(dataclasses.replace(block, kv=block.kv.at[0, :, 71].set(NAN)))
    assert np.isnan(np.asarray(of_key.out).swapaxes(1, 2)[seen[..., 71]]).all() and seen[..., 71].any()
    of_query = computed(dataclasses.replace(block, q=block.q.at[:, 70].set(NAN)))
    assert np.isnan(np.asarray(of_query.out)[:, 70][seen[:, :, 70].any(-1)]).all()


@pytest.mark.parametrize("fields", [{}, {"causal": True}, {"logits_soft_cap": 30.0}], ids=str)
def test_a_product_beyond_float32_makes_no_query_infinite(fields: dict[str, Any]) -> None:
    block = make_block(1, 192, 256, heads=1, kv_heads=1, dim=128, dtype=HALF, **fields)
    large = block.kv.at[0, ..., 0].set(0).at[0, 0, 3, 0, 0].set(-3e20)
    block = dataclasses.replace(block, q=block.q.at[..., 0].set(1e20), kv=large)
    assert not np.isnan(check(block, str(fields)).out).any()


@pytest.mark.parametrize(
    ("layout", "options"),
    [("zigzag", {}), ("zigzag", {"fused_backward": True}), ("striped", {"sliding_window": (150, 0)})],
    ids=str,
)
def test_a_ring_of_two_and_its_gradients(layout: str, options: dict[str, Any]) -> None:
    if jax.device_count() < 2:
        pytest.skip("one GPU makes no ring")
    draw = np.random.default_rng(0)
    q, k, v = (jnp.asarray(draw.normal(size=(1, 512, heads, 128)), HALF) for heads in (2, 1, 1))
    mesh = jax.make_mesh((2,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    found: dict[str, Any] = {}
    for backend in ("triton", "xla"):
        attend = functools.partial(
            ring_attention, axis_name="sp", causal=True, layout=layout, backend=backend, **options
        )
        spec = jax.sharding.PartitionSpec(None, "sp")
        ring = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)

        def loss(*arrays: jax.Array, ring: Any = ring) -> tuple[jax.Array, jax.Array]:
            out = ring(*arrays).astype(jnp.float32)
            return (out**2).sum(), out

        with compiling_for(90):
            program = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
            names = [call.name for call, _ in launches(program.trace(q, k, v).jaxpr.jaxpr)]
            found[backend] = jax.tree.leaves(program(q, k, v))
        assert ("ringattn_hopper_forward" in names) == (backend == "triton")
        fused = backend == "triton" and "fused_backward" in options
        assert ("ringattn_hopper_backward" in names) == fused
    for got, want in zip(found["triton"][1:], found["xla"][1:], strict=True):
        near("output or gradient", got, want, TOLERANCE["bfloat16"] * max(1.0, float(jnp.abs(want).max())))


@pytest.mark.parametrize(
    ("option", "dim", "added"),
    [("causal", 64, {}), ("segments", 128, {}), ("plain", 128, {"bias": half_bias(1, 1, 200, 264)})],
)
def test_a_final_output_has_the_dtype_of_the_queries(option: str, dim: int, added: dict[str, Any]) -> None:
    block = half(option, dim, **({"kv_length": 264} | added))
    final = computed(dataclasses.replace(block, kv=(block.k, block.v), final=True))
    kept_on = computed(block)
    assert final.out.dtype == HALF and final.lse.dtype == kept_on.out.dtype == jnp.float32
    np.testing.assert_array_equal(final.out, kept_on.out.astype(HALF))
    np.testing.assert_array_equal(final.lse, kept_on.lse)


@pytest.mark.parametrize("places", [1, 3, 999])
def test_however_many_programs_take_turns_the_bits_are_the_same(places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    block = half("causal", 64, 500, 300)
    usual = check(block, "usual")
    monkeypatch.setattr(plans, "PROGRAMS", places)
    got = computed(block)
    np.testing.assert_array_equal(got.out, usual.out)
    np.testing.assert_array_equal(got.lse, usual.lse)


def test_scores_of_thousands_overflow_nowhere() -> None:
    block = make_block(1, 200, 200, dim=128, dtype=HALF, softmax_scale=1e4, causal=True)
    got = computed(block)
    assert np.isfinite(got.out).all() and np.abs(np.asarray(got.lse)).max() > 1e4


@pytest.mark.parametrize(
    ("reason", "fields"),
    [
        ("float32", {"dtype": jnp.float32}),
        ("a head size that is no multiple of 8", {"dim": 100}),
        ("small heads", {"dim": 48}),
        ("values of another size", {"value_dim": 64}),
        ("few queries", {"q_length": 127}),
        ("few keys", {"kv_length": 127}),
        ("a bias of another dtype", {"bias": bias(1, 2, 200, 200)}),
        ("a bias whose rows are not of whole 16 bytes", {"kv_length": 204, "bias": half_bias(1, 2, 200, 204)}),
        ("a bias of keys", {"bias": half_bias(1, 2, 1, 200)}),
        ("a bias under a soft cap", {"logits_soft_cap": 3.0, "bias": half_bias(1, 2, 200, 200)}),
        ("a bias with heads of 64", {"dim": 64, "bias": half_bias(1, 2, 200, 200)}),
        ("a schedule that is asked for", {"fwd_params": FwdParams(num_stages=2)}),
        ("a bias and slopes", {"bias": half_bias(1, 2, 200, 200), "slopes": SLOPES[:, :2]}),
        ("a bias and dropout", {"bias": half_bias(1, 2, 200, 200), "dropout_prob": 0.1, "seed": SEEDS[:1]}),
        ("dropout with heads of 64", {"dim": 64, "dropout_prob": 0.1, "seed": SEEDS[:1]}),
        ("a soft cap with heads of 64", {"dim": 64, "q_length": 4096, "logits_soft_cap": 3.0}),
    ],
)
def test_what_it_does_not_take_goes_to_the_portable_kernel(reason: str, fields: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"q_length": 200, "kv_length": 200, "dim": 128, "dtype": HALF}
    assert launched(traced(make_block(1, **(usual | {"q_length": 128, "kv_length": 128})))) == [
        "ringattn_hopper_forward"
    ]
    assert launched(traced(make_block(1, **(usual | fields)))) == ["ringattn_forward"], reason


@pytest.mark.parametrize("target", [Target("cuda", 80), Target("cuda", 100), Target("rocm"), Target("interpreter")])
def test_other_devices_have_the_portable_kernels(target: Target) -> None:
    block = half("causal", 128)
    assert launched(traced(block, None, target)) == ["ringattn_forward"]


@pytest.mark.parametrize(("version", "name"), [("3.5.1", ""), ("3.9.0+git", "hopper_"), ("3.10.0", ""), ("4.0.0", "")])
def test_a_triton_whose_gluon_may_be_another_has_the_portable_kernels(
    version: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(family.triton, "__version__", version)
    family._logged_once.cache_clear()
    for _ in range(2):
        assert launched(traced(half("causal", 128))) == [f"ringattn_{name}forward"]
    assert [version in record.getMessage() for record in caplog.records] == [True] * (name == "")


@pytest.mark.parametrize("growth", [5.0, 12.0])
@pytest.mark.parametrize("added", [{}, {"bias": half_bias(1, 1, 128, 512)}], ids=["plain", "bias"])
def test_maxima_may_grow_by_little_or_much_from_tile_to_tile(growth: float, added: dict[str, Any]) -> None:
    """In units of log2; sums are multiplied only where a maximum grew by more than 8. Every third row has no growth."""
    block = make_block(1, 128, 512, heads=1, kv_heads=1, dim=128, dtype=HALF, softmax_scale=1.0, **added)
    q = jnp.zeros_like(block.q).at[..., 0].set(jnp.asarray(np.arange(128) % 3 > 0, HALF)[None, :, None])
    rises = jnp.asarray(np.arange(512) // 64 * growth * np.log(2), HALF)
    k = jnp.zeros_like(block.k).at[..., 0].set(rises[None, :, None])
    check(dataclasses.replace(block, q=q, kv=jnp.stack([k, block.v])), f"{growth}")


@pytest.mark.parametrize(
    "dims",
    [
        *((72, 72), (96, 96), (120, 120), (256, 256)),
        *((192, 192), (176, 136), (192, 128), (136, 72), (192, 256), (256, 192)),
    ],
    ids=str,
)
def test_heads_of_any_multiple_of_8_lie_in_shared_memory_in_one_piece_or_two(dims: tuple[int, int]) -> None:
    given: dict[str, Any] = {"dim": dims[0], "value_dim": dims[1], "dtype": HALF, "causal": True}
    check(make_block(2, 200, 140, **given), str(dims))


@pytest.mark.parametrize("option", ["window", "causal segments", "dense mask", "slopes", "dropout"])
def test_values_in_two_pieces_go_with_every_other_option(option: str) -> None:
    check(half(option, 192, 200, 300), option)


@pytest.mark.parametrize("programs", [1, 132])
def test_the_only_place_of_the_second_piece_of_values_is_filled_anew_in_every_step_and_turn(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "PROGRAMS", programs)
    block = make_block(1, 512, 640, heads=2, kv_heads=1, dim=192, dtype=HALF, causal=True)
    check(block, "from nothing")
    others = make_block(1, 512, 64, heads=2, kv_heads=1, dim=192)
    check(block, "continued", ringattn_xla.block.KERNEL.forward(others, None))


@pytest.mark.parametrize(
    ("q_length", "kv_length", "causal", "dim"),
    [(500, 150, True, 64), (500, 640, False, 64), (640, 640, True, 96), (500, 150, True, 128), (500, 640, False, 128)],
)
def test_final_results_are_right_past_the_end_of_a_batch_row_and_over_several_turns(
    q_length: int, kv_length: int, causal: bool, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They leave through shared memory; the last tile of a row must not reach into the next row.

    With 640 keys some turns have three and more tiles without a mask: those store the results of the turn before.
    """
    monkeypatch.setattr(plans, "PROGRAMS", 1)
    block = make_block(2, q_length, kv_length, heads=1, kv_heads=1, dim=dim, dtype=HALF, causal=causal)
    got = computed(dataclasses.replace(block, final=True))
    want = ringattn_xla.block.KERNEL.forward(block, None)
    assert got.out.dtype == HALF
    near("out", got.out, want.out, TOLERANCE["bfloat16"])
    near("lse", got.lse, want.lse, TOLERANCE["float32"])


@pytest.mark.parametrize(("q_length", "kv_length"), [(256, 256), (197, 333)])
def test_short_rows_that_see_all_keys_run_in_tiles_of_128_queries(q_length: int, kv_length: int) -> None:
    block = make_block(1, q_length, kv_length, heads=1, kv_heads=1, dim=64, dtype=HALF)
    assert plans.forward(forward.kernel_inputs.of_block(block).constants) == plans._SHORT
    check(block, "continued", check(block, "alone"))
    check(dataclasses.replace(block, final=True), "final")
