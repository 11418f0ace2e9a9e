# SPDX-License-Identifier: Apache-2.0
"""The backend for TPUs: ring attention with Pallas kernels."""

from ringattn_core import per_shard

ring_attention = per_shard("tpu")
