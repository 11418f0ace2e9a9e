# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4 as a backend."""
