# SPDX-License-Identifier: Apache-2.0
"""A call that needs a feature that the backend does not declare raises, and names the backend."""

import dataclasses

import jax
import pytest
from ringattn_core.contract.features import Feature

from ringattn_conformance import tiers
from ringattn_conformance.cases import CASES, DTYPES, Case
from ringattn_conformance.outcomes import owed, supports
from ringattn_conformance.ranks import Placed, Placement, place, with_gradients

OF_LAYOUTS = {Feature.ZIGZAG: "zigzag", Feature.STRIPED: "striped"}


def _call(feature: Feature, backend: str) -> Placed:
    """A call that needs `feature` and as few other features as possible, in a dtype that the backend declares."""
    wanted = [case for case in CASES if feature in case.needs and feature not in OF_LAYOUTS]
    case = min(wanted, key=lambda case: len(case.needs), default=Case("short"))
    dtypes = [name for name in DTYPES if supports(backend, Feature[name.upper()])]
    if dtypes and feature.name.lower() not in DTYPES:
        case = dataclasses.replace(case, dtype=dtypes[0])
    return place(case, Placement(2, OF_LAYOUTS.get(feature, "contiguous"), emulated=True), backend)


@tiers.core
@pytest.mark.parametrize("feature", Feature, ids=lambda feature: feature.name)
def test_a_feature_is_answered_or_refused(ringattn_backend: str, feature: Feature):
    placed = _call(feature, ringattn_backend)
    with owed(ringattn_backend, placed.case.needs | placed.placement.needs | {feature}):
        if feature is Feature.GRADIENTS:
            jax.eval_shape(with_gradients(placed.everywhere()), placed.operands, placed.fixed, placed.cotangents)
        else:
            jax.eval_shape(placed.everywhere(), placed.operands, placed.fixed)
