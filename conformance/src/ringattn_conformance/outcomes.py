# SPDX-License-Identifier: Apache-2.0
"""What a call must do: give the right answer if the backend declares every feature it needs, and raise if not."""

import contextlib
from collections.abc import Iterable, Iterator

import pytest
from ringattn_core.backends import discovery
from ringattn_core.contract.features import Feature
from ringattn_core.errors import UnsupportedFeatureError

from . import oracle, tolerances
from .cases import Case
from .ranks import Local, Placed, run


def features_of(backend: str) -> frozenset[Feature]:
    """The features that a backend declares to support in full."""
    return frozenset(filter(discovery.get(backend).descriptor().supports, Feature))


def supports(backend: str, *features: Feature) -> bool:
    return features_of(backend).issuperset(features)


def declared(backend: str, case: Case, *kept: Feature) -> Case:
    """The case without options that the backend does not declare, so that a test of something else still runs."""
    return case.within(features_of(backend).union(kept))


@contextlib.contextmanager
def owed(backend: str, features: Iterable[Feature]) -> Iterator[bool]:
    """Runs its body, which makes the call. Yields whether the answer must be right; if not, the call must raise.

    The refusal names the backend and one of the features.
    """
    features = frozenset(features)
    missing = features - features_of(backend)
    if not missing:
        yield True
        return
    with pytest.raises(UnsupportedFeatureError) as refusal:
        yield False
    assert refusal.value.backend == backend
    assert any(feature.name in refusal.value.feature for feature in missing), str(refusal.value)


def agrees(
    placed: Placed,
    gradients: bool | None = None,
    *,
    needs: Iterable[Feature] = (),
    local: Local | None = None,
    problem: oracle.Problem | None = None,
) -> None:
    """Asserts that the outputs and the gradients of a call are the oracle's for the problem, or that it is refused.

    Without `gradients` they are compared if the backend declares them; without `problem` it is that of the case.
    `needs` are features beside those of the case and of the placement.
    """
    case, placement, inputs = placed.case, placed.placement, placed.inputs
    gradients = supports(placed.backend, Feature.GRADIENTS) and not case.forward if gradients is None else gradients
    asked = {*needs, Feature.GRADIENTS} if gradients else {*needs}
    largest = discovery.get(placed.backend).descriptor().largest_head
    if largest is not None and case.widest > largest:
        with pytest.raises(UnsupportedFeatureError, match=placed.backend):
            run(placed, gradients, local)
        return
    with owed(placed.backend, case.needs | placement.needs | asked) as right:
        got = run(placed, gradients, local)
        if right:
            answer = case.answer if problem is None else oracle.attend(problem, inputs.dout, inputs.dlse)
            tolerances.check(got, answer, case, inputs, f"on {placement}")
