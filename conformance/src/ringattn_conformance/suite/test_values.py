# SPDX-License-Identifier: Apache-2.0
"""Values from the whole range of each option and size, edges included: the draw of the release and one of today."""

from ringattn_conformance.lattice import Point
from ringattn_conformance.outcomes import agrees
from ringattn_conformance.ranks import place


def test_a_value_from_its_whole_range(ringattn_backend: str, ringattn_value: Point):
    agrees(place(ringattn_value.case, ringattn_value.placement, ringattn_backend))
