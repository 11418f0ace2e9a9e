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


def ids(q: Any, kv: Any = None) -> dict[str, Any]:
    return {"q_segment_ids": q, "kv_segment_ids": q if kv is None else kv}


def places(x: Any) -> dict[str, Any]:
    return {"q_positions": x, "kv_positions": x}


DENSE = np.random.default_rng(0).random((2, 3, 5)) < 0.5
PADDED = [[0, 0, -1], [-1, -1, -1], [0, 0, 0]], [[0, -1, -1, -1], [0, 0, 0, 0], [-1, -1, -1, -1]]
RESTARTING = ids([[0, 0, 1, 1, 1, -1], [0, 2, 2, -1, -1, -1]]) | places([[0, 1, 0, 1, 2, 0], [0, 0, 1, 0, 1, 2]])
FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ids": (lambda: MaskInfo.from_segments([[0, 0, 7, -1]], np.array([[0, 7]])), ids([[0, 0, 7, -1]], [[0, 7]])),
    "lengths": (lambda: MaskInfo.from_lengths([2, 0, 3], [1, 4, 0], q_max=3, kv_max=4), ids(*PADDED)),
    "lengths without a maximum": (lambda: MaskInfo.from_lengths([2, 3]), ids([[0, 0, -1], [0, 0, 0]])),
    "traced lengths": (
        lambda: jax.jit(lambda lengths: MaskInfo.from_lengths(lengths, q_max=4))(jnp.array([3])),
        ids([[0, 0, 0, -1]]),
    ),
    "documents": (lambda: MaskInfo.from_documents([2, 3], total=7), ids([[0, 0, 1, 1, 1, -1, -1]])),
    "restarting": (lambda: MaskInfo.from_documents([[2, 3], [1, 0, 2]], total=6, restart_positions=True), RESTARTING),
    "positions": (lambda: MaskInfo.from_positions([3, 0, 1]), places([3, 0, 1])),
    "a dense mask": (lambda: MaskInfo.from_mask(DENSE[0]), {"attention_mask": DENSE[0][None, None]}),
    "a dense mask of heads": (lambda: MaskInfo.from_mask(DENSE[None]), {"attention_mask": DENSE[None]}),
    "a dense mask of rows": (lambda: MaskInfo.from_mask(DENSE), {"attention_mask": DENSE[:, None]}),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_kept_as_given(name: str) -> None:
    make, wanted = FORMS[name]
    info = make()
    assert given(info) == wanted.keys()
    for field, x in wanted.items():
        np.testing.assert_array_equal(getattr(info, field), x)
        assert getattr(info, field).dtype == (bool if field == "attention_mask" else jnp.int32)


def test_every_array_is_sharded_by_what_its_axes_mean() -> None:
    info = MaskInfo(
        q_segment_ids=jnp.zeros((2, 4), jnp.int32),
        q_positions=jnp.zeros(4, jnp.int32),
        kv_positions=jnp.zeros((2, 4), jnp.int32),
        attention_mask=jnp.ones((2, 3, 4, 8), bool),
        kv_range=(jnp.zeros((2, 4), jnp.int32), jnp.zeros((1, 3, 4), jnp.int32)),
    )
    specs = info.specs(("dp", "fsdp"), "sp", "tp")
    assert {name: getattr(specs, name) for name in given(specs)} == {
        "q_segment_ids": P(("dp", "fsdp"), "sp"),
        "q_positions": P("sp"),
        "kv_positions": P(("dp", "fsdp"), "sp"),
        "attention_mask": P(("dp", "fsdp"), "tp", "sp", None),
        "kv_range": (P(("dp", "fsdp"), "sp"), P(None, "tp", "sp")),
    }
    shared = MaskInfo.from_spans(jnp.zeros((1, 4), jnp.int32), window=1)  # one row for the whole batch
    assert shared.specs("dp", "sp").kv_range == (P(None, "sp"), P(None, "sp"))


REFUSED: dict[str, tuple[Any, str]] = {
    "ids of fractions": (lambda: MaskInfo.from_segments([[1.0]]), "q_segment_ids: has dtype float64"),
    "ragged ids": (lambda: MaskInfo.from_segments([[1], [1, 2]]), "q_segment_ids: is not an array"),
    "more than the maximum": (lambda: MaskInfo.from_lengths([3], q_max=2), "q_lengths: holds 3, more than q_max=2"),
    "a negative length": (lambda: MaskInfo.from_lengths([-1]), "q_lengths: holds -1"),
    "other rows": (lambda: MaskInfo.from_lengths([1, 2], [1]), "kv_lengths: has 1 rows where q_lengths has 2"),
    "no maximum": (lambda: jax.jit(MaskInfo.from_lengths)(jnp.array([3])), "q_max: is not given and .* is traced"),
    "more than the total": (lambda: MaskInfo.from_documents([3, 4], total=6), "row 0 sums to 7, more than total=6"),
    "numbers for a mask": (lambda: MaskInfo.from_mask(np.zeros((2, 2), np.float32)), "scores to add go in bias="),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_mask_is_refused(name: str) -> None:
    make, fact = REFUSED[name]
    with pytest.raises(InputError, match=fact):
        make()
