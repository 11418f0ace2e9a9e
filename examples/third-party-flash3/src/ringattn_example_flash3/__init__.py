# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3 as a backend."""
