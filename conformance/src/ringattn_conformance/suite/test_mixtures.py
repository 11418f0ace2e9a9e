# SPDX-License-Identifier: Apache-2.0
"""Calls with many options at once, generated so that every pair of declared options, dtypes and layouts is tried."""

from ringattn_core.contract.features import Feature

from ringattn_conformance.mixtures import Mixture
from ringattn_conformance.outcomes import agrees, supports


def test_many_options_at_once(ringattn_backend: str, ringattn_mixture: Mixture):
    gradients = supports(ringattn_backend, Feature.GRADIENTS)
    agrees(ringattn_mixture.case, ringattn_mixture.placement, ringattn_backend, gradients)


def test_many_options_at_once_without_gradients(ringattn_backend: str, ringattn_forward_mixture: Mixture):
    agrees(ringattn_forward_mixture.case, ringattn_forward_mixture.placement, ringattn_backend, gradients=False)
