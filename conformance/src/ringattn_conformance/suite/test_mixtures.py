# SPDX-License-Identifier: Apache-2.0
"""Calls with many options at once, generated so that every pair of declared options, dtypes and layouts is tried."""

from ringattn_conformance.lattice import Point
from ringattn_conformance.outcomes import agrees
from ringattn_conformance.ranks import place


def test_many_options_at_once(ringattn_backend: str, ringattn_mixture: Point):
    agrees(place(ringattn_mixture.case, ringattn_mixture.placement, ringattn_backend))


def test_many_options_at_once_without_gradients(ringattn_backend: str, ringattn_forward_mixture: Point):
    one = ringattn_forward_mixture
    agrees(place(one.case, one.placement, ringattn_backend), gradients=False)
