# SPDX-License-Identifier: Apache-2.0
"""Which backends are installed, and which one runs a call."""
