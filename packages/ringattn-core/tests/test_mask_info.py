# SPDX-License-Identifier: Apache-2.0
"""Promises of MaskInfo: it keeps every form as given, refuses wrong arrays, and gives each array its sharding."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ringattn_core.errors import InputError
from ringattn_core.masks.info import MaskInfo


def given(info: MaskInfo) -> set[str]:
    return {field.name for field in dataclasses.fields(info) if getattr(info, field.name) is not None}


def all_int32(info: MaskInfo) -> bool:
    return all(leaf.dtype == jnp.int32 for leaf in jax.tree.leaves(info))


class TestSegments:
    @pytest.mark.parametrize("make", [list, np.array, jnp.array])
    def test_ids_are_kept_as_int32_whatever_they_come_in(self, make: Any) -> None:
        info = MaskInfo.from_segments(make([[0, 0, 7, -1]]), make([[0, 7]]))
        assert given(info) == {"q_segment_ids", "kv_segment_ids"}
        assert all_int32(info)
        np.testing.assert_array_equal(info.q_segment_ids, [[0, 0, 7, -1]])
        np.testing.assert_array_equal(info.kv_segment_ids, [[0, 7]])


class TestLengths:
    def test_tokens_are_zero_and_padding_is_minus_one(self) -> None:
        info = MaskInfo.from_lengths([2, 0, 3], [1, 4, 0], q_max=3, kv_max=4)
        np.testing.assert_array_equal(info.q_segment_ids, [[0, 0, -1], [-1, -1, -1], [0, 0, 0]])
        np.testing.assert_array_equal(info.kv_segment_ids, [[0, -1, -1, -1], [0, 0, 0, 0], [-1, -1, -1, -1]])
        assert all_int32(info)

    def test_without_a_maximum_the_longest_row_is_the_length(self) -> None:
        info = MaskInfo.from_lengths([2, 3])
        np.testing.assert_array_equal(info.q_segment_ids, [[0, 0, -1], [0, 0, 0]])
        np.testing.assert_array_equal(info.kv_segment_ids, info.q_segment_ids)

    def test_traced_lengths_work_where_the_maximum_is_given(self) -> None:
        made = jax.jit(lambda lengths: MaskInfo.from_lengths(lengths, q_max=4))(jnp.array([3]))
        np.testing.assert_array_equal(made.q_segment_ids, [[0, 0, 0, -1]])


class TestDocuments:
    def test_documents_are_numbered_and_the_rest_is_padding(self) -> None:
        info = MaskInfo.from_documents([2, 3], total=7)
        assert given(info) == {"q_segment_ids", "kv_segment_ids"}
        np.testing.assert_array_equal(info.q_segment_ids, [[0, 0, 1, 1, 1, -1, -1]])
        np.testing.assert_array_equal(info.kv_segment_ids, info.q_segment_ids)

    def test_rows_may_hold_different_numbers_of_documents(self) -> None:
        info = MaskInfo.from_documents([[1, 2], [4]])
        np.testing.assert_array_equal(info.q_segment_ids, [[0, 1, 1, -1], [0, 0, 0, 0]])

    def test_positions_restart_at_each_document_where_asked(self) -> None:
        info = MaskInfo.from_documents([[2, 3], [1, 0, 2]], total=6, restart_positions=True)
        np.testing.assert_array_equal(info.q_positions, [[0, 1, 0, 1, 2, 0], [0, 0, 1, 0, 1, 2]])
        np.testing.assert_array_equal(info.kv_positions, info.q_positions)
        assert all_int32(info)


class TestDenseMask:
    @pytest.mark.parametrize(
        ("shape", "promoted"),
        [((3, 5), (1, 1, 3, 5)), ((2, 3, 5), (2, 1, 3, 5)), ((2, 1, 3, 5), (2, 1, 3, 5)), ((1, 4, 3, 5), (1, 4, 3, 5))],
    )
    def test_it_is_kept_bit_for_bit(self, shape: tuple[int, ...], promoted: tuple[int, ...]) -> None:
        dense = np.random.default_rng(0).random(shape) < 0.5
        info = MaskInfo.from_mask(dense)
        assert given(info) == {"attention_mask"}
        assert info.attention_mask is not None
        assert info.attention_mask.shape == promoted
        np.testing.assert_array_equal(np.asarray(info.attention_mask).reshape(shape), dense)


class TestPositions:
    @pytest.mark.parametrize("positions", [[3, 0, 1], [[3, 0, 1], [0, 0, 0]]])
    def test_they_are_kept_in_the_order_given(self, positions: Any) -> None:
        info = MaskInfo.from_positions(positions)
        assert given(info) == {"q_positions", "kv_positions"}
        np.testing.assert_array_equal(info.q_positions, positions)
        np.testing.assert_array_equal(info.kv_positions, positions)


class TestSpecs:
    def test_every_array_is_sharded_by_what_its_axes_mean(self) -> None:
        info = MaskInfo(
            q_segment_ids=jnp.zeros((2, 4), jnp.int32),
            q_positions=jnp.zeros(4, jnp.int32),
            kv_positions=jnp.zeros((2, 4), jnp.int32),
            attention_mask=jnp.ones((2, 3, 4, 8), bool),
        )
        specs = info.specs(("dp", "fsdp"), "sp", "tp")
        assert {name: getattr(specs, name) for name in given(specs)} == {
            "q_segment_ids": P(("dp", "fsdp"), "sp"),
            "q_positions": P("sp"),
            "kv_positions": P(("dp", "fsdp"), "sp"),
            "attention_mask": P(("dp", "fsdp"), "tp", "sp", None),
        }

    def test_they_match_the_structure_so_that_shard_map_takes_them(self) -> None:
        info = MaskInfo.from_documents([[4, 4], [8]], restart_positions=True)
        mesh = jax.make_mesh((2, 4), ("dp", "sp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        specs = info.specs("dp", "sp")
        shapes: list[Any] = []

        def local(part: MaskInfo) -> MaskInfo:
            shapes.append(jax.tree.map(jnp.shape, part))
            return part

        out = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=specs)(info)
        assert shapes[0].q_segment_ids == (1, 2)
        jax.tree.map(np.testing.assert_array_equal, out, info)


REFUSED: dict[str, tuple[Any, str]] = {
    "ids of fractions": (lambda: MaskInfo.from_segments([[1.0]]), "q_segment_ids: has dtype float64"),
    "ragged ids": (lambda: MaskInfo.from_segments([[1], [1, 2]]), "q_segment_ids: is not an array"),
    "more than the maximum": (lambda: MaskInfo.from_lengths([3], q_max=2), "q_lengths: holds 3, more than q_max=2"),
    "a negative length": (lambda: MaskInfo.from_lengths([-1]), "q_lengths: holds -1"),
    "other rows": (lambda: MaskInfo.from_lengths([1, 2], [1]), "kv_lengths: has 1 rows where q_lengths has 2"),
    "no maximum": (
        lambda: jax.jit(MaskInfo.from_lengths)(jnp.array([3])),
        "q_max: is not given and q_lengths is traced",
    ),
    "more than the total": (lambda: MaskInfo.from_documents([3, 4], total=6), "row 0 sums to 7, more than total=6"),
    "a total that is no length": (
        lambda: MaskInfo.from_documents([2], total=6.0),
        "total: got 6.0. It needs an integer",
    ),
    "numbers for a mask": (lambda: MaskInfo.from_mask(np.zeros((2, 2), np.float32)), "scores to add go in bias="),
    "a mask of one axis": (lambda: MaskInfo.from_mask(np.ones(3, bool)), r"attention_mask: has shape \(3,\)"),
    "far positions": (lambda: MaskInfo.from_positions([0], np.array([2**30])), r"kv_positions: has the value .* 2\^30"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_mask_is_refused(name: str) -> None:
    make, fact = REFUSED[name]
    with pytest.raises(InputError, match=fact):
        make()
