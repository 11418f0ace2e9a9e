# SPDX-License-Identifier: Apache-2.0
"""Correct and broken kernels that the tests of the conformance suite judge it by."""
