# SPDX-License-Identifier: Apache-2.0
"""Promises on the one-pass backward kernel for Hopper: what it takes, and that its gradients are the XLA backend's."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ringattn_xla.block
from ringattn_core.config import BwdParams
from ringattn_core.contract.protocol import Block
from ringattn_testing.exhaustive import in_tests
from ringattn_testing.triton.given_blocks import bias, make_block, mask_in_tiles, with_option
from ringattn_testing.triton.interpreting import interpret
from ringattn_testing.triton.one_pass import HALF, computed, gradients, launched, prepared, within_budget
from ringattn_testing.triton.small_gluon_kernels import tiles_visited, turns_taken
from ringattn_triton import grouped_rows, kernel_inputs, visited_tiles
from ringattn_triton.hopper import backward as one_pass
from ringattn_triton.hopper import plans, turn_order
from ringattn_triton.hopper.plans import BackwardPlan
from ringattn_triton.visited_tiles import TableShape

OPTIONS = (
    "plain", "causal", "window", "causal segments", "padding", "positions", "range", "ranges of rows",
    "ranges of heads", "ranges of heads of all rows", "ranges of heads in segments",
    "ranges of heads in segments with dropout", "documents as ranges", "soft cap", "slopes", "slopes of rows",
    "dropout", "masks of heads", "dense mask", "negative scale", "chosen keys", "chosen blocks of 4",
    "chosen blocks of 16", "chosen blocks of 64", "chosen blocks of 128", "chosen blocks and a mask",
)  # fmt: skip
# Programs add to dq in order, or by atomic adds in any order, whatever the scores depend on.
CASES = [
    *((option, 64, True) for option in OPTIONS),
    *(("causal", 128, True), ("window", 128, True), ("window", 128, False)),
    *((option, 64, False) for option in ("causal segments", "slopes", "dropout")),
]


@pytest.mark.parametrize(("option", "dim", "ordered"), CASES)
def test_gradients_are_right_in_ragged_tiles_with_grouped_heads(option: str, dim: int, ordered: bool) -> None:
    computed(with_option(option, 200, 150, dim=dim, dtype=HALF), ordered)


@pytest.mark.parametrize(
    ("dims", "ordered"),
    [
        *(((96, 96), True), ((120, 72), True), ((136, 136), True), ((176, 152), True)),
        *(((192, 192), True), ((256, 192), True), ((256, 256), True)),
        *(((120, 72), False), ((176, 152), False), ((256, 192), False)),
    ],
    ids=str,
)
def test_heads_of_any_multiple_of_8_lie_in_shared_memory_in_one_piece_or_two(
    dims: tuple[int, int], ordered: bool
) -> None:
    block = make_block(1, 200, 140, dim=dims[0], value_dim=dims[1], dtype=HALF, causal=True, heads=4, kv_heads=2)
    computed(block, ordered)


@pytest.mark.parametrize("dim", [64, 128])
def test_whole_tiles_and_equal_heads_in_float16_are_right(dim: int) -> None:
    computed(make_block(1, 256, 256, dim=dim, dtype=jnp.float16, causal=True))


@pytest.mark.parametrize("dim", [128, 256])
def test_derivatives_that_only_their_scale_brings_into_float16_are_right(dim: int) -> None:
    block = make_block(1, 128, 128, dim=dim, dtype=jnp.float16, causal=True)
    rule = dataclasses.replace(block.rule, softmax_scale=2.0**-12)
    k, v = block.kv
    got = computed(dataclasses.replace(block, kv=(k, v * 12288), rule=rule))
    assert all(np.isfinite(x).all() for x in (got.dq, got.dk))


@pytest.mark.parametrize("scale", [1e-31, 1e-29, 1e-6, 3.0])
def test_lse_is_subtracted_at_every_scale(scale: float) -> None:
    computed(make_block(1, 128, 128, dim=64, dtype=HALF, causal=True, softmax_scale=scale))


def test_lse_is_subtracted_where_its_quotient_by_the_scale_is_infinite() -> None:
    block = make_block(1, 64, 128, dim=64, dtype=HALF, softmax_scale=1.2e-38)
    rows = prepared(block)
    got, want = gradients(block, *rows), ringattn_xla.block.KERNEL.backward(block, *rows, None)
    np.testing.assert_allclose(np.float32(got.dv), np.float32(want.dv), atol=0.02)


@pytest.mark.parametrize(("q_length", "kv_length"), [(200, 256), (256, 200), (40, 40)])
def test_full_attention_may_be_ragged_on_either_side(q_length: int, kv_length: int) -> None:
    computed(make_block(1, q_length, kv_length, dim=64, dtype=HALF))


@pytest.mark.parametrize("places", [1, 3])
@pytest.mark.parametrize("upwards", [0, 1])
def test_however_many_programs_take_turns_the_bits_are_the_same(
    upwards: int, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = make_block(1, 400, 400, heads=3, kv_heads=3, dim=64, dtype=HALF, causal=True)
    monkeypatch.setattr(turn_order, "_heads_upwards", lambda *_: upwards)
    usual = computed(block)
    monkeypatch.setattr(plans, "PROGRAMS", places)
    got = computed(block)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(got, name), getattr(usual, name))


@pytest.mark.parametrize("upwards", [0, 1])
def test_turns_that_skip_tiles_here_and_there_give_the_same_bits(upwards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tiles that need no mask, some form a run, and others are visited like those that need one."""
    block = make_block(1, 640, 640, heads=2, kv_heads=2, dim=64, dtype=HALF, mask=mask_in_tiles(640, 128))
    monkeypatch.setattr(turn_order, "_heads_upwards", lambda *_: upwards)
    usual = computed(block)
    monkeypatch.setattr(plans, "PROGRAMS", 1)
    got = computed(block)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(got, name), getattr(usual, name))


@pytest.mark.parametrize("places", [1, 4])
def test_turns_that_begin_together_give_the_same_bits_even_where_nobody_takes_their_neighbours(
    places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = make_block(1, 400, 800, heads=2, kv_heads=1, dim=64, dtype=HALF, causal=True)
    monkeypatch.setattr(turn_order, "_heads_upwards", lambda *_: 0)
    usual = computed(block)
    monkeypatch.setattr(turn_order, "_abreast", lambda *_: 4)
    monkeypatch.setattr(plans, "PROGRAMS", places)
    got = computed(block)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(got, name), getattr(usual, name))


def turns_given_out(alone: bool, rows: int = 6, together: int = 1, heads: int = 1, **plan: Any) -> np.ndarray:
    """How many turns were taken when each turn was given out."""
    shape = TableShape(listed=False, run=True, rows=rows, columns=1, grouped=False, heads_at_once=together)
    count = rows * heads
    outputs = [((size,), np.int32) for size in (1, count, count)]
    _, turns, seen = interpret(
        turns_taken, [np.zeros(1, np.int32)], outputs, aliases={0: 0},
        COUNT=count, T=shape, PLAN=dataclasses.replace(plans.BACKWARD[64], ordered=True, **plan), ALONE=alone,
    )  # fmt: skip
    np.testing.assert_array_equal(turns, np.arange(count))
    return seen


def test_a_turn_begins_when_its_neighbour_is_taken() -> None:
    """A busy machine may let one of two threads wait for longer than a turn waits: then it is tried again."""
    tries = [turns_given_out(alone=False, abreast=2) for _ in range(5)]
    assert any((seen >= [2, 2, 4, 4, 6, 6]).all() for seen in tries), f"turns were given out at {tries}"


def test_a_turn_begins_after_a_while_where_nobody_takes_its_neighbour() -> None:
    np.testing.assert_array_equal(turns_given_out(alone=True, abreast=2), np.arange(6) + 1)


@pytest.mark.parametrize(
    ("rows", "together", "heads", "order"),
    [
        (4, 1, 3, [0, 1, 2, 4, 3, 5, 6, 8, 7, 9, 10, 11]),
        (3, 1, 2, [0, 1, 3, 2, 4, 5]),  # of an odd number of turns, the second half has one more
        (2, 2, 4, [0, 1, 2, 3, 4, 5, 6, 7]),
        (4, 2, 4, [0, 1, 2, 3, 4, 5, 8, 9, 6, 7, 10, 11, 12, 13, 14, 15]),
        (4, 1, 1, [0, 1, 2, 3]),
    ],
)
def test_interleaved_the_short_turns_of_some_heads_alternate_with_the_long_turns_of_the_next(
    rows: int, together: int, heads: int, order: list[int]
) -> None:
    given = turns_given_out(alone=True, rows=rows, together=together, heads=heads, interleaved=True)
    np.testing.assert_array_equal(np.argsort(given), order)


def independent_choices(tokens: int, kv_heads: int, count: int, size: int) -> np.ndarray:
    """Each query chooses the first block, its own, and others up to its own at random, for each key head."""
    own = np.arange(tokens, dtype=np.int32)[:, None, None] // size
    ids = (np.random.default_rng(0).random((tokens, kv_heads, count)) * (own + 1)).astype(np.int32)
    ids[..., 0], ids[..., 1] = 0, own[..., 0]
    return ids[None]


def test_turns_of_chosen_blocks_hardly_wait_for_each_other() -> None:
    """In a simulation: a step takes 1, and a turn adds to a tile 1.5 after the turn before it may, or later.

    The work, or the longest turn, bounds the time from below. With masked tiles before the others in each list, it
    would be twice as long here, and three times with one head after another, because some turns run one after another.
    """
    heads, programs = 2, 16
    ids = independent_choices(2048, heads, 4, 128)
    block = make_block(
        1, 2048, 2048, heads=16 * heads, kv_heads=heads, dim=128, dtype=HALF, causal=True, selected=ids,
        selected_size=128,
    )  # fmt: skip
    block = grouped_rows.as_rows(block)
    constants = kernel_inputs.of_block(block).constants
    plan = plans.backward(constants)
    assert plan is not None
    plan, turns_at_once, of = turn_order.arranged(plan, block, constants)
    found = visited_tiles.table(block, plan.q_tile, plan.kv_tile, True, turns_at_once, of, ranked=True)
    assert plan.ordered and found.shape.heads_at_once == heads
    count = heads * found.shape.rows
    _, taken, visits = interpret(
        tiles_visited, [found.bounds, found.tiles, found.ranks, found.counters],
        [(shape, np.int32) for shape in ((1,), (count, 2), (count, found.shape.columns, 2))], aliases={3: 0},
        COUNT=count, HEADS=heads, T=found.shape, PLAN=plan,
    )  # fmt: skip
    steps = taken[:, 1]
    assert steps.sum() == np.asarray(found.ranks)[:, -1].sum()
    free, added, reached = [0.0] * programs, np.zeros((heads, found.shape.columns), int), {}
    for (head, length), turn in zip(taken, visits, strict=True):
        program = free.index(min(free))
        ended = at = free[program]
        for tile, rank in turn[:length]:
            place = head, tile
            assert added[place] == rank, "a turn waits for one that is taken after it"
            ended = max(ended + 1, at)  # the place of dq is free when the addition before has begun
            at = max(ended, reached.get(place, 0.0))
            reached[place] = at + 1.5
            added[place] += 1
        free[program] = at
    assert max(free) <= 1.1 * max(steps.sum() / programs, steps.max())


@pytest.mark.parametrize("places", [1, 3])
def test_interleaved_turns_give_the_same_bits(places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    block = make_block(1, 192, 192, heads=3, kv_heads=3, dim=136, dtype=HALF, causal=True)
    monkeypatch.setattr(turn_order, "_heads_interleaved", lambda *_: 0)
    usual = computed(block)
    monkeypatch.setattr(turn_order, "_heads_interleaved", lambda *_: 1)
    monkeypatch.setattr(plans, "PROGRAMS", places)
    got = computed(block)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(got, name), getattr(usual, name))


def test_dq_continues_what_other_keys_gave() -> None:
    block = make_block(1, 128, 256, dim=64, dtype=HALF)
    rows = prepared(block)
    whole = gradients(block, *rows)
    dq = None
    for start in (128, 0):
        dq = gradients(block.tile(0, 128, start, 128), *rows, dq=dq).dq
    np.testing.assert_allclose(dq, whole.dq, atol=1e-5)


def test_a_final_block_has_gradients_in_the_dtype_of_its_inputs() -> None:
    block = make_block(1, 128, 128, dim=64, dtype=HALF)
    assert {x.dtype for x in jax.tree.leaves(computed(block))} == {jnp.dtype(jnp.float32)}
    final = computed(dataclasses.replace(block, final=True))
    assert {x.dtype for x in jax.tree.leaves(final)} == {jnp.dtype(HALF)}


@pytest.mark.parametrize(("dims", "lengths"), [((64, 64), (200, 150)), ((128, 128), (72, 300)), ((96, 72), (64, 40))])
def test_final_gradients_of_ragged_batch_rows_stay_in_their_rows(dims: tuple[int, int], lengths: Any) -> None:
    block = make_block(2, *lengths, dim=dims[0], value_dim=dims[1], dtype=HALF, causal=True, heads=4, kv_heads=2)
    computed(dataclasses.replace(block, final=True))


@pytest.mark.parametrize(("dim", "ordered"), [(64, True), (64, False), (192, True), (256, False)])
def test_rows_and_keys_that_see_nothing_have_gradients_of_zero(dim: int, ordered: bool) -> None:
    # No turn visits the first tile of queries, so nothing is ever added to its dq.
    got = computed(make_block(1, 256, 256, dim=dim, dtype=HALF, causal=True, offset=150), ordered)
    assert not np.asarray(got.dq[:, :150]).any() and not np.asarray(got.dk[:, 106:]).any()
    assert np.asarray(got.dq[:, 151:]).any() and np.isfinite(got.dq).all()


@pytest.mark.parametrize(
    "fields",
    [
        {"fused_backward": False},
        {"dtype": jnp.float32},
        {"dim": 100},
        {"dim": 48},
        {"value_dim": 64},
        {"bias": bias(1, 2, 200, 200)},
        {"dim": 256, "logits_soft_cap": 3.0},
        {"logits_soft_cap": 3.0, "slopes": np.array([[0.5, 0.1]], np.float32)},
        {"bwd_params": BwdParams(num_stages=2)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_other_blocks_take_two_passes(fields: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"q_length": 200, "kv_length": 200, "dim": 128, "dtype": HALF, "fused_backward": True}
    assert "ringattn_hopper_backward" in launched(make_block(1, **usual))
    assert "ringattn_backward_keys" in launched(make_block(1, **(usual | fields)))


# A kernel with masks has the loop of a kernel without masks, and one more.
MASKS = ("plain", "causal segments")
COMPILED = [
    *((dim, option, True) for dim in (64, 128) for option in (*MASKS, "soft cap", "slopes", "dropout", "dense mask")),
    *((96, option, True) for option in (*MASKS, "dropout")),
    *((dim, option, True) for dim in (192, 256) for option in MASKS),
    *((dim, "causal", False) for dim in (64, 128, 192, 256)),
    # The most numbers that a step reads of each query.
    *((dim, "ranges of heads in segments", True) for dim in (64, 96, 128, 192, 256)),
    *((dim, "ranges of heads in segments with dropout", True) for dim in (64, 128)),
]


def as_of(small: Block, tokens: int) -> tuple[Block, kernel_inputs.BlockConstants, BackwardPlan]:
    """A block, its constants as if it had so many tokens, and the plan for its head sizes."""
    constants = dataclasses.replace(kernel_inputs.of_block(small).constants, q_length=tokens, kv_length=tokens)
    plan = plans.backward(constants)
    assert plan is not None
    return small, constants, plan


@pytest.mark.parametrize(
    ("option", "dim", "tokens", "heads"),
    [
        ("plain", 192, 8192, 2),
        ("plain", 256, 8192, 2),
        ("plain", 192, 4096, 4),
        ("plain", 192, 16384, 1),
        ("causal", 192, 8192, 4),
        ("causal", 192, 32768, 2),
        ("causal", 256, 65536, 2),
        ("plain", 128, 8192, 16),
    ],
)
def test_as_many_wide_heads_run_side_by_side_as_the_cache_holds_and_two_larger_ones_under_a_mask(
    option: str, dim: int, tokens: int, heads: int
) -> None:
    small = with_option(option, 128, 128, heads=2, kv_heads=2, dim=dim, dtype=HALF)
    assert turn_order._heads_in_order(*as_of(small, tokens)) == heads


@pytest.mark.parametrize(("option", "heads"), [("causal", 4), ("causal segments", 16), ("chosen blocks of 128", 16)])
def test_as_many_heads_as_may_run_side_by_side_with_segment_ids_or_bits(option: str, heads: int) -> None:
    """Their turns may be short, and short turns of few heads wait for each other. Of 32k keys, a head has 256 turns."""
    small = with_option(option, 128, 128, heads=2, kv_heads=2, dim=128, dtype=HALF)
    assert turn_order._heads_in_order(*as_of(small, 32768)) == heads


@pytest.mark.parametrize(
    ("option", "dim", "tokens", "group", "heads"),
    [
        ("causal", 64, 16384, 1, 2),
        ("causal", 128, 16384, 1, 2),
        ("causal", 128, 2048, 1, 16),
        ("causal", 128, 65536, 1, 0),  # the cache does not hold the queries
        ("causal", 128, 8192, 4, 0),
        ("causal segments", 128, 2048, 1, 0),
        ("causal", 192, 8192, 1, 0),
    ],
)
def test_turns_go_upwards_where_the_cache_holds_the_queries_of_all_heads_at_work(
    option: str, dim: int, tokens: int, group: int, heads: int
) -> None:
    small = with_option(option, 128, 128, heads=group, kv_heads=1, dim=dim, dtype=HALF)
    assert turn_order._heads_upwards(*as_of(small, tokens)) == heads


@pytest.mark.parametrize(
    ("option", "dim", "tokens", "group", "abreast"),
    [
        ("causal", 128, 16384, 16, 4),
        ("causal", 128, 65536, 8, 16),
        ("causal", 128, 2**20, 8, 16),
        ("causal", 64, 16384, 16, 4),
        ("causal", 128, 16384, 4, 1),  # the cache holds most tiles from one turn to the next
        ("causal", 64, 16384, 8, 1),
        ("causal", 128, 8192, 8, 2),
        ("causal", 128, 2048, 8, 1),  # turns are short
        ("causal", 192, 16384, 16, 1),
        ("plain", 128, 16384, 16, 1),
        ("window", 128, 16384, 16, 1),
        ("causal segments", 128, 16384, 16, 1),
        ("slopes", 128, 16384, 16, 1),
    ],
)
def test_long_turns_of_large_groups_begin_together(
    option: str, dim: int, tokens: int, group: int, abreast: int
) -> None:
    fields = {"slopes": np.ones((1, group), np.float32)} if option == "slopes" else {}
    small = with_option(option, 128, 128, heads=group, kv_heads=1, dim=dim, dtype=HALF, **fields)
    assert turn_order._abreast(*as_of(small, tokens)) == abreast


def test_turns_of_chosen_blocks_begin_together_where_heads_are_rows() -> None:
    def turns(rows: bool, **mask: Any) -> int:
        ids = independent_choices(128, 1, 2, 64)
        block = make_block(
            1, 128, 128, heads=16, kv_heads=1, dim=128, dtype=HALF, selected=ids, selected_size=64, **mask
        )
        return turn_order._abreast(*as_of(grouped_rows.as_rows(block) if rows else block, 16384))

    assert turns(True, causal=True) == 4
    assert turns(False, causal=True) == turns(True) == turns(True, causal=True, sliding_window=(64, 0)) == 1


@pytest.mark.parametrize(
    ("option", "dim", "tokens", "group", "heads"),
    [
        ("causal", 192, 8192, 1, 2),
        ("causal", 256, 4096, 1, 4),
        ("causal", 192, 10240, 1, 0),  # the cache does not hold the queries
        ("causal", 256, 16384, 2, 0),
        ("plain", 192, 8192, 1, 0),
        ("window", 192, 8192, 1, 0),
        ("causal segments", 192, 8192, 1, 0),
        ("causal", 128, 8192, 1, 0),
    ],
)
def test_turns_of_wide_heads_are_interleaved_where_the_cache_holds_enough_heads(
    option: str, dim: int, tokens: int, group: int, heads: int
) -> None:
    small = with_option(option, 128, 128, heads=group, kv_heads=1, dim=dim, dtype=HALF)
    assert turn_order._heads_interleaved(*as_of(small, tokens)) == heads


@pytest.mark.parametrize(
    ("mask", "inside"),
    [
        ({"causal": True}, True),
        ({"chunk_size": 64}, True),
        ({"sliding_window": (64, 0)}, False),
        ({"sliding_window": (128, 0)}, True),  # as wide as the sequence: no window
        ({"sliding_window": (None, 0)}, True),
    ],
)
def test_under_a_window_a_turn_visits_all_tiles_for_a_head_before_the_next_head(
    mask: dict[str, Any], inside: bool
) -> None:
    block = make_block(1, 128, 128, heads=2, kv_heads=1, dim=128, dtype=HALF, **mask)
    assert turn_order._heads_inside(block, kernel_inputs.of_block(block).constants) is inside


@pytest.mark.parametrize(
    ("dim", "tokens", "group", "fields", "differs", "heads"),
    [
        (192, 8192, 1, {"causal": True}, {"interleaved": True, "heads_inside": True}, 2),
        (128, 8192, 1, {"causal": True}, {"upwards": True, "heads_inside": True}, 4),
        (128, 16384, 16, {"causal": True}, {"abreast": 4, "heads_inside": True}, 2),
        (128, 16384, 16, {"sliding_window": (1024, 0)}, {}, 2),
    ],
)
def test_a_plan_gets_the_order_that_the_rules_choose(
    dim: int, tokens: int, group: int, fields: dict[str, Any], differs: dict[str, Any], heads: int
) -> None:
    block = make_block(1, 128, 128, heads=group, kv_heads=1, dim=dim, dtype=HALF, **fields)
    _, constants, plan = as_of(block, tokens)
    arranged, turns, _ = turn_order.arranged(plan, block, constants)
    assert arranged == dataclasses.replace(plan, ordered=True, **differs)
    assert turns == heads * tokens // plan.kv_tile


def test_turns_in_strips_neither_go_upwards_nor_wait_for_their_neighbours() -> None:
    block = make_block(
        1, 128, 128, heads=16, kv_heads=1, dim=128, dtype=HALF, causal=True, bias=np.zeros((1, 1, 128, 128))
    )
    for tokens in (1024, 16384):
        _, constants, plan = as_of(block, tokens)
        arranged, _, _ = turn_order.arranged(plan, block, constants)
        assert arranged == dataclasses.replace(plan, ordered=True, heads_inside=True)


def test_numbers_in_parts_add_up_to_the_numbers() -> None:
    """Also in a compiled program, from which XLA may remove conversions to bfloat16 and back."""
    random = np.random.default_rng(0)
    x = np.float32(random.standard_normal((1, 2, 64)) * 10.0 ** random.integers(-9, 9, (1, 2, 64)))
    x[0, 0, :3] = np.inf, -np.inf, 0.0
    parts = jax.jit(one_pass._in_parts)(x)
    assert parts.dtype == jnp.bfloat16 and parts.shape == (1, 2, 64, 8)
    np.testing.assert_array_equal(np.asarray(parts, np.float64).sum(-1), np.float64(x))


@pytest.mark.parametrize(
    ("dim", "option", "ordered"),
    # Heads of 128 with every option, and the case with the most numbers of each query for the others. This case has all
    # of causal segments too, and with dropout all of dropout.
    in_tests(
        lambda dim, option, ordered: (
            option == "ranges of heads in segments" or (dim == 128 and option not in ("causal segments", "dropout"))
        ),
        COMPILED,
    ),
)
def test_it_compiles_fits_and_spills_no_more_than_its_budget(dim: int, option: str, ordered: bool) -> None:
    length = 1000 if "segments" in option else 1024
    block = with_option(option, length, length, dim=dim, dtype=HALF, final=True)
    block = dataclasses.replace(block, rule=dataclasses.replace(block.rule, fused_backward=not ordered))
    beside = " with dropout" if "dropout" in option else "" if option == "plain" else " with masks"
    found = within_budget(block, beside)
    assert found["ringattn_hopper_finish_dq"].spilled == 0
