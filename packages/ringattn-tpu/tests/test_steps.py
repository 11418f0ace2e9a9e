# SPDX-License-Identifier: Apache-2.0
"""Every visible pair of tiles is visited exactly once, and no other."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.contract.protocol import Block
from ringattn_core.contract.tiles import tiles
from ringattn_testing.tpu.blocks import make_block
from ringattn_tpu import block_sizes
from ringattn_tpu import steps as listing
from ringattn_tpu.steps import MASKED, PAIRED, Steps

TILE = 16
# One document in the first row, so that most of its tiles need no mask; three in the second.
DOCUMENTS = {name: np.int32([[0] * n, np.arange(n) // 20]) for name, n in (("q_segments", 41), ("kv_segments", 53))}
# Of masks, `steps` reads only which pairs of tiles core says are visible.
SEEN = {"all": {}, "documents that differ by row": DOCUMENTS, "nothing": {"causal": True, "offset": 41}}


class Read(NamedTuple):
    """A step as a kernel reads it."""

    row: int
    own: int
    visiting: int
    flags: int

    def has(self, flag: int) -> bool:
        return bool(self.flags & flag)


def read(found: Steps) -> list[Read]:
    numbering = found.numbering
    return [
        Read(*(int(part(step)) for part in (numbering.batch, numbering.own, numbering.visiting)), int(step) & 63)
        for step in np.asarray(found.listed[: int(found.length)])
    ]


def whole(block: Block, kv_tile: int = TILE) -> Block:
    return block.padded_to(-(-block.q_length // TILE) * TILE, -(-block.kv_length // kv_tile) * kv_tile)


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("seen", SEEN)
def test_no_tile_is_visited_or_masked_that_core_says_need_not_be(seen: str, by_keys: bool):
    block = whole(make_block(**SEEN[seen]))
    some, full = (np.asarray(x[:, 0].swapaxes(1, 2) if by_keys else x[:, 0]) for x in tiles(block, TILE, TILE))
    steps = read(listing.steps(block, TILE, TILE, by_keys))
    assert [(step.row, step.own, step.visiting) for step in steps] == [tuple(place) for place in np.argwhere(some)]
    assert [step.has(MASKED) for step in steps] == [not full[step[:3]] for step in steps]


def test_one_list_has_what_any_batch_row_sees_and_is_whole_where_all_rows_are():
    block = whole(make_block(**DOCUMENTS))
    some, full = (np.asarray(x[:, 0]) for x in tiles(block, TILE, TILE))
    assert some.shape[0] == 2 and not np.array_equal(some[0], some[1])
    found = listing.steps(block, TILE, TILE, one_list=True)
    steps = read(found)
    assert found.rows == 1
    assert [step[1:3] for step in steps] == [tuple(place) for place in np.argwhere(some.any(0))]
    assert [step.has(MASKED) for step in steps] == [not full.all(0)[step[1:3]] for step in steps]


@pytest.mark.parametrize(
    ("index", "paired"),
    [
        (np.arange(48), (True, True, True)),
        (np.arange(48) + 4000, (True, True, True)),
        (np.arange(48) + 4008, (False, False, False)),
        (np.arange(48) * 16, (False, False, False)),
        (np.concatenate([np.arange(8) + 8, np.arange(40) + 400]), (False, False, False)),
        (np.concatenate([np.arange(16) + 32, np.arange(32) + 400]), (True, True, True)),
        (np.where(np.arange(48) < 35, np.arange(48), -1), (True, True, False)),
    ],
)
@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("by_keys", [False, True])
def test_rows_share_draws_only_where_both_indices_come_in_runs_of_16(index, paired, by_keys: bool, of_keys: bool):
    given = {"kv_index" if of_keys else "q_index": np.int32(index)[None]}
    block = make_block(q_length=48, kv_length=48, dropout_prob=0.1, seed=np.uint32([1, 2]), **given)
    steps = read(listing.steps(block, TILE, TILE, by_keys))
    assert {(step.own if by_keys == of_keys else step.visiting): step.has(PAIRED) for step in steps} == dict(
        enumerate(paired)
    )
    assert len(steps) == 9 and sum(step.has(PAIRED) for step in steps) == 3 * sum(paired)


def test_the_list_of_documents_is_made_on_the_device():
    """Ids that are known only when the program runs decide how long the list is."""

    def length(documents: jax.Array) -> jax.Array:
        block = make_block(q_length=64, kv_length=64, q_segments=documents, kv_segments=documents)
        return listing.steps(block, TILE, TILE).length

    together, apart = jnp.zeros((2, 64), jnp.int32), jnp.tile(jnp.arange(64, dtype=jnp.int32) // TILE, (2, 1))
    assert [int(jax.jit(length)(documents)) for documents in (together, apart)] == [2 * 16, 2 * 4]


@pytest.mark.parametrize(("window", "tiles_of_a_query"), [(512, 3), (4096, 5)])
def test_a_window_visits_one_tile_more_than_it_fills(window: int, tiles_of_a_query: int):
    length = 16384
    block = make_block(1, length, length, 1, dtype=jnp.bfloat16, causal=True, sliding_window=(window, None))
    sizes = block_sizes.choose(block, block.rule.fwd_params)
    assert window == (tiles_of_a_query - 1) * sizes.kv_tile
    visited = np.bincount([step.own for step in read(listing.steps(block, sizes.q_tile, sizes.kv_tile))])
    assert visited.max() == tiles_of_a_query and set(visited[tiles_of_a_query:]) == {tiles_of_a_query}
