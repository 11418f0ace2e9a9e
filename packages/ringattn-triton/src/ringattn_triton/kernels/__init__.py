# SPDX-License-Identifier: Apache-2.0
"""Triton code that both the portable kernels and the Hopper kernels use."""
