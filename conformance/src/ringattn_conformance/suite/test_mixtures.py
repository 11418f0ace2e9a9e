# SPDX-License-Identifier: Apache-2.0
"""Calls with many options at once, generated so that every pair of declared options, dtypes and layouts is tried."""

from ringattn_core.contract.features import Feature

from ringattn_conformance import tolerances
from ringattn_conformance.mixtures import Mixture
from ringattn_conformance.outcomes import owed, supports
from ringattn_conformance.ranks import answer_of, place, run


def _agrees(mixture: Mixture, backend: str, gradients: bool) -> None:
    case, placement = mixture.case, mixture.placement
    placed = place(case, placement, backend)
    with owed(backend, case.needs | placement.needs | ({Feature.GRADIENTS} if gradients else set())):
        got = run(placed, gradients)
        tolerances.check(got, answer_of(case, placement.ring), case, placed.inputs, f"on {placed.placement}")


def test_many_options_at_once(ringattn_backend: str, ringattn_mixture: Mixture):
    _agrees(ringattn_mixture, ringattn_backend, supports(ringattn_backend, Feature.GRADIENTS))


def test_many_options_at_once_without_gradients(ringattn_backend: str, ringattn_forward_mixture: Mixture):
    _agrees(ringattn_forward_mixture, ringattn_backend, gradients=False)
