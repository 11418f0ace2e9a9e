# SPDX-License-Identifier: Apache-2.0
"""Promises on what kernels are told of visibility: all that is visible is visited, and masked where it must be."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.contract.protocol import Block
from ringattn_core.contract.tiles import Tiles
from ringattn_core.contract.visibility import visible
from ringattn_core.masks import Local
from ringattn_testing.triton.given_blocks import make_block, with_option
from ringattn_triton.visited_tiles import ELEMENTS, RANK_ROWS, Table, of_bitmap, seen, table

KINDS = {"ranges": (False, True), "lists": (True, False), "lists around a run": (True, True)}
"""The forms of a table of tiles, by name: whether it lists tiles, and whether it has a run of tiles."""


def visited(found: Table, group: int, row: int) -> tuple[list[int], list[int]]:
    """The tiles that a program masks, and those that it does not, as kernels read the table."""
    bounds = [int(x) for x in found.bounds[group if found.shape.grouped else 0, row]]
    if not found.shape.listed:
        lo, hi, full_lo, full_hi = bounds
        return [*range(lo, full_lo), *range(full_hi, hi)], [*range(full_lo, full_hi)]
    assert found.tiles is not None
    masked, every = bounds[:2]
    listed = [int(x) for x in found.tiles[group if found.shape.grouped else 0, row]]
    return listed[:masked], [*range(*bounds[2:])] if found.shape.run else listed[masked:every]


def said(some: np.ndarray, full: np.ndarray, listed: bool, run: bool) -> tuple[list[int], list[int]]:
    """The bounds and the list of one row."""
    seen = [int(x) for x in np.flatnonzero(some)]
    lo, hi = (seen[0], seen[-1] + 1) if seen else (0, 0)
    edges = [int(x) for x in np.flatnonzero(np.diff(full.astype(int), prepend=0, append=0))]
    runs = zip(edges[::2], edges[1::2], strict=True)
    best = max(runs, key=lambda ends: (ends[1] - ends[0], ends[1]), default=(lo, lo))
    if not listed:
        return [lo, hi, *best], []
    unmasked = [*range(*best)] if run else [int(x) for x in np.flatnonzero(full)]
    masked = [x for x in seen if x not in unmasked]
    if run:
        return [len(masked), sum(x < best[0] for x in masked), *best], masked
    return [len(masked), len(seen), 0, 0], masked + unmasked


def bitmap(groups: int, columns: int) -> Tiles:
    """Rows that see nothing, all of it, all but in part, two runs as long as each other, and tiles here and there."""
    draw = np.random.default_rng(columns)
    part = -(-columns // 3)
    runs = (np.arange(columns) < part) | (np.arange(columns) >= columns - part)
    none, every = np.zeros(columns, bool), np.ones(columns, bool)
    rows = [(none, none), (every, every), (every, none), (every, runs), (runs, runs)]
    for share in (0.02, 0.5, 0.9, 0.99):
        some = draw.random((3, columns)) < 0.5 + share / 2
        rows += zip(some, some & (draw.random((3, columns)) < share), strict=True)
    some, full = (np.stack(x) for x in zip(*rows, strict=True))
    order = np.stack([draw.permutation(len(rows)) for _ in range(groups)])
    return Tiles(*(jnp.asarray(x[order]) for x in (some, full)))


def seen_pairs(block: Block) -> np.ndarray:
    shape = (block.q.shape[0], block.q.shape[2], block.q_length, block.kv_length)
    seen = visible(block)
    return np.broadcast_to(True if seen is None else np.asarray(seen), shape)


@pytest.mark.parametrize(("groups", "columns"), [(3, 1), (1, 64), (3, 300), (1, 2 * ELEMENTS + 100)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_table_says_what_its_bitmap_says(kind: str, groups: int, columns: int) -> None:
    found = bitmap(groups, columns)
    for by_keys, ragged in ((False, False), (True, False), (True, True)):
        given = Tiles(*((x.swapaxes(1, 2) if by_keys else x)[:, None] for x in found))
        bounds, listed, *_ = of_bitmap(given, *KINDS[kind], by_keys, ragged)
        assert (listed is not None) == KINDS[kind][0]
        some, full = (np.array(x) for x in found)
        full[..., columns - ragged :] = False
        for at in np.ndindex(*some.shape[:2]):
            want, tiles = said(some[at], full[at], *KINDS[kind])
            case = f"group and row {at}, {by_keys=}, {ragged=}"
            np.testing.assert_array_equal(bounds[at], want, case)
            if listed is not None:
                np.testing.assert_array_equal(listed[at][: len(tiles)], tiles, case)


@pytest.mark.parametrize(("groups", "columns"), [(3, 1), (1, 8), (3, 300)])
def test_ranks_count_the_rows_before_that_see_a_column(columns: int, groups: int) -> None:
    rows = bitmap(groups, columns)
    of_few, of_many = rows, Tiles(*(jnp.concatenate([x] * 12, 1)[:, : 3 * RANK_ROWS + 5] for x in rows))
    for found in (of_few, of_many, Tiles(*(x[:, :1] for x in rows))):
        ranks = of_bitmap(Tiles(*(x[:, None] for x in found)), False, True, False, False, ranked=True).ranks
        seen = np.asarray(found.some, int)
        np.testing.assert_array_equal(ranks, np.concatenate([np.cumsum(seen, 1) - seen, seen.sum(1, keepdims=True)], 1))


def test_causal_queries_visit_no_tile_after_them_and_mask_the_diagonal_alone() -> None:
    block = make_block(1, 64, 64, causal=True)
    found = table(block, 16, 16)
    assert [visited(found, 0, row) for row in range(4)] == [([row], list(range(row))) for row in range(4)]


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {}, {"causal": True}, {"causal": True, "sliding_window": (20, 0)}, {"sliding_window": (9, 30)},
        {"causal": True, "chunk_size": 30}, {"causal": True, "offset": 40}, {"sliding_window": (None, -20)},
    ],
    ids=str,
)  # fmt: skip
def test_positions_that_increase_need_no_bitmap(fields: dict[str, Any], by_keys: bool) -> None:
    """The kernel finds in two looks at a tile what the bitmap says, and XLA computes no bitmap."""
    for queries, keys in ((150, 150), (64, 200), (200, 64)):
        block = make_block(2, queries, keys, **fields)
        found = table(block, 16, 32, by_keys=by_keys, ranked=by_keys, heads=1, counters=700)
        ragged = by_keys and queries % 16 != 0
        want = of_bitmap(seen(block, 16, 32), False, True, by_keys, ragged, by_keys, 700)
        assert block.monotone and not found.shape.listed
        for array, wanted in zip(found[:-1], want[:-1], strict=True):
            np.testing.assert_array_equal(*(np.zeros(1) if x is None else x for x in (array, wanted)))
        program = jax.make_jaxpr(lambda block: table(block, 16, 32, by_keys=by_keys)[:-1])(block)
        assert "i8[" not in str(program)


@pytest.mark.parametrize("by_keys", [False, True])
def test_windows_of_heads_are_one_run_of_tiles_in_which_each_is_seen(by_keys: bool) -> None:
    windows = Local(40, 0), Local(9, 30)
    block = make_block(1, 150, 150, heads=4, masks=windows, mask_of_head=(1, 0, 0, 1))
    found = table(block, 16, 16, by_keys=by_keys, ranked=by_keys, heads=1)
    assert block.first is not None and block.first.shape[1] == 4 and not found.shape.listed
    pairs = np.zeros((160, 160), bool)
    pairs[:150, :150] = seen_pairs(block)[0].any(0)
    seen = pairs.reshape(10, 16, 10, 16).any((1, 3))
    seen = seen.T if by_keys else seen
    for row in range(10):
        assert sorted(itertools.chain(*visited(found, 0, row))) == list(np.flatnonzero(seen[row]))
    if found.ranks is not None:
        np.testing.assert_array_equal(found.ranks[0, -1], seen.sum(0))


def test_documents_are_listed_so_that_none_visits_another() -> None:
    ids = np.repeat(np.arange(4), 16)[None].astype(np.int32)
    order = np.random.default_rng(0).permutation(64)
    block = make_block(1, 64, 64, q_segments=ids, kv_segments=ids[:, order])
    found, expected = (
        table(block, 16, 16),
        seen_pairs(block)[0, 0].reshape(4, 16, 4, 16).any((1, 3)),
    )
    assert found.shape.listed and not found.shape.grouped
    for row in range(4):
        assert sorted(itertools.chain(*visited(found, 0, row))) == list(np.flatnonzero(expected[row]))


def test_each_key_head_has_a_list_of_its_own_where_choices_differ() -> None:
    block = with_option("chosen blocks of 16", 64, 64)
    found, seen = table(block, 16, 16), seen_pairs(block)
    assert found.shape.kv_heads == 2 and found.shape.grouped
    of_heads = seen.reshape(2, 2, 2, 4, 16, 4, 16).any((2, 4, 6))
    for number, (batch, head, row) in enumerate(np.ndindex(2, 2, 4)):
        bounds, listed = (np.asarray(x).reshape(16, -1)[number] for x in (found.bounds, found.tiles))
        assert sorted(listed[: bounds[1]]) == list(np.flatnonzero(of_heads[batch, head, row]))
