# SPDX-License-Identifier: Apache-2.0
"""The backend that runs everywhere: blockwise attention in `jax.lax`."""

from ringattn_core import per_shard

ring_attention = per_shard("xla")
