# SPDX-License-Identifier: Apache-2.0
"""The suite that certifies ring-attention backends."""
