# SPDX-License-Identifier: Apache-2.0
"""Outcomes: an answer where it is owed, a refusal where it is not, and neither in place of the other."""

from collections.abc import Iterator
from typing import Any

import pytest
from ringattn_conformance.cases import Case
from ringattn_conformance.outcomes import agrees, declared, owed
from ringattn_conformance.ranks import Placement, place
from ringattn_core import Backend, Block, Feature
from ringattn_core.backends.discovery import registered
from ringattn_core.errors import UnsupportedFeatureError
from ringattn_testing.conformance.reference_kernels import Dense


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    features = {Feature.CAUSAL}
    with registered(Backend("half", 1, ("cpu",), features, kernel="nowhere:KERNEL"), Dense()):
        yield


def _refuse(backend: str, feature: str) -> None:
    raise UnsupportedFeatureError(backend, feature, "planned", (), (backend,))


def test_an_answer_is_owed_for_what_is_supported():
    with owed("half", [Feature.CAUSAL]) as right:
        assert right
    with pytest.raises(UnsupportedFeatureError), owed("half", [Feature.CAUSAL]):
        _refuse("half", "CAUSAL")


@pytest.mark.parametrize("feature", [Feature.BIAS, Feature.SINKS])
def test_a_refusal_is_the_passing_outcome_for_the_rest(feature: Feature):
    with owed("half", [Feature.CAUSAL, feature]) as right:
        assert not right
        _refuse("half", feature.name)


def test_an_answer_where_a_refusal_is_owed_fails():
    with pytest.raises(pytest.fail.Exception), owed("half", [Feature.BIAS]):
        pass


def test_a_refusal_must_name_the_backend_and_the_feature():
    with pytest.raises(AssertionError), owed("half", [Feature.BIAS]):
        _refuse("another", "BIAS")
    with pytest.raises(AssertionError), owed("half", [Feature.BIAS]):
        _refuse("half", "CAUSAL")


def test_a_call_of_a_dtype_that_is_not_declared_gets_one_that_is():
    """Otherwise a backend of half precision would pass by refusing the tests that do not name a dtype."""
    with registered(
        Backend("narrow", 1, ("cpu",), {Feature.BFLOAT16, Feature.CAUSAL}, kernel="nowhere:KERNEL"), Dense()
    ):
        assert declared("narrow", Case("float32", causal=True)).changes == {"causal": True, "dtype": "bfloat16"}


class OfEight(Dense):
    """A kernel for head sizes that 8 divides, up to 32."""

    def forward(self, block: Block, partial: Any) -> Any:
        sizes = block.q.shape[-1], block.value_dim
        assert all(size % 8 == 0 and size <= 32 for size in sizes), sizes
        return super().forward(block, partial)


@pytest.mark.parametrize(
    ("sizes", "taken"), [((21, 5), (24, 8)), ((12, 9), (16, 24)), ((32, 32), (32, 32)), ((33, 1), None)]
)
def test_a_backend_gets_heads_of_the_sizes_that_it_declares_and_refuses_larger_ones(sizes: Any, taken: Any):
    features = {Feature.FLOAT32, Feature.UNEQUAL_VALUE_DIM}
    limits: dict[str, Any] = {"largest_head": 32, "head_multiple": 8}
    with registered(Backend("eight", 1, ("cpu",), features, kernel="nowhere:KERNEL", **limits), OfEight()):
        placed = place(Case("sizes", head_dim=sizes[0], value_dim=sizes[1]), Placement(1), "eight")
        agrees(placed)
    assert taken in (None, (placed.case.head_dim, placed.case.value_dim))
