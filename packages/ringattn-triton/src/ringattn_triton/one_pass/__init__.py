# SPDX-License-Identifier: Apache-2.0
"""Attention's backward pass in one kernel, for Hopper."""
