# SPDX-License-Identifier: Apache-2.0
"""Blocks, programs, and budgets of compiled programs for the tests of the TPU backend."""
