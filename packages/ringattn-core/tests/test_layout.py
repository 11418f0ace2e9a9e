# SPDX-License-Identifier: Apache-2.0
"""Promises of the layouts: ranks hold every token once, in increasing order, and conversions are inverse."""

import inspect
import re
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.errors import InputError
from ringattn_core.placement import layout as layouts
from ringattn_core.placement import reorder

unchecked = inspect.unwrap(reorder.to_layout)  # without the run-time checks of annotations
NAMES = pytest.mark.parametrize("layout", layouts.LAYOUTS)
SHARDS = st.tuples(st.sampled_from(layouts.LAYOUTS), st.integers(1, 6), st.integers(1, 5))


def length_of(layout: str, ranks: int, each: int) -> int:
    return ranks * each * layouts.pieces(layout)


class TestWhereTokensAre:
    def test_each_layout_is_the_one_that_its_name_says(self) -> None:
        expected = {
            "contiguous": [0, 1, 2, 3, 4, 5, 6, 7],
            "zigzag": [0, 1, 6, 7, 2, 3, 4, 5],
            "dual_chunk_swap": [0, 1, 6, 7, 2, 3, 4, 5],
            "striped": [0, 2, 4, 6, 1, 3, 5, 7],
        }
        for layout, order in expected.items():
            np.testing.assert_array_equal(layouts.Shards(layouts.canonical(layout), 2).order(8), order)

    @pytest.mark.parametrize(
        "shards",
        [
            *(layouts.Shards(layout, 3) for layout in layouts.LAYOUTS),
            layouts.Shards("zigzag", 4, folded=True), layouts.Shards("striped", 2, stripe=4),
        ],
        ids=str,
    )  # fmt: skip
    def test_the_tokens_before_an_index_are_counted(self, shards: layouts.Shards) -> None:
        index = np.array([-(2**31), -1, *range(8 * shards.count + 2), 2**31 - 1], np.int32)
        for rank in range(shards.count):
            held = np.asarray(shards.indices(rank, 8))
            counted = shards.before(jnp.asarray(index), jnp.asarray(rank), 8)
            np.testing.assert_array_equal(counted, (held[None] < index[:, None]).sum(1))

    @pytest.mark.parametrize("layout", layouts.LAYOUTS)
    def test_those_of_the_only_shard_are_a_constant_of_the_program_unless_it_is_long(self, layout: str) -> None:
        def operations(shards: int, length: int) -> str:
            return jax.jit(lambda rank: layouts.Shards(layout, shards).indices(rank, length)).lower(0).as_text()

        short, long = layouts.MOST_CONSTANT, layouts.MOST_CONSTANT + 2
        assert "iota" not in operations(1, short)
        assert "iota" in operations(1, long) and "iota" in operations(2, short)
        np.testing.assert_array_equal(layouts.Shards(layout, 1).indices(0, 8), np.arange(8))


class TestReordering:
    @hypothesis.given(shard=SHARDS, axis=st.sampled_from([0, 1, 2, -1, -2]))
    def test_to_and_from_are_inverse_on_any_axis(self, shard: tuple[str, int, int], axis: int) -> None:
        layout, ranks, _ = shard
        shape = [2, 3, 2]
        shape[axis] = length_of(*shard)
        x = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
        there = reorder.to_layout(x, layout, ranks, axis)
        np.testing.assert_array_equal(reorder.from_layout(there, layout, ranks, axis), x)
        np.testing.assert_array_equal(
            reorder.to_layout(reorder.from_layout(x, layout, ranks, axis), layout, ranks, axis), x
        )

    @hypothesis.given(shard=SHARDS)
    def test_an_even_split_gives_each_rank_its_tokens(self, shard: tuple[str, int, int]) -> None:
        layout, ranks, _ = shard
        length = length_of(*shard)
        x = reorder.to_layout(np.arange(length, dtype=np.int32)[None], layout, ranks)
        for rank, part in enumerate(np.split(x[0], ranks)):
            np.testing.assert_array_equal(part, layouts.Shards(layout, ranks).indices(rank, length // ranks))

    @pytest.mark.parametrize("reordered", [reorder.to_layout, reorder.from_layout])
    def test_a_length_that_does_not_divide_is_refused_with_the_next_that_does(self, reordered: Any) -> None:
        with pytest.raises(InputError, match=r"lengths that 8 divides, but x has 12\. Pad it to 16"):
            reordered(np.zeros((1, 12)), "zigzag", 4)

    @pytest.mark.parametrize("ring_size", [0, 2.0, True, None])
    def test_a_ring_of_no_ranks_is_refused(self, ring_size: Any) -> None:
        with pytest.raises(InputError, match=re.escape(f"ring_size: got {ring_size!r}. Pass the number")):
            unchecked(np.zeros((1, 8)), "striped", ring_size)

    def test_an_unknown_layout_is_refused_with_those_that_are_known(self) -> None:
        known = "'contiguous', 'zigzag', 'striped', 'dual_chunk_swap'"
        with pytest.raises(InputError, match=f"layout: got 'zigzg'. Known layouts: {known}"):
            reorder.to_layout(np.zeros((1, 8)), "zigzg", 2)


class TestShardsOfNeighbours:
    @NAMES
    @pytest.mark.parametrize(("groups", "shards"), [(1, 4), (2, 3), (3, 2), (4, 1)])
    def test_they_are_one_shard_of_fewer_ranks(self, layout: str, groups: int, shards: int) -> None:
        whole = jnp.asarray(np.random.default_rng(0).random((2, 6 * groups * shards)))
        for group in range(groups):
            ranks = range(group * shards, (group + 1) * shards)
            split = layouts.Shards(layout, groups * shards)
            each = jnp.concatenate([split.indices(rank, 6) for rank in ranks])[:, None]
            one = layouts.of_neighbours(each, layout, shards, 0)
            held = layouts.Shards(layout, groups, shards).indices(group, 6 * shards)
            np.testing.assert_array_equal(one[:, 0], held)
            np.testing.assert_array_equal(layouts.to_neighbours(one, layout, shards, 0), each)
            columns = layouts.Shards(layout, groups, shards).columns(whole, group)
            np.testing.assert_array_equal(columns, whole[:, held])
            put = layouts.Shards(layout, groups, shards).put_columns(jnp.zeros_like(whole), columns, group)
            np.testing.assert_array_equal(put, jnp.zeros_like(whole).at[:, held].set(columns))
        everything = np.concatenate(
            [layouts.Shards(layout, groups, shards).indices(group, 6 * shards) for group in range(groups)]
        )
        np.testing.assert_array_equal(layouts.Shards(layout, groups, shards).order(len(everything)), everything)
