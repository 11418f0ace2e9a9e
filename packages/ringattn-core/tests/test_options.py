# SPDX-License-Identifier: Apache-2.0
"""Promises of the options: each has one row, all work by keyword, and the error for a wrong name has the right one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_conformance.cases import NAMED, Case
from ringattn_conformance.ranks import Placement, place
from ringattn_core import Feature, per_shard, ring_attention
from ringattn_core.backends.selection import select
from ringattn_core.call import dispatch
from ringattn_core.call.validation import validated
from ringattn_core.errors import InputError

T, N = 8, 2
Q, K, V = (jax.random.normal(key, (1, T, N, 4)) for key in jax.random.split(jax.random.key(0), 3))


@pytest.mark.parametrize(
    ("case", "placement"),
    [
        *((case, Placement(1)) for case in NAMED.values()),
        *((NAMED["gqa"], Placement(1, layout)) for layout in ("zigzag", "striped")),
    ],
    ids=str,
)
def test_a_call_needs_the_features_that_the_conformance_suite_says(
    case: Case, placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: list[frozenset[Feature]] = []

    def spy(backend: str, required: frozenset[Feature], *rest: Any) -> Any:
        needed.append(required)
        return select(backend, required, *rest)

    monkeypatch.setattr(dispatch, "select", spy)
    placed = place(case, placement, "xla")
    jax.eval_shape(lambda: placed.local(placed.operands, placed.fixed, axis_name=None))
    assert needed == [case.needs | placement.needs]


@pytest.mark.parametrize(
    ("attend", "name", "remedy"),
    [
        (ring_attention, "segment_ids", "Pass q_segment_ids and kv_segment_ids"),
        (per_shard("xla"), "cfg", "Pass fwd_params and bwd_params"),
        (ring_attention, "causl", "Pass causal"),
        (ring_attention, "zzz", "Its arguments are query, key, value, softmax_aux, bias,"),
    ],
)
def test_an_unknown_name_is_told_the_right_one_or_all_of_them(attend: Any, name: str, remedy: str) -> None:
    with pytest.raises(InputError, match=f"{name}: is not an argument of ring_attention. {remedy}"):
        attend(Q, K, V, **{name: True})


@pytest.mark.parametrize("arguments, given", [((Q,), {}), ((Q, K, V), {"key": K}), ((Q, K, V, *[None] * 15), {})])
@pytest.mark.parametrize("attend", [ring_attention, per_shard("xla")])
def test_a_call_that_does_not_bind_is_pythons_type_error(attend: Any, arguments: Any, given: Any) -> None:
    with pytest.raises(TypeError, match="ring_attention"):
        attend(*arguments, **given)


@pytest.mark.parametrize("given", [True, 1, np.True_, np.int64(1), jnp.asarray(True)])
def test_a_flag_is_whatever_equals_true_or_false(given: Any) -> None:
    assert validated(Q, K, V, causal=given).reach.causal is True


@pytest.mark.parametrize("given", [2, -1, 1.0, "yes", None])
def test_a_flag_is_nothing_else(given: Any) -> None:
    with pytest.raises(InputError, match=r"causal: got .* It must be True or False"):
        validated(Q, K, V, causal=given)
