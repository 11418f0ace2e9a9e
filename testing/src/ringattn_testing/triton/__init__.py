# SPDX-License-Identifier: Apache-2.0
"""Blocks, small kernels, and budgets of compiled kernels for the tests of the Triton backend."""
