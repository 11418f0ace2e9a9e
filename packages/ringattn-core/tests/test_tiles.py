# SPDX-License-Identifier: Apache-2.0
"""Promises of tiles: skipped tiles are invisible, tiles without a mask are fully visible."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.contract.protocol import Block
from ringattn_core.contract.rule import Rule
from ringattn_core.contract.tiles import Tiles
from ringattn_core.contract.tiles import tiles as tiles_of_heads
from ringattn_core.contract.visibility import visible
from ringattn_core.masks import Causal, Chunked, Document, Full, Local, Mask, Numpy, Predicate, Prefix
from ringattn_core.placement.layout import LAYOUTS, Shards
from ringattn_testing.random_blocks import make_block, seeing

RANKS, LENGTH, BATCH, HEADS = 3, 24, 2, 2
DRAW = np.random.default_rng(11)
PAIRS = DRAW.random((RANKS * LENGTH, RANKS * LENGTH)) < 0.5
PAIRS[: LENGTH // 2] = False
PAIRS[LENGTH:, 16:40] = True


def _ids(draw: np.random.Generator) -> np.ndarray:
    """The segment ids of a shard: documents in order, then padding."""
    ids = np.sort(draw.integers(0, 4, (BATCH, LENGTH)), -1).astype(np.int32)
    ids[:, LENGTH - 5 :] = -1
    return ids


def make(layout: str, q_rank: int, kv_rank: int, options: dict[str, Any], **fields: Any) -> Block:
    q_index, kv_index = (jnp.asarray(Shards(layout, RANKS).indices(rank, LENGTH))[None] for rank in (q_rank, kv_rank))
    given: dict[str, Any] = {
        "q_positions": q_index, "kv_positions": kv_index,
        "q_segments": None, "kv_segments": None, **{name: x for name, x in fields.items() if name != "mask"},
    }  # fmt: skip
    block = Block(
        q=jnp.zeros((BATCH, LENGTH, HEADS, 1)), kv=jnp.zeros((2, BATCH, LENGTH, HEADS, 1)),
        q_index=q_index, kv_index=kv_index, batch_index=jnp.arange(BATCH),
        head_index=jnp.arange(HEADS), bias=None, slopes=None, seed=None, rule=Rule(1.0),
        first=None, last=None, bits=None, bits_of_head=None,
        **{name: x if x is None else jnp.asarray(x) for name, x in given.items()},
    )  # fmt: skip
    return seeing(block, mask=fields.get("mask"), **options)


def _ranges(batch: int, heads: int) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last position of each query, at random `[batch, heads, LENGTH]`; every seventh is empty."""
    ends = np.sort(np.random.default_rng(batch + heads).integers(-9, RANKS * LENGTH, (2, batch, heads, LENGTH)), 0)
    ends[1, ..., ::7] = ends[0, ..., ::7] - 1
    return ends[0].astype(np.int32), ends[1].astype(np.int32)


MASKS: tuple[Mask, ...] = (
    Full(), Causal(), Causal(3), Local(4, None), Local(None, 2), Local(7, 1), Chunked(10), Prefix(17), Numpy(PAIRS),
    Document(np.arange(RANKS * LENGTH) // 13), Document(np.arange(RANKS * LENGTH) // 9 - 1),
    Predicate(lambda q, kv: (q + kv) % 3 == 0), Prefix(10) | Causal(), Local(9, 9) & ~Chunked(8),
    ~Document(np.arange(72) // 20),
)  # fmt: skip

RULES = {
    "nothing": {}, "causal": {"causal": True},
    "window": {"sliding_window": (6, 3)}, "one side": {"sliding_window": (None, 2)},
    "causal window": {"causal": True, "sliding_window": (9, 9)}, "chunk": {"chunk_size": 10},
    "widest window": {"sliding_window": (2**31 - 1, 2**31 - 1)}, "chunk of one": {"chunk_size": 1},
    "widest chunk in a window": {"chunk_size": 2**30, "sliding_window": (2**31 - 1, 0)},
    **{f"mask {n} {type(mask).__name__}": {"masks": (mask,), "mask_of_head": (0, 0)} for n, mask in enumerate(MASKS)},
    "ranges": {"kv_range": _ranges(1, 1), "causal": True}, "ranges of rows": {"kv_range": _ranges(BATCH, 1)},
    "ranges of heads": {"kv_range": _ranges(1, HEADS), "sliding_window": (30, None)},
    "intervals of heads": {"masks": (Local(4, 4), Prefix(9) | Causal()), "mask_of_head": (1, 0)},
    "masks of heads": {"masks": (Local(4, 4), Numpy(PAIRS)), "mask_of_head": (1, 0), "causal": True},
    "masks of heads without bounds": {"masks": (Numpy(PAIRS), MASKS[11], Causal(), ~MASKS[11]), "mask_of_head": (3, 1)},
}  # fmt: skip

FIELDS = {
    "of the layout": lambda draw: {},
    "of the caller": lambda draw: {
        "q_positions": draw.integers(-20, 60, (BATCH, LENGTH)).astype(np.int32),
        "kv_positions": draw.integers(-20, 60, (BATCH, LENGTH)).astype(np.int32),
    },
    "of the farthest tokens": lambda draw: {
        name: draw.choice([1 - 2**30, 2 - 2**30, 0, 2**30 - 2, 2**30 - 1], (BATCH, LENGTH)).astype(np.int32)
        for name in ("q_positions", "kv_positions")
    },
    "restarting": lambda draw: dict.fromkeys(("q_positions", "kv_positions"), np.arange(LENGTH)[None] % 7),
    "with segments": lambda draw: {"q_segments": _ids(draw), "kv_segments": _ids(draw)},
    "with a dense mask": lambda draw: {"mask": np.repeat(draw.random((BATCH, 1, LENGTH, 3)) < 0.3, LENGTH // 3, -1)},
    "with a mask of heads": lambda draw: {"mask": np.kron(draw.random((1, HEADS, 4, 4)) < 0.6, np.ones((6, 6))) > 0},
}


def tiles(block: Block, q_tile: int, kv_tile: int) -> Tiles:
    """The tiles of all heads together, `[g, nq, nk]`."""
    return Tiles(*(x[:, 0] for x in tiles_of_heads(block, q_tile, kv_tile).of_all_heads))


def by_force(block: Block, q_tile: int, kv_tile: int) -> tuple[np.ndarray, np.ndarray]:
    """For each pair of tiles, whether any head sees any pair and whether all heads see all, by the dense mask."""
    seen = visible(block)
    shape = (block.q.shape[0], block.q.shape[2], block.q_length, block.kv_length)
    pairs = np.broadcast_to(True if seen is None else np.asarray(seen), shape)
    grid = pairs.reshape(*shape[:2], shape[2] // q_tile, q_tile, shape[3] // kv_tile, kv_tile)
    return np.asarray(grid.any((1, 3, 5))), np.asarray(grid.all((1, 3, 5)))


def _wrong(bits: np.ndarray) -> str:
    return f"wrong at [g, q tile, kv tile] = {np.argwhere(bits)[:3].tolist()}"


CASES = [(name, layout) for name, options in RULES.items() for layout in LAYOUTS]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_no_visible_pair_is_skipped_and_no_invisible_one_unmasked(name: str, layout: str) -> None:
    draw = np.random.default_rng(5)
    for turn, (what, fields) in enumerate(FIELDS.items()):
        ranks, sizes = ((2, 1), (1, 1), (0, 2))[turn % 3], ((8, 6), (24, 4))[turn % 2]
        given = fields(draw)
        block = make(layout, *ranks, RULES[name], **given)
        got, (some, full) = (np.asarray(x) for x in tiles(block, *sizes)), by_force(block, *sizes)
        got_some, got_full = got
        assert got_some.shape == got_full.shape and got_some.shape[0] in (1, BATCH)
        case = f"{name}, positions {what}, ranks {ranks}, tiles {sizes}: "
        assert not (some & ~got_some).any(), case + _wrong(some & ~got_some)
        assert not (got_full & ~full).any(), case + _wrong(got_full & ~full)
        assert not (got_full & ~got_some).any(), case + "whole but not seen at all"


STRUCTURED = ({"causal": True}, {"sliding_window": (6, 3)}, {"sliding_window": (None, 2)}, {"chunk_size": 12}, {})


@pytest.mark.parametrize("options", STRUCTURED, ids=str)
def test_tiles_are_exact_for_consecutive_positions(options: dict[str, Any]) -> None:
    for ranks in ((0, 0), (2, 1), (1, 2)):
        block = make("contiguous", *ranks, options)
        got, (some, full) = tiles(block, 8, 6), by_force(block, 8, 6)
        np.testing.assert_array_equal(np.broadcast_to(got.some, some.shape), some)
        np.testing.assert_array_equal(np.broadcast_to(got.full, full.shape), full)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [*STRUCTURED, {"causal": True, "sliding_window": (9, 9)}], ids=str)
def test_increasing_positions_have_the_tiles_that_the_same_positions_have_without_that_promise(
    options: dict[str, Any], layout: str
) -> None:
    for ranks, keys, offsets in (((2, 1), 24, (0,)), ((1, 1), 20, (-5, 30)), ((0, 2), 13, (40,))):
        whole = make(layout, *ranks, {})
        whole = dataclasses.replace(whole, q_positions=whole.q_positions + jnp.asarray(offsets)[:, None])
        whole = dataclasses.replace(seeing(whole, **options), monotone=True)
        block = whole.tile(0, LENGTH, 0, keys).padded_to(27, 36)
        got, (some, full) = tiles(block, 9, 6), by_force(block, 9, 6)
        for x, y in zip(got, tiles(_without_promise(block), 9, 6), strict=True):
            np.testing.assert_array_equal(x, y, f"ranks {ranks}, {keys} keys, {offsets=}")
        assert not (some & ~np.asarray(got.some)).any() and not (np.asarray(got.full) & ~full).any()


def _without_promise(block: Block) -> Block:
    return dataclasses.replace(block, monotone=False)


@pytest.mark.parametrize(("keys", "tile"), [(5, 8), (20, 12), (21, 24), (23, 24)])
@pytest.mark.parametrize("options", [*STRUCTURED, {"causal": True, "sliding_window": (2, 0)}], ids=str)
def test_tiles_that_end_with_padding_are_exact_too(options: dict[str, Any], keys: int, tile: int) -> None:
    for ranks in ((1, 1), (2, 1)):
        block = make("contiguous", *ranks, options).tile(0, LENGTH, 0, keys).padded_to(LENGTH, -(-keys // tile) * tile)
        assert block.monotone and block.padded
        got, (some, _) = tiles(block, 4, tile), by_force(block, 4, tile)
        np.testing.assert_array_equal(np.broadcast_to(got.some, some.shape), some)


@pytest.mark.parametrize("name", ["nothing", "causal", "window", "mask 8 ", "mask 9 "])
def test_padding_keys_are_invisible_and_do_not_widen_bounds(name: str) -> None:
    name = next(known for known in RULES if known.startswith(name))
    small = make("contiguous", 1, 1, RULES[name])
    block = small.tile(0, LENGTH, 0, 20).padded_to(27, 40)
    got, (some, full) = tiles(block, 9, 8), by_force(block, 9, 8)
    assert not np.asarray(got.some)[:, :, 3:].any(), "tiles of nothing but padding are seen"
    assert not np.asarray(got.full)[:, :, 2:].any(), "tiles with padding are said to be whole"
    np.testing.assert_array_equal(np.broadcast_to(got.some, some.shape), some)
    assert not (np.asarray(got.full) & ~full).any()
    assert np.asarray(got.full)[:, :, :2].any() == full.any()


@pytest.mark.parametrize(
    ("size", "groups"), [(1, 1), (2, 2), (3, 1), (3, 2), (3, 4), (4, 1), (4, 4), (8, 2), (16, 4), (100, 1)]
)
def test_tiles_of_chosen_keys_are_those_of_each_key_head(size: int, groups: int) -> None:
    draw = np.random.default_rng(size)
    ids = draw.integers(-1, -(-48 // size), (BATCH, 24, groups, 2))
    block = make_block(BATCH, 24, 48, heads=4, kv_heads=2, selected=ids, selected_size=size)
    seen = np.broadcast_to(np.asarray(visible(block)), (BATCH, 4, 24, 48))
    for q_tile, kv_tile in ((8, 16), (4, 6), (24, 48)):
        got = tiles_of_heads(block, q_tile, kv_tile)
        grid = seen.reshape(BATCH, 2, 2, 24 // q_tile, q_tile, 48 // kv_tile, kv_tile)
        assert got.some.shape == (BATCH, 1 if groups == 1 else 2, *grid.shape[3:6:2])
        np.testing.assert_array_equal(np.broadcast_to(got.some, grid.any((2, 4, 6)).shape), grid.any((2, 4, 6)))
        np.testing.assert_array_equal(np.broadcast_to(got.full, grid.all((2, 4, 6)).shape), grid.all((2, 4, 6)))
