# SPDX-License-Identifier: Apache-2.0
"""Outcomes: an answer where it is owed, a refusal where it is not, and neither in place of the other."""

from collections.abc import Iterator

import pytest
from reference_kernels import Dense
from ringattn_conformance.outcomes import owed, supports
from ringattn_core import Backend, Feature
from ringattn_core.backends.discovery import registered
from ringattn_core.errors import UnsupportedFeatureError


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    features = {Feature.CAUSAL}
    with registered(Backend("half", 1, ("cpu",), features, kernel="nowhere:KERNEL"), Dense()):
        yield


def _refuse(backend: str, feature: str) -> None:
    raise UnsupportedFeatureError(backend, feature, "planned", (), (backend,))


def test_only_what_is_declared_counts():
    assert supports("half", Feature.CAUSAL)
    assert not supports("half", Feature.BIAS)
    assert not supports("half", Feature.CAUSAL, Feature.SINKS)


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
