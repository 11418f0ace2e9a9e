# SPDX-License-Identifier: Apache-2.0
"""What a call must do: give the right answer if the backend declares every feature it needs, or else raise."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

import pytest
from ringattn_core.backends import discovery
from ringattn_core.contract.features import Feature
from ringattn_core.errors import UnsupportedFeatureError

from . import comparison, culprits, oracle
from .cases import DTYPES, Case
from .ranks import Local, Placed, run


def features_of(backend: str) -> frozenset[Feature]:
    """The features that a backend declares to support in full."""
    return frozenset(filter(discovery.get(backend).descriptor().supports, Feature))


def supports(backend: str, *features: Feature) -> bool:
    return features_of(backend).issuperset(features)


def declared(backend: str, case: Case, *kept: Feature) -> Case:
    """The case without what the backend does not declare, so that tests of other promises still run.

    Options that need only features in `kept` stay, even if undeclared. An undeclared dtype becomes the first declared
    one of `DTYPES`; the suite starts for no backend without one.
    """
    features = features_of(backend).union(kept)
    dtypes = [name for name in DTYPES if Feature[name.upper()] in features]
    if case.dtype not in dtypes:
        case = dataclasses.replace(case, dtype=dtypes[0])
    return case.within(features).with_heads_for(backend)


@contextlib.contextmanager
def owed(backend: str, features: Iterable[Feature]) -> Iterator[bool]:
    """Wraps the call of a test: yields True if the backend declares all `features`, so the answer must be right.

    Otherwise yields False, and the body must raise UnsupportedFeatureError with the backend and one missing feature.
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
    """Asserts that a call gives the oracle's outputs and gradients, within tolerance.

    If the backend does not declare a feature that the call needs, or if the heads are larger than its `largest_head`,
    asserts that the call raises UnsupportedFeatureError. `gradients=None` compares gradients if the backend declares
    them and the case is not `forward` only. `needs` adds features to those of the case and the placement; `local`
    replaces the call that each rank makes, and `problem` the case's problem for the oracle.
    """
    case, placement, inputs = placed.case, placed.placement, placed.inputs
    gradients = supports(placed.backend, Feature.GRADIENTS) and not case.forward if gradients is None else gradients
    asked = {*needs, Feature.GRADIENTS} if gradients else {*needs}
    if case.too_wide_for(placed.backend):
        with pytest.raises(UnsupportedFeatureError, match=placed.backend):
            run(placed, gradients, local)
        return
    with owed(placed.backend, case.needs | placement.needs | asked) as right:
        got = run(placed, gradients, local)
        if right:
            answer = case.answer if problem is None else oracle.attend(problem, inputs.dout, inputs.dlse)
            try:
                comparison.check(got, answer, case, f"on {placement}")
            except comparison.Wrong as wrong:
                if local is not None or problem is not None:
                    raise
                more = culprits.found(placed, gradients)
                raise comparison.Wrong("\n  ".join([str(wrong), *more])) from None
